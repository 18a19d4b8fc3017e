"""`audit`: from two folders of images to a report, in one call."""

from __future__ import annotations

import hashlib
import os
import shlex
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drsa_core import Pairs, Subspaces, model_fingerprint
from drsa_core.storage import versions
from torch import nn

from .audit_steps import Explained, explain, flip_patches, noted, relevance_of
from .backend_choice import NAMES
from .concepts import Learned, take_out
from .errors import BadInput
from .fitting import FitSettings, Training, collect_class, learn_class, open_training
from .folders import ImageFiles, find_files
from .networks import Network
from .progress import Progress
from .record import AuditRecord
from .report import Verdict, make_verdict, write_report
from .session import Session
from .work import check_out, files_digest

#: Images of other classes, at most, whose concepts are looked at: in all, and of one class.
MAX_OTHERS, MAX_OF_ONE_CLASS = 60, 10
SUBSPACES = "subspaces.safetensors"
#: Options of the command that are not called as the setting.
_OPTIONS = {"channel_order": "--channels"}


@dataclass(frozen=True, kw_only=True)
class AuditSettings(FitSettings):
    """What decides an audit, beside what `FitSettings` and `ModelSettings` hold.

    Attributes
    ----------
    test : path
        Folder of images to show the concepts on, or of class folders.
    test_images : int
        At most so many of the class.
    flipping, ablation : bool
        Whether to run these evaluations.
    names : dict or list, optional
        Names of the concepts.
    """

    test: Path
    test_images: int = 40
    flipping: bool = True
    ablation: bool = True
    names: dict[str, str] | list[str] | None = None


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes
    ----------
    report : path
        The HTML file.
    work : path
        Folder with pairs, subspaces and maps.
    verdict : Verdict
    record : AuditRecord
    explained : Explained
    subspaces : Subspaces
    """

    report: Path
    work: Path
    verdict: Verdict
    record: AuditRecord
    explained: Explained
    subspaces: Subspaces

    def summary(self) -> dict[str, Any]:
        """The audit in a few entries that JSON can hold."""
        names = self.subspaces.names
        return {
            "report": str(self.report),
            "work": str(self.work),
            "target": self.record.target,
            "layer": self.record.layer["name"],
            "method": self.record.method,
            "verdict": self.in_words(self.verdict.lead),
            "facts": [self.in_words(fact) for fact in self.verdict.facts],
            "look_first": [self.in_words(caution.text) for caution in self.verdict.look_first],
            "be_careful": [self.in_words(caution.text) for caution in self.verdict.cautions],
            "shares": dict(zip(names, self.verdict.shares.tolist(), strict=True)),
            "stability": self.record.stability,
            "certificate": self.explained.certificate,
            "seconds": self.record.seconds,
        }

    def in_words(self, text: str) -> str:
        """A sentence of the verdict with the names of the concepts."""
        for k, name in enumerate(self.subspaces.names):
            text = text.replace(f"{{S{k}}}", name)
        return text


def audit(
    model: str | nn.Module | Network,
    *,
    train: str | Path,
    test: str | Path,
    target: str | int,
    out: str | Path,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> Audit:
    """Learn the concepts that a model uses for a class, explain test images by them, and write a report.

    Parameters
    ----------
    model : str, module or Network
        As in `load_network`, or the model itself.
    train, test : path
        Folders of images of the class, or of class folders.
    target : str or int
        The class, by name or number.
    out : path
        The HTML file to write.
    progress : bool or Progress, optional
        Whether to tell on stderr how far it is. Default: on a terminal.
    **settings
        As in `AuditSettings`.

    Examples
    --------
    >>> result = audit(model, train="train", test="val", target=430, out="report.html", size=32, subspaces=2)
    >>> result.report.name
    'report.html'
    """
    known = {field.name for field in fields(AuditSettings)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise TypeError(f"audit has no setting {unknown[0]!r}; there are {', '.join(sorted(known))}")
    chosen = AuditSettings(
        model=model, train=Path(train), test=Path(test), target=target, out=Path(out), **settings
    )
    return run_audit(chosen, progress if isinstance(progress, Progress) else Progress(progress))


def run_audit(settings: AuditSettings, progress: Progress) -> Audit:
    """As `audit`, with all settings in one value."""
    check_out(settings.out)
    training = open_training(settings, progress, (settings.test,))
    session, work, forward = training.session, training.work, training.forward
    test = find_files(settings.test, session.target, settings.test_images)
    pairs = collect_class(training, settings)
    learned, key = learn_class(training, settings, pairs)
    subspaces = named(learned.subspaces, settings.names)
    subspaces.save(work.folder / SUBSPACES)
    if test.doubt:
        progress.note(test.doubt)
    on_test = {**key, "test": files_digest(test.own), "names": [file.name for file in test.own]}
    folder = work.place("explained", on_test)
    explained = explain(session, test.own, subspaces, folder, forward)
    if known := _n_known(training, explained):
        progress.note(
            f"{known} of {len(explained)} test images are among those that the concepts were learned from: "
            "they say nothing about new images"
        )
    evidence = {
        "train_relevance": work.remembered(
            "relevance-train",
            key,
            lambda: relevance_of(
                session, training.inputs, subspaces, "images that were learned from", forward
            ).tolist(),
        ),
        "other_classes": _others(training, test, subspaces, on_test),
        "flipping": flip_patches(session, explained, work, on_test, forward) if settings.flipping else None,
        "ablation": _ablation(training, explained, subspaces, pairs, on_test) if settings.ablation else None,
    }
    with progress.step("report", "Writing the report"):
        record = _record(settings, training, learned, folder, evidence)
        record.save(work.folder)
        write_report(work.folder, settings.out)
    return Audit(settings.out, work.folder, make_verdict(record, explained), record, explained, subspaces)


def rename_concepts(folder: Path, names: dict[str, str] | list[str] | None) -> Subspaces:
    """Give the concepts in the work folder of an audit other names; they are returned."""
    file = folder / AuditRecord.load(folder).subspaces
    subspaces = Subspaces.load(file)
    if names is not None:
        subspaces = named(subspaces, names)
        subspaces.save(file)
    return subspaces


def named(subspaces: Subspaces, names: dict[str, str] | list[str] | None) -> Subspaces:
    """The subspaces under other names; `BadInput` if these do not fit."""
    if names is None:
        return subspaces
    try:
        return subspaces.renamed(names)
    except ValueError as error:
        raise BadInput(str(error)) from error


def command_of(settings: AuditSettings) -> str:
    """The command that makes the report again, with absolute paths."""
    words = ["drsa", "audit", _model_word(settings)]
    for field in fields(AuditSettings):
        value = getattr(settings, field.name)
        if field.name in ("model", "names") or value == field.default:
            continue
        option = _OPTIONS.get(field.name, f"--{field.name.replace('_', '-')}")
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-"))
        elif isinstance(value, Path) or field.name == "weights":
            words += [option, os.path.abspath(value)]
        elif isinstance(value, list | tuple):
            words += [option, ",".join(map(str, value))]
        else:
            words += [option, str(value)]
    return shlex.join(words)


def _model_word(settings: AuditSettings) -> str:
    """How the command names the model."""
    if not isinstance(settings.model, str):
        return "module:factory"
    place, colon, factory = settings.model.rpartition(":")
    if place.endswith(".py"):
        return f"{os.path.abspath(place)}{colon}{factory}"
    return os.path.abspath(settings.model) if settings.model.endswith(".safetensors") else settings.model


def _record(
    settings: AuditSettings, training: Training, learned: Learned, folder: Path, evidence: dict[str, Any]
) -> AuditRecord:
    session, model = training.session, training.session.network.model
    return AuditRecord(
        model={
            "name": settings.name,
            "kind": type(model).__name__,
            "fingerprint": model_fingerprint(model),
        },
        target={"name": session.target.name, "index": session.target.index, "output": session.target.output},
        layer={
            "name": session.layer.name,
            "kind": session.layer.kind,
            "shape": list(session.layer.shape or ()),
        },
        method={
            "backend": session.choice.backend,
            "name": NAMES[session.choice.backend],
            "reason": session.choice.reason,
            "is_other": session.choice.is_other,
        },
        doctor=session.choice.examination,
        subspaces=SUBSPACES,
        explained=folder.name,
        n_train=len(training.inputs),
        history=learned.history,
        stability=learned.stability,
        choice_of_k=learned.choice,
        settings=_settings(settings, session),
        versions=versions(),
        seconds=dict(session.progress.seconds),
        notes=list(session.progress.notes),
        command=command_of(settings),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        **evidence,
    )


def _n_known(training: Training, explained: Explained) -> int:
    """How many test images are the same, once read, as one that is learned from, under whatever name."""
    shown = training.session.network.preprocessing.to_inputs(explained.pixels)
    learned, tested = (
        [hashlib.sha256(image.numpy().tobytes()).digest() for image in images]
        for images in (training.inputs.cpu(), shown)
    )
    return sum(image in learned for image in tested)


def _ablation(
    training: Training, explained: Explained, subspaces: Subspaces, pairs: Pairs, key: dict[str, Any]
) -> Any:
    """What taking concepts out of the network does."""
    session, work = training.session, training.work

    def run() -> Any:
        estimate = training.forward * len(explained) * 4 * (6 + subspaces.n_subspaces)
        with session.progress.step("ablation", f"Taking concepts out of {len(explained)} images", estimate):
            inputs = session.network.preprocessing.to_inputs(explained.pixels).to(session.device)
            return take_out(session, inputs, subspaces, pairs)

    with noted(session, work.place("ablation", key, ".notes.json")):
        return work.remembered("ablation", key, run)


def _others(
    training: Training, test: ImageFiles, subspaces: Subspaces, key: dict[str, Any]
) -> dict[str, list[list[float]]]:
    """R_k of some images of other classes, for the explained class."""
    session, names = training.session, list(test.others)
    each = min(MAX_OF_ONE_CLASS, max(1, MAX_OTHERS // max(1, len(names))))
    found = {}
    for name in names[:MAX_OTHERS]:
        files = test.others[name][:each]
        try:
            inputs, _, _ = session.read(files)  # also where R_k are known: what cannot be read is noted
        except BadInput:
            session.progress.note(f"no image of {name} can be read; the class is left out")
            continue
        found[name] = training.work.remembered(
            "relevance-class",
            {**key, "class": name, "files": files_digest(files)},
            lambda name=name, inputs=inputs: relevance_of(  # type: ignore[misc]
                session, inputs, subspaces, f"images of {name}", training.forward
            ).tolist(),
        )
    return found


def _settings(settings: AuditSettings, session: Session) -> dict[str, Any]:
    """All settings as text, with what was chosen where the user named nothing."""
    shown = {
        field.name: getattr(settings, field.name)
        for field in fields(AuditSettings)
        if field.name not in ("model", "names", "out", "work")
    }
    network = session.network
    shown |= {
        "layer": session.layer.name,
        "size": network.size,
        "resize": network.resize,
        "samples": session.samples,
        "device": str(session.device),
    }
    return {name: value if value is None else str(value) for name, value in shown.items()}
