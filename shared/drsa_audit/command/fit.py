"""`drsa fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from . import options


@click.command()
@options.model_options
@click.option("--train", required=True, type=options.folder, help="images to learn concepts from")
@options.target_option
@click.option("--out", required=True, type=click.Path(path_type=Path), help="the .safetensors file")
@click.option("--work", type=click.Path(path_type=Path), help="folder for what is done  [default: OUT.drsa]")
@options.layer_option
@options.backend_options
@options.fit_options
@options.run_options
@options.output_options
def fit(**given: Any) -> None:
    """Learn the concepts of a class, and save them.

    \b
    drsa fit efficientnet_lite0 --train pets/train --target german_shepherd \\
        --subspaces auto --out shepherd.safetensors
    """
    from ..fitting import FitSettings, run_fit

    as_json, progress = given.pop("as_json"), options.make_progress(given.pop("quiet"))
    learned = run_fit(FitSettings(**given), progress)
    found = learned.stability
    result = {
        "subspaces": str(given["out"]),
        "names": list(learned.subspaces.names),
        "stability": found,
        "choice": learned.choice,
        "seconds": progress.seconds,
    }
    lines = [f"wrote {given['out']}: {learned.subspaces.n_subspaces} concepts"]
    if found is not None:
        listed = ", ".join(
            f"{name} {index:.2f}{'' if stable else ' (not stable)'}"
            for name, index, stable in zip(
                learned.subspaces.names, found["index"], found["is_stable"], strict=True
            )
        )
        lines.append(f"stability: {listed}; {found['threshold']:.2f} is needed")
    options.show(result, as_json, lines, progress)
