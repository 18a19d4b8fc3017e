"""`run_explain` and `run_evaluate`: subspaces from a file, on images from a folder."""

from __future__ import annotations

import csv
import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drsa_core import Subspaces
from drsa_core.evaluation import peakness, separability
from drsa_core.storage import write_atomically

from .audit_steps import Explained, explain, flip_patches, forward_seconds, noted
from .concepts import take_out
from .errors import BadInput
from .findings import shares
from .folders import TargetClass, find_files, find_target
from .opening import RunSettings, open_model
from .progress import Progress
from .session import Session, open_session
from .work import Work, check_out, read_json, subspaces_digest, work_folder, write_json

#: Which pictures `run_explain` has written into a folder.
PICTURES = "pictures.json"
#: Pictures: squares of so many pixels have one colour, which calms the grain; dots per inch.
POOL, DPI = 4, 90


@dataclass(frozen=True, kw_only=True)
class ExplainSettings(RunSettings):
    """What decides maps of given concepts, beside what `RunSettings` and `ModelSettings` hold.

    With `force`, subspaces are used that were made for another model, layer, class or method.

    Attributes
    ----------
    concepts : path
        File of `Subspaces`, as `run_fit` writes it.
    images : path
        Folder of images, or of class folders.
    out : path
        Folder (`run_explain`) or file (`run_evaluate`) to write.
    target : str or int, optional
        Default: the class that the subspaces were learned for.
    """

    concepts: Path
    images: Path
    out: Path
    target: str | int | None = None


def run_explain(settings: ExplainSettings, progress: Progress) -> dict[str, Any]:
    """Write a picture of each image with its maps, relevance.csv, and the maps themselves."""
    work = Work(settings.out)
    session, subspaces, explained, _ = _explained(settings, work, progress)
    with (
        progress.step("pictures", f"Drawing {len(explained)} pictures"),
        _only_new_pictures(work.folder, [_picture(n, name) for n, name in enumerate(explained.names)]),
    ):
        _draw(explained, subspaces, work.folder)
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


def run_evaluate(settings: ExplainSettings, progress: Progress) -> dict[str, Any]:
    """Patch flipping, ablation, scores of the maps, and the certificate, as JSON."""
    check_out(settings.out)
    work = Work(work_folder(settings.out))
    session, subspaces, explained, key = _explained(settings, work, progress)
    inputs = session.network.preprocessing.to_inputs(explained.pixels).to(session.device)
    forward = forward_seconds(session, inputs)
    flipping = flip_patches(session, explained, work, key, forward)

    def ablation() -> Any:
        with progress.step("ablation", f"Taking concepts out of {len(explained)} images"):
            return take_out(session, inputs, subspaces, None)

    with noted(session, work.place("ablation", key, ".notes.json")):
        found = work.remembered("ablation", key, ablation)
    maps = explained.maps[:, :, None]
    result = {
        "images": len(explained),
        "target": session.target.name,
        "method": session.choice.reason,
        "flipping": flipping,
        "ablation": found,
        "separability": float(separability(maps).mean()),
        "peakness": float(peakness(maps).mean()),
        "certificate": explained.certificate,
        "notes": progress.notes,
        "seconds": progress.seconds,
    }
    write_json(settings.out, result)
    return result


def _explained(
    settings: ExplainSettings, work: Work, progress: Progress
) -> tuple[Session, Subspaces, Explained, dict[str, Any]]:
    with progress.step("prepare", "Loading the model and the images"):
        subspaces = load_subspaces(settings.concepts)
        made = subspaces.provenance
        network, n_outputs = open_model(settings)
        if settings.target is not None:
            target = find_target(network, n_outputs, str(settings.target), [settings.images])
        elif made is None or not isinstance(made.target, int):
            raise BadInput(f"{settings.concepts} does not say which class it is for; name it with --target")
        else:
            about = subspaces.metadata.get("explained_class", {})
            index = about.get("index", made.target)
            target = TargetClass(made.target, index, about.get("name", f"class {index}"))
        found = find_files(settings.images, target)
        if found.doubt:
            progress.note(found.doubt)
        files, known_dim = found.own, None if made is None else made.channel_dim
        session, first = open_session(
            settings,
            network,
            target,
            files,
            progress,
            layer=None if made is None else made.layer,
            channel_dim=known_dim if settings.channel_dim is None else settings.channel_dim,
        )
        if session.layer.n_features != subspaces.n_features:
            raise BadInput(
                f"{settings.concepts} has {subspaces.n_features} features, but layer {session.layer.name} of "
                f"{settings.name} has {session.layer.n_features}"
            )
    key = {
        **session.decided_by(files),
        "subspaces": subspaces_digest(subspaces),
        "names": [file.name for file in files],
    }
    forward = forward_seconds(session, first)
    explained = explain(session, files, subspaces, work.place("maps", key), forward)
    return session, subspaces, explained, key


def load_subspaces(file: Path) -> Subspaces:
    """Subspaces from a file; `BadInput` if it holds none."""
    try:
        return Subspaces.load(file)
    except (ValueError, OSError) as error:
        raise BadInput(str(error)) from error


def _draw(explained: Explained, subspaces: Subspaces, folder: Path) -> None:
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
        write_atomically(folder / _picture(n, name), file.getvalue())


def _picture(n: int, name: str) -> str:
    # Names of files have at most 255 bytes, also while they are written under a longer one.
    stem = Path(name).stem.encode()[:200].decode(errors="ignore")
    return f"{n:04d}_{stem}.png"


@contextmanager
def _only_new_pictures(folder: Path, names: list[str]) -> Iterator[None]:
    """Write pictures of these names; those that an earlier run has written into the folder are then gone.

    The folder keeps a list of what a run writes, so that no other file is touched.
    """
    kept = folder / PICTURES
    before = set(read_json(kept)) if kept.exists() else set()
    write_json(kept, sorted(before | set(names)))  # a run that is interrupted leaves some of both
    yield
    for name in before - set(names):
        if Path(name).name == name and name.endswith(".png"):
            (folder / name).unlink(missing_ok=True)
    write_json(kept, names)


def _write_table(explained: Explained, subspaces: Subspaces, file: Path) -> None:
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["image", "score", "rank", *subspaces.names])
    for n, name in enumerate(explained.names):
        values = [float(explained.score[n]), *explained.relevance[n].tolist()]
        shown = [f"{value:.6g}" if math.isfinite(value) else "" for value in values]
        table.writerow([name, shown[0], int(explained.rank[n]) or "", *shown[1:]])
    write_atomically(file, text.getvalue().encode())
