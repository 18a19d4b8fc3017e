"""`drsa evaluate`."""

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
@click.option("--test", "images", required=True, type=click.Path(path_type=Path), help="folder of images")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="the JSON file")
@click.option("--target", metavar="CLASS", help="another class than that of the subspaces")
@options.backend_options
@options.run_options
@options.output_options
def evaluate(**given: Any) -> None:
    """How good the concepts are on other images: patch flipping, ablation, what adds up to what.

    \b
    drsa evaluate efficientnet_lite0 --subspaces shepherd.safetensors --test pets/val \\
        --out evaluation.json
    """  # fmt: skip
    from ..explaining import ExplainSettings, run_evaluate
    from ..findings import correlation_text

    as_json, progress = given.pop("as_json"), options.make_progress(given.pop("quiet"))
    result = run_evaluate(ExplainSettings(**given), progress)
    curves = result["flipping"]["curves"]
    lines = [
        "area under the flipping curve (lower is better): "
        + ", ".join(f"{name} {curve['aupc']:.3g}" for name, curve in curves.items()),
        f"correlation of relevance and effect: {correlation_text(result['ablation']['correlation'])}",
        f"wrote {given['out']}",
    ]
    options.show(result, as_json, lines, progress)
