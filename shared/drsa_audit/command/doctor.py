"""`drsa doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from . import options
from .codes import NOT_VALID


@click.command()
@options.model_options
@click.option("--images", type=click.Path(path_type=Path), help="folder of images  [default: noise]")
@click.option("--layer", help="where concepts are to be found: rules differ above and below it")
@click.option("--table", is_flag=True, help="print the relevance of every layer")
@options.output_options
def doctor(**given: Any) -> None:
    """Is LRP valid on this model, and with which rules? Exit code 3 if it is not.

    \b
    drsa doctor resnet50 --images photographs
    drsa doctor vit_small_patch16_224 --json
    """
    import torch

    from ..backend_choice import choose_backend
    from ..errors import BadInput
    from ..images import photo_files
    from ..opening import count_outputs, open_network, read_first
    from ..session import find_concept_layer

    as_json, table, folder = given.pop("as_json"), given.pop("table"), given.pop("images")
    layer = given.pop("layer")
    given.pop("quiet")
    network = open_network(options.model_settings(given))
    device = next(network.model.parameters()).device
    if folder is None:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.rand(2, 3, network.size, network.size, generator=generator)
        inputs = network.preprocessing.to_inputs(pixels).to(device)
    elif not folder.is_dir():
        raise BadInput(f"there is no folder {folder}")
    else:
        inputs = read_first(network, photo_files(folder), 2)
    count_outputs(network, inputs)
    with torch.no_grad():
        target = int(network.model(inputs[:1].clone())[0].argmax())
    try:  # the rules that `drsa fit` would take
        layer = find_concept_layer(network, layer, inputs[:1]).name
    except BadInput:
        if layer is not None:
            raise
    choice = choose_backend("lrp", network, inputs, target, layer=layer)
    found = choice.examination
    lines = [choice.reason]
    if found is not None:
        lines += [f"- {finding}" for finding in found["findings"]]
        lines += [f"suggestion: {found['suggestion']}"] if found["suggestion"] else []
        if table:
            lines += ["layer\tmodule\trule\treceived\thanded down"]
            lines += [
                f"{row['name']}\t{row['kind']}\t{row['rule']}\t{row['received']:.4g}\t{row['handed_down']:.4g}"
                for row in found["layers"]
            ]
    result = {
        "valid": not choice.is_other,
        "backend": choice.backend,
        "reason": choice.reason,
        "doctor": found,
    }
    options.show(result, as_json, lines)
    if choice.is_other:
        raise click.exceptions.Exit(NOT_VALID)
