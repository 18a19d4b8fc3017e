"""`run_explain` and `run_evaluate`: subspaces from a file, on images from a folder."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from drsa_core import Subspaces
from drsa_core.atomic_files import write_atomically
from drsa_core.evaluation import peakness, separability
from torch import Tensor

from .audit_steps import Explained, explain, flip_patches, forward_seconds
from .concepts import take_out
from .errors import BadInput
from .findings import shares
from .folders import TargetClass, find_files, find_target
from .opening import ModelSettings, count_outputs, open_network, read_images
from .progress import Progress
from .session import Session, open_session
from .work import Work, check_out, write_json


@dataclass(frozen=True, kw_only=True)
class ExplainSettings(ModelSettings):
    """What decides maps of given concepts, beside what `ModelSettings` holds.

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
    backend, samples, seed, batch_size
        As in `FitSettings`.
    force : bool
        Use subspaces that were made for another model, layer, class or method.
    """

    concepts: Path
    images: Path
    out: Path
    target: str | int | None = None
    backend: str = "lrp"
    samples: int | None = None
    seed: int = 0
    batch_size: int = 4
    force: bool = False


def run_explain(settings: ExplainSettings, progress: Progress) -> dict[str, Any]:
    """Write a picture of each image with its maps, relevance.csv, and the maps themselves."""
    work = Work(settings.out)
    session, subspaces, explained, _ = _explained(settings, work, progress)
    with progress.step("pictures", f"Drawing {len(explained)} pictures"):
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
    work = Work(settings.out.with_suffix(".drsa"))
    session, subspaces, explained, key = _explained(settings, work, progress)
    inputs = session.network.preprocessing.to_inputs(explained.pixels).to(session.device)
    forward = forward_seconds(session, inputs)
    flipping = flip_patches(session, explained, work, key, forward)

    def ablation() -> Any:
        with progress.step("ablation", f"Taking concepts out of {len(explained)} images"):
            return take_out(session, inputs, subspaces, None)

    maps = explained.maps[:, :, None]
    result = {
        "images": len(explained),
        "target": session.target.name,
        "method": session.choice.reason,
        "flipping": flipping,
        "ablation": work.remembered("ablation", key, ablation),
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
        network = open_network(settings)
        device = next(network.model.parameters()).device
        blank = torch.zeros(1, 3, network.size, network.size, device=device)
        n_outputs = count_outputs(network, blank)
        if settings.target is not None:
            target = find_target(network, n_outputs, str(settings.target), [settings.images])
        elif made is None or not isinstance(made.target, int):
            raise BadInput(f"{settings.concepts} does not say which class it is for; name it with --target")
        else:
            about = subspaces.metadata.get("explained_class", {})
            index = about.get("index", made.target)
            target = TargetClass(made.target, index, about.get("name", f"class {index}"))
        files = find_files(settings.images, target).own
        first, _, _ = read_images(network, files[:4], Progress(shown=False), device)
        session = open_session(
            network,
            settings.name,
            target,
            first,
            layer=None if made is None else made.layer,
            backend=settings.backend,
            samples=settings.samples,
            seed=settings.seed,
            batch_size=settings.batch_size,
            progress=progress,
            force=settings.force,
        )
        if session.layer.n_features != subspaces.n_features:
            raise BadInput(
                f"{settings.concepts} has {subspaces.n_features} features, but layer {session.layer.name} of "
                f"{settings.name} has {session.layer.n_features}"
            )
    key = {**session.decided_by(files), "basis": float(subspaces.basis.double().abs().sum())}
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
    from PIL import Image

    from .report.colours import concept_colours
    from .report.pictures import over_photograph, strength

    colours = concept_colours(subspaces.n_subspaces)
    for n, name in enumerate(explained.names):
        limit = strength(explained.maps[n])
        panels = [explained.pixels[n]]
        for maps, colour in zip(explained.maps[n], colours, strict=True):
            panels.append(over_photograph(explained.pixels[n], maps, limit, colour))
        row: Tensor = torch.cat(panels, dim=2)
        file = io.BytesIO()
        array = (row.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(array).save(file, format="PNG")
        write_atomically(folder / f"{n:04d}_{Path(name).stem}.png", [file.getvalue()])


def _write_table(explained: Explained, subspaces: Subspaces, file: Path) -> None:
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["image", "score", "rank", *subspaces.names])
    for n, name in enumerate(explained.names):
        values = [float(explained.score[n]), *explained.relevance[n].tolist()]
        shown = [f"{value:.6g}" if math.isfinite(value) else "" for value in values]
        table.writerow([name, shown[0], int(explained.rank[n]), *shown[1:]])
    write_atomically(file, [text.getvalue().encode()])
