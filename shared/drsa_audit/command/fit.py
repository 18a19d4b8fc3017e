"""`drsa fit`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import options

if TYPE_CHECKING:
    from drsa_core import ClassIndex

    from ..progress import Progress


@click.command()
@options.model_options
@click.option("--train", required=True, type=options.folder, help="images to learn concepts from")
@options.target_option
@click.option("--out", required=True, type=click.Path(path_type=Path), help="the .safetensors file")
@options.work_option
@options.layer_option
@options.backend_options
@options.fit_options
@options.run_options
@options.output_options
def fit(**given: Any) -> None:
    """Learn the concepts of a class, and save them; with `--target all`, of every class folder.

    \b
    drsa fit efficientnet_lite0 --train pets/train --target german_shepherd \\
        --subspaces auto --out shepherd.safetensors

    For all classes, OUT is a folder, and several processes or GPUs may share the work:

    \b
    torchrun --nproc-per-node 4 --no-python drsa fit efficientnet_lite0 \\
        --train pets/train --target all --out pets_concepts
    """
    from ..fitting import FitSettings, run_fit
    from ..many import ALL, check_alone, run_fit_all

    as_json, progress = given.pop("as_json"), options.make_progress(given.pop("quiet"))
    settings = FitSettings(**given)
    check_alone(settings)
    if settings.target == ALL:
        index = run_fit_all(settings, progress)
        if int(os.environ.get("RANK", "0")) == 0:
            _show_all(index, as_json, progress)
        return
    learned = run_fit(settings, progress)
    found = learned.stability
    result = {
        "subspaces": str(given["out"]),
        "names": list(learned.subspaces.names),
        "stability": found,
        "choice": learned.choice,
        "seconds": progress.seconds,
    }
    made = learned.subspaces.provenance
    lines = [f"wrote {given['out']}: {learned.subspaces.n_subspaces} concepts"]
    if made is not None:
        lines.append(f"at layer {made.layer}, by {made.method}")
    if found is not None:
        listed = ", ".join(
            f"{name} {index:.2f}{'' if stable else ' (not stable)'}"
            for name, index, stable in zip(
                learned.subspaces.names, found["index"], found["is_stable"], strict=True
            )
        )
        lines.append(f"stability: {listed}; {found['threshold']:.2f} is needed")
    options.show(result, as_json, lines, progress)


def _show_all(index: ClassIndex, as_json: bool, progress: Progress) -> None:
    classes: dict[str, str] = {}
    for label, entry in index.classes.items():
        name = entry.get("name", str(label))
        # Different classes may have one name, as two of ImageNet's do.
        classes[f"{name} ({label})" if name in classes else name] = entry["file"]
    result = {
        "folder": str(index.folder),
        "classes": classes,
        "failed": {str(label): why for label, why in index.failed.items()},
        "seconds": progress.seconds,
    }
    lines = [f"wrote {index.folder}: concepts of {len(classes)} classes"]
    lines += [f"{name}: {file}" for name, file in classes.items()]
    lines += [f"class {label} failed: {why}" for label, why in index.failed.items()]
    options.show(result, as_json, lines, progress)
