"""`drsa audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from . import options


@click.command()
@options.model_options
@click.option("--train", required=True, type=options.folder, help="images to learn concepts from")
@click.option("--test", required=True, type=options.folder, help="images to show concepts on")
@options.target_option
@click.option("--out", required=True, type=click.Path(path_type=Path), help="the HTML file")
@options.work_option
@options.layer_option
@options.backend_options
@options.fit_options
@click.option("--test-images", type=click.IntRange(1), default=40, show_default=True, help="at most")
@click.option("--flipping/--no-flipping", default=True, show_default=True, help="evaluate by patch flipping")
@click.option(
    "--ablation/--no-ablation", default=True, show_default=True, help="take concepts out of the network"
)
@click.option("--names", type=click.Path(path_type=Path), help="JSON file with names of the concepts")
@options.run_options
@options.output_options
def audit(**given: Any) -> None:
    """From two folders of images to a report.

    MODEL is the name of a torchvision or timm model, a .safetensors file that names its architecture, or
    module:factory of your own. Folders hold images of the class, or class folders such as
    235_german_shepherd.

    \b
    drsa audit efficientnet_lite0 --train pets/train --test pets/val \\
        --target german_shepherd --out report.html
    drsa audit my_package.models:load --weights model.pt --train train --test test \\
        --target 3 --subspaces auto --out report.html

    What is done lies in the folder beside the report: after Ctrl-C the same command goes on.
    """
    from ..auditing import AuditSettings, run_audit

    as_json, progress = given.pop("as_json"), options.make_progress(given.pop("quiet"))
    names = options.read_names(given.pop("names"))
    result = run_audit(AuditSettings(**given, names=names), progress)
    summary = result.summary()
    lines = [summary["verdict"]]
    lines += [f"LOOK HERE FIRST: {text}" for text in summary["look_first"]]
    lines += [f"- {text}" for text in summary["facts"]]
    lines += [f"! {text}" for text in summary["be_careful"]]
    options.show(summary, as_json, [*lines, f"wrote {result.report} (work in {result.work})"])
