"""`drsa layers`."""

from __future__ import annotations

from typing import Any

import click

from . import options


@click.command()
@options.model_options
@click.option(
    "--depth", type=click.IntRange(1), default=2, show_default=True, help="how deep the tree is shown"
)
@options.output_options
def layers(**given: Any) -> None:
    """The layers of a model with the shapes of their outputs, and the one that suits concepts.

    \b
    drsa layers resnet50
    drsa layers my_package.models:load --size 64 --depth 4
    """
    import torch

    from ..layers import as_tree, inspect_layers, suggested_layer
    from ..opening import open_model

    depth, as_json = given.pop("depth"), given.pop("as_json")
    given.pop("quiet")
    network, n_outputs = open_model(options.model_settings(given))
    device = next(network.model.parameters()).device
    example = torch.zeros(1, 3, network.size, network.size, device=device)
    found = inspect_layers(network.model, example, network.layer)
    best = suggested_layer(found)
    result = {
        "outputs": n_outputs,
        "input": [3, network.size, network.size],
        "suggested": None if best is None else best.name,
        "layers": [
            {"name": info.name, "kind": info.kind, "shape": info.shape, "parameters": info.n_parameters}
            for info in found
            if info.name
        ],
    }
    size = f"3×{network.size}×{network.size}"
    suggested = "no layer is suggested" if best is None else f"suggested: --layer {best.name}"
    options.show(
        result, as_json, [as_tree(found, depth), "", f"input {size}, {n_outputs} outputs; {suggested}"]
    )
