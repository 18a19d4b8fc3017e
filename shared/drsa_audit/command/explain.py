"""`drsa explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from . import options


@click.command()
@options.model_options
@click.option(
    "--subspaces", "concepts", required=True, type=click.Path(path_type=Path), help="file of `drsa fit`"
)
@click.option("--images", required=True, type=click.Path(path_type=Path), help="folder of images")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="folder for maps and pictures")
@click.option("--target", metavar="CLASS", help="another class than that of the subspaces")
@options.backend_options
@options.run_options
@options.output_options
def explain(**given: Any) -> None:
    """Concept maps of images: one picture for each, R_k as CSV, and the maps as .safetensors.

    \b
    drsa explain efficientnet_lite0 --subspaces shepherd.safetensors --images new --out maps
    """  # fmt: skip
    from ..explaining import ExplainSettings, run_explain

    as_json, progress = given.pop("as_json"), options.make_progress(given.pop("quiet"))
    result = run_explain(ExplainSettings(**given), progress)
    lines = [f"wrote {result['images']} pictures, relevance.csv and maps to {result['out']}"]
    lines += [f"{name}: {share:.0%} of the evidence" for name, share in result["shares"].items()]
    options.show(result, as_json, lines, progress)
