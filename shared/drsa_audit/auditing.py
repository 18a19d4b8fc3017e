"""Whole runs: learn concepts, explain images by them, evaluate them, or all of it with a report."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import os
import shlex
import warnings
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from drsa_core import Pairs, Subspaces, model_fingerprint
from drsa_core.evaluation import peakness, separability
from drsa_core.storage import read_json, versions, write_atomically, write_json
from torch import Tensor, nn

from .findings import shares
from .folders import ImageFiles, TargetClass, check_folder, find_files, find_target
from .networks import Network, count_outputs, open_network
from .progress import BadInput, Progress
from .report import Verdict, make_verdict, write_report
from .results import AuditRecord, Explained
from .session import Session, open_session
from .settings import AuditSettings, EvaluateSettings, ExplainSettings, FitSettings
from .steps import Learned, ablate, collect, explain, flip_patches, learn, relevance_of
from .work import Work, check_out, files_digest, work_folder
from .wrappers import NAMES

#: Images of other classes, at most, whose concepts are looked at: in all, and of one class.
MAX_OTHERS, MAX_OF_ONE_CLASS = 60, 10
SUBSPACES = "subspaces.safetensors"
#: Which pictures `run_explain` has written into a folder.
PICTURES = "pictures.json"
#: Pictures: squares of so many pixels have one colour, which calms the grain; dots per inch.
POOL, DPI = 4, 90


@dataclass(frozen=True)
class Audit:
    """What an audit found."""

    report: Path  # the HTML file
    work: Path  # folder with pairs, subspaces and maps
    verdict: Verdict
    record: AuditRecord
    explained: Explained
    subspaces: Subspaces

    def summary(self) -> dict[str, Any]:
        """The audit in a few entries that JSON can hold."""
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
            "shares": dict(zip(self.subspaces.names, self.verdict.shares.tolist(), strict=True)),
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
    if unknown := sorted(set(settings) - known):
        raise TypeError(f"audit has no setting {unknown[0]!r}; there are {', '.join(sorted(known))}")
    chosen = AuditSettings(
        model=model, train=Path(train), test=Path(test), target=target, out=Path(out), **settings
    )
    return run_audit(chosen, progress if isinstance(progress, Progress) else Progress(progress))


class Training(NamedTuple):
    """The images that concepts are learned from, and what decides their pairs."""

    session: Session
    work: Work
    inputs: Tensor
    key: dict[str, Any]


def run_fit(settings: FitSettings, progress: Progress) -> Learned:
    """Learn the concepts of a class and save them; a run that was interrupted goes on."""
    learned, _, _ = _learn(open_training(settings, progress), settings)
    learned.subspaces.save(settings.out)
    return learned


def open_training(settings: FitSettings, progress: Progress, *folders: Path) -> Training:
    """Resolve model, class, files, layer and method; nothing long is begun before all of them are right.

    Names of classes are looked for in further folders, too.
    """
    check_out(settings.out)
    where = work_folder(settings.out, settings.work)
    with progress.step("prepare", "Loading the model and the images"):
        for folder in (settings.train, *folders):
            check_folder(folder)
        network, wanted = open_network(settings), str(settings.target)
        target = find_target(network, count_outputs(network), wanted, [settings.train, *folders])
        files = find_files(settings.train, target, settings.train_images)
        if files.doubt:
            if not settings.force:
                raise BadInput(f"{files.doubt}; --force learns from them all the same")
            progress.note(files.doubt)
        layer, channel_dim = settings.layer, settings.channel_dim
        session = open_session(settings, network, target, files.own, progress, layer, channel_dim)
        if session.layer.is_cut is False:
            progress.note(f"paths go around layer {session.layer.name}: what takes them is in no concept map")
        inputs, _, _ = session.read(files.own)
        key = {**session.decided_by(files.own), "positions": settings.positions}
        return Training(session, Work(where), inputs, key)


def _learn(training: Training, settings: FitSettings) -> tuple[Learned, Pairs, dict[str, Any]]:
    """Concepts, the pairs that they are learned from, and what decided them."""
    session, work, inputs, key = training
    pairs = collect(session, work, inputs, settings.positions, key)
    chosen = {name: getattr(settings, name) for name in ("subspaces", "balance", "stability")}
    return learn(session, work, pairs, settings, {**key, **chosen}), pairs, {**key, **chosen}


def run_audit(settings: AuditSettings, progress: Progress) -> Audit:
    """As `audit`, with all settings in one value."""
    training = open_training(settings, progress, settings.test)
    session, work, inputs, _ = training
    test = find_files(settings.test, session.target, settings.test_images)
    learned, pairs, key = _learn(training, settings)
    subspaces = learned.subspaces if settings.names is None else learned.subspaces.renamed(settings.names)
    subspaces.save(work.folder / SUBSPACES)
    if test.doubt:
        progress.note(test.doubt)
    on_test = {**key, "test": files_digest(test.own), "names": [file.name for file in test.own]}
    explained = explain(session, work, test.own, subspaces, "explained", on_test)
    if known := _n_known(session, inputs, explained):
        progress.note(
            f"{known} of {len(explained)} test images are among those that the concepts were learned from: "
            "they say nothing about new images"
        )
    what = "images that were learned from"
    evidence: dict[str, Any] = {
        "train_relevance": work.remembered(
            "relevance-train", key, lambda: relevance_of(session, inputs, subspaces, what).tolist()
        ),
        "other_classes": _others(session, work, test, subspaces, on_test),
        "flipping": flip_patches(session, work, explained, on_test) if settings.flipping else None,
    }
    evidence["ablation"] = (
        ablate(session, work, explained, subspaces, pairs, on_test) if settings.ablation else None
    )
    with progress.step("report", "Writing the report"):
        record = AuditRecord(
            subspaces=SUBSPACES,
            explained=work.place("explained", on_test).name,
            n_train=len(inputs),
            history=learned.history,
            stability=learned.stability,
            choice_of_k=learned.choice,
            command=command_of(settings),
            **_about(settings, session),
            **evidence,
        )
        record.save(work.folder)
        write_report(work.folder, settings.out)
    return Audit(settings.out, work.folder, make_verdict(record, explained), record, explained, subspaces)


def run_explain(settings: ExplainSettings, progress: Progress) -> dict[str, Any]:
    """Write a picture of each image with its maps, relevance.csv, and the maps themselves."""
    work = Work(settings.out)
    session, subspaces, explained, _ = _explained(settings, work, progress)
    pictures, listed = [_picture(n, name) for n, name in enumerate(explained.names)], work.folder / PICTURES
    # The folder keeps a list of its pictures, so that of all files those of an earlier run alone are removed.
    before = set(read_json(listed)) if listed.exists() else set()
    write_json(listed, sorted(before | set(pictures)))
    with progress.step("pictures", f"Drawing {len(explained)} pictures"):
        _draw(explained, subspaces, [work.folder / picture for picture in pictures])
    for old in before - set(pictures):
        (work.folder / Path(old).name).unlink(missing_ok=True)
    write_json(listed, pictures)
    _write_table(explained, subspaces, work.folder / "relevance.csv")
    return {
        "out": str(settings.out),
        "images": len(explained),
        "target": session.target.name,
        "method": session.choice.reason,
        "shares": dict(zip(subspaces.names, shares(explained.relevance).tolist(), strict=True)),
        "certificate": explained.certificate,
        "seconds": progress.seconds,
    }


def run_evaluate(settings: EvaluateSettings, progress: Progress) -> dict[str, Any]:
    """Patch flipping, ablation, scores of the maps, and the certificate, as JSON."""
    check_out(settings.out)
    work = Work(work_folder(settings.out))
    session, subspaces, explained, key = _explained(settings, work, progress)
    maps = explained.maps[:, :, None]
    result = {
        "images": len(explained),
        "target": session.target.name,
        "method": session.choice.reason,
        "flipping": flip_patches(session, work, explained, key),
        "ablation": ablate(session, work, explained, subspaces, None, key),
        "separability": float(separability(maps).mean()),
        "peakness": float(peakness(maps).mean()),
        "certificate": explained.certificate,
        "notes": progress.notes,
        "seconds": progress.seconds,
    }
    write_json(settings.out, result)
    return result


def rename_concepts(folder: Path, names: dict[str, str] | list[str] | None) -> Subspaces:
    """Give the concepts in the work folder of an audit other names; they are returned."""
    file = folder / AuditRecord.load(folder).subspaces
    subspaces = Subspaces.load(file)
    if names is None:
        return subspaces
    subspaces.renamed(names).save(file)
    return subspaces.renamed(names)


def command_of(settings: AuditSettings) -> str:
    """The command that makes the report again, with absolute paths."""
    model = settings.model if isinstance(settings.model, str) else "module:factory"
    place, colon, factory = model.rpartition(":")
    if place.endswith(".py"):
        model = f"{os.path.abspath(place)}{colon}{factory}"
    words = ["drsa", "audit", os.path.abspath(model) if model.endswith(".safetensors") else model]
    for field in fields(AuditSettings):
        value = getattr(settings, field.name)
        if field.name in ("model", "names") or value == field.default:
            continue
        option = field.metadata.get("name", f"--{field.name.replace('_', '-')}")
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-"))
        elif isinstance(value, Path) or field.name == "weights":
            words += [option, os.path.abspath(value)]
        elif isinstance(value, list | tuple):
            words += [option, ",".join(map(str, value))]
        else:
            words += [option, str(value)]
    return shlex.join(words)


def _about(settings: AuditSettings, session: Session) -> dict[str, Any]:
    """What the record says of the run, with what was chosen where the user named nothing."""
    network, layer, choice, target = session.network, session.layer, session.choice, session.target
    shown = {
        field.name: getattr(settings, field.name)
        for field in fields(AuditSettings)
        if field.name not in ("model", "names", "out", "work")
    }
    shown |= {"layer": layer.name, "size": network.size, "resize": network.resize, "device": network.device}
    return {
        "model": {"name": settings.model_name, "kind": type(network.model).__name__}
        | {"fingerprint": model_fingerprint(network.model)},
        "target": {"name": target.name, "index": target.index, "output": target.output},
        "layer": {"name": layer.name, "kind": layer.kind, "shape": list(layer.shape or ())},
        "method": {"backend": choice.backend, "name": NAMES[choice.backend]}
        | {"reason": choice.reason, "is_other": choice.is_other},
        "doctor": choice.examination,
        "settings": {name: value if value is None else str(value) for name, value in shown.items()},
        "versions": versions(),
        "seconds": dict(session.progress.seconds),
        "notes": list(session.progress.notes),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _n_known(session: Session, inputs: Tensor, explained: Explained) -> int:
    """How many test images are the same, once read, as one that is learned from, under whatever name."""
    tested = session.network.preprocessing.to_inputs(explained.pixels)
    known = {hashlib.sha256(image.numpy().tobytes()).digest() for image in inputs.cpu()}
    return sum(hashlib.sha256(image.numpy().tobytes()).digest() in known for image in tested)


def _others(
    session: Session, work: Work, test: ImageFiles, subspaces: Subspaces, key: dict[str, Any]
) -> dict[str, list[list[float]]]:
    """R_k of some images of other classes, for the explained class."""
    names = list(test.others)
    each = min(MAX_OF_ONE_CLASS, max(1, MAX_OTHERS // max(1, len(names))))
    found = {}
    for name in names[:MAX_OTHERS]:
        files = test.others[name][:each]
        try:
            inputs, _, _ = session.read(files)  # also where R_k are known: what cannot be read is noted
        except ValueError:
            session.progress.note(f"no image of {name} can be read; the class is left out")
            continue
        found[name] = work.remembered(
            "relevance-class",
            {**key, "class": name, "files": files_digest(files)},
            lambda name=name, inputs=inputs: relevance_of(  # type: ignore[misc]
                session, inputs, subspaces, f"images of {name}"
            ).tolist(),
        )
    return found


def _explained(
    settings: ExplainSettings, work: Work, progress: Progress
) -> tuple[Session, Subspaces, Explained, dict[str, Any]]:
    """Images explained by subspaces from a file, and what decided it."""
    with progress.step("prepare", "Loading the model and the images"):
        subspaces = Subspaces.load(settings.concepts)
        made, channel_dim = subspaces.provenance, settings.channel_dim
        network = open_network(settings)
        if settings.target is not None:
            target = find_target(network, count_outputs(network), str(settings.target), [settings.images])
        elif made is None or not isinstance(made.target, int):
            raise BadInput(f"{settings.concepts} does not say which class it is for; name it with --target")
        else:
            about = subspaces.metadata.get("explained_class", {})
            index = about.get("index", made.target)
            target = TargetClass(made.target, index, about.get("name", f"class {index}"))
        found = find_files(settings.images, target)
        if found.doubt:
            progress.note(found.doubt)
        if made is not None and channel_dim is None:
            channel_dim = made.channel_dim
        layer = None if made is None else made.layer
        session = open_session(settings, network, target, found.own, progress, layer, channel_dim)
        if session.layer.n_features != subspaces.n_features:
            raise BadInput(
                f"{settings.concepts} has {subspaces.n_features} features, but layer {session.layer.name} of "
                f"{settings.model_name} has {session.layer.n_features}"
            )
    key = {
        **session.decided_by(found.own),
        "subspaces": files_digest([settings.concepts]),
        "names": [file.name for file in found.own],
    }
    return session, subspaces, explain(session, work, found.own, subspaces, "maps", key), key


def _draw(explained: Explained, subspaces: Subspaces, files: list[Path]) -> None:
    """For each image a row: photograph, standard map, concept maps, with names and totals."""
    from drsa_core.plot import concept_maps

    pool = POOL if explained.maps.shape[-1] % POOL == explained.maps.shape[-2] % POOL == 0 else 1
    for n, name in enumerate(explained.names):
        title = f"{name}: score {float(explained.score[n]):.3g}"
        figure = concept_maps(
            explained.pixels[n],
            explained.maps[n],
            subspaces.names,
            whole=explained.whole[n],
            title=title,
            pool=pool,
        )
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # names of files may have letters that the font lacks
            figure.savefig(file, format="png", dpi=DPI)
        write_atomically(files[n], file.getvalue())


def _picture(n: int, name: str) -> str:
    # Names of files have at most 255 bytes, also while they are written under a longer one.
    stem = Path(name).stem.encode()[:200].decode(errors="ignore")
    return f"{n:04d}_{stem}.png"


def _write_table(explained: Explained, subspaces: Subspaces, file: Path) -> None:
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["image", "score", "rank", *subspaces.names])
    for n, name in enumerate(explained.names):
        values = [float(explained.score[n]), *explained.relevance[n].tolist()]
        shown = [f"{value:.6g}" if math.isfinite(value) else "" for value in values]
        table.writerow([name, shown[0], int(explained.rank[n]) or "", *shown[1:]])
    write_atomically(file, text.getvalue().encode())
