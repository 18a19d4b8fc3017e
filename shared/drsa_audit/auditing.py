"""`audit`: from two folders of images to a report, in one call."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from drsa_core import Pairs, Subspaces, model_fingerprint
from drsa_core.storage import versions
from torch import Tensor, nn

from .choice import NAMES
from .concepts import Learned, learn
from .errors import BadInput
from .folders import ImageFiles, find_files, find_target
from .networks import Network
from .opening import ModelSettings, count_outputs, open_network, read_images
from .progress import Progress
from .record import AuditRecord
from .report import Verdict, make_verdict, write_report
from .session import Session, open_session
from .steps import Explained, collect, explain, flip_patches, forward_seconds, relevance_of
from .work import Work, check_out, read_json, write_json

#: Images of other classes, at most, whose concepts are looked at: in all, and of one class.
MAX_OTHERS, MAX_OF_ONE_CLASS = 60, 10
SUBSPACES = "subspaces.safetensors"


@dataclass(frozen=True, kw_only=True)
class AuditSettings(ModelSettings):
    """What decides an audit, beside what `ModelSettings` holds.

    Attributes
    ----------
    train, test : path
        Folders of images, or of class folders: to learn concepts from, and to show them on.
    target : str or int
        The class that is explained, by name or number.
    out : path
        The HTML file.
    work : path, optional
        Folder for what is done so far. Default: beside the report, with the ending .drsa.
    layer : str, optional
        Default: that of the network, or the suggested one.
    backend : {"lrp", "ig", "gxi", "shapley"}
        LRP gives way to Integrated Gradients where it is not valid.
    samples : int, optional
        Permutations of "shapley" or steps of "ig".
    subspaces : int or "auto"
        Number of concepts.
    positions : int
        Positions in an image at which the concepts are learned.
    train_images, test_images : int
        At most so many.
    flipping, stability, ablation : bool
        Whether to run these evaluations.
    names : dict or list, optional
        Names of the concepts.
    seed, batch_size : int
    force : bool
        Go on where the audit would refuse.
    """

    train: Path
    test: Path
    target: str | int
    out: Path
    work: Path | None = None
    layer: str | None = None
    backend: str = "lrp"
    samples: int | None = None
    subspaces: int | str = 4
    positions: int = 20
    train_images: int = 500
    test_images: int = 40
    flipping: bool = True
    stability: bool = True
    ablation: bool = True
    names: dict[str, str] | list[str] | None = None
    seed: int = 0
    batch_size: int = 4
    force: bool = False


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
    >>> result = audit("efficientnet_lite0", train="train", test="val", target="tabby",
    ...                out="report.html", subspaces=4)                                      # doctest: +SKIP
    >>> print(result.verdict.lead)                                                          # doctest: +SKIP
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
    with progress.step("prepare", "Loading the model and the images"):
        network = open_network(settings)
        session, train, test = _open(settings, network, progress)
        work = Work(settings.work or settings.out.with_suffix(".drsa"))
        inputs, _, _ = session.read(train.own)
        forward = forward_seconds(session, inputs)
    pairs = _pairs(session, settings, train, inputs, work, forward)
    learned, key = _concepts(session, settings, pairs, train, work)
    subspaces = _named(learned.subspaces, settings.names)
    subspaces.save(work.folder / SUBSPACES)
    on_test = {**key, "test": session.decided_by(test.own)["files"]}
    folder = work.place("explained", on_test)
    explained = explain(session, test.own, subspaces, folder, forward)
    record = AuditRecord(
        model={
            "name": settings.name,
            "kind": type(network.model).__name__,
            "fingerprint": model_fingerprint(network.model),
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
        n_train=len(inputs),
        train_relevance=work.remembered(
            "relevance-train",
            key,
            lambda: relevance_of(session, inputs, subspaces, "training images", forward).tolist(),
        ),
        other_classes=_others(session, test, subspaces, work, on_test, forward),
        history=learned.history,
        stability=learned.stability,
        choice_of_k=learned.choice,
        flipping=flip_patches(session, explained, work, on_test, forward) if settings.flipping else None,
        ablation=None,
        settings=_settings(settings, session),
        versions=versions(),
        seconds=dict(progress.seconds),
        notes=list(progress.notes),
        command=command_of(settings),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    with progress.step("report", "Writing the report"):
        record.save(work.folder)
        write_report(work.folder, settings.out)
    return Audit(settings.out, work.folder, make_verdict(record, explained), record, explained, subspaces)


def command_of(settings: AuditSettings) -> str:
    """The command that makes the report again, with absolute paths."""
    words = ["drsa", "audit", settings.name if isinstance(settings.model, str) else "module:factory"]
    for field in fields(AuditSettings):
        value = getattr(settings, field.name)
        if field.name in ("model", "names") or value == field.default:
            continue
        option = f"--{field.name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-"))
        elif isinstance(value, Path):
            words += [option, os.path.abspath(value)]
        elif isinstance(value, list | tuple):
            words += [option, ",".join(map(str, value))]
        else:
            words += [option, str(value)]
    return shlex.join(words)


def _open(
    settings: AuditSettings, network: Network, progress: Progress
) -> tuple[Session, ImageFiles, ImageFiles]:
    """Resolve class, files, layer and method; nothing long is begun before all of them are right."""
    for folder in (settings.train, settings.test):
        if not folder.is_dir():
            raise BadInput(f"there is no folder {folder}")
    device = next(network.model.parameters()).device
    example = torch.zeros(1, 3, network.size, network.size, device=device)
    n_outputs = count_outputs(network, example)
    target = find_target(network, n_outputs, str(settings.target), [settings.train, settings.test])
    train = find_files(settings.train, target, settings.train_images)
    test = find_files(settings.test, target, settings.test_images)
    first, _, _ = read_images(network, train.own[:4], Progress(shown=False), device)
    session = open_session(
        network,
        settings.name,
        target,
        first,
        layer=settings.layer,
        backend=settings.backend,
        samples=settings.samples,
        seed=settings.seed,
        batch_size=settings.batch_size,
        progress=progress,
        force=settings.force,
    )
    if session.layer.is_cut is False:
        progress.note(f"paths go around layer {session.layer.name}: what takes them is in no concept map")
    return session, train, test


def _pairs(
    session: Session, settings: AuditSettings, train: ImageFiles, inputs: Tensor, work: Work, forward: float
) -> Pairs:
    key = {**session.decided_by(train.own), "positions": settings.positions}
    return collect(session, inputs, settings.positions, work.place("pairs", key), forward)


def _concepts(
    session: Session, settings: AuditSettings, pairs: Pairs, train: ImageFiles, work: Work
) -> tuple[Learned, dict[str, Any]]:
    key = {
        **session.decided_by(train.own),
        "positions": settings.positions,
        "subspaces": settings.subspaces,
        "stability": settings.stability,
    }
    file, about = work.place("learned", key, ".safetensors"), work.place("learned", key, ".json")
    if not (file.exists() and about.exists()):
        with session.progress.step("concepts", "Learning the concepts"):
            learned = learn(
                pairs, settings.subspaces, settings.seed, settings.stability, session.progress.shown
            )
        learned.subspaces.save(file)
        write_json(
            about,
            {"history": learned.history, "stability": learned.stability, "choice": learned.choice},
        )
    return Learned(Subspaces.load(file), **read_json(about)), key


def _others(
    session: Session,
    test: ImageFiles,
    subspaces: Subspaces,
    work: Work,
    key: dict[str, Any],
    forward: float,
) -> dict[str, list[list[float]]]:
    """R_k of some images of other classes, for the explained class."""
    names = list(test.others)
    each = min(MAX_OF_ONE_CLASS, max(1, MAX_OTHERS // max(1, len(names))))
    chosen = {name: test.others[name][:each] for name in names[:MAX_OTHERS]}

    def relevance(name: str) -> list[list[float]]:
        inputs, _, _ = session.read(chosen[name])
        found: list[list[float]] = relevance_of(
            session, inputs, subspaces, f"images of {name}", forward
        ).tolist()
        return found

    return {
        name: work.remembered(
            "relevance-class",
            {**key, "class": name, "files": session.decided_by(files)["files"]},
            lambda name=name: relevance(name),  # type: ignore[misc]
        )
        for name, files in chosen.items()
    }


def _named(subspaces: Subspaces, names: dict[str, str] | list[str] | None) -> Subspaces:
    if names is None:
        return subspaces
    try:
        return subspaces.renamed(names)
    except ValueError as error:
        raise BadInput(str(error)) from error


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
