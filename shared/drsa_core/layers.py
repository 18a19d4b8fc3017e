"""Finding the layer that a user named, in the model that the user gave."""

from __future__ import annotations

import difflib

from torch import nn


def find_layer(model: nn.Module, layer: str | nn.Module) -> tuple[str, nn.Module]:
    """Dotted name and module of a layer given as either.

    Raises
    ------
    ValueError
        If the model has no such layer; the closest names are suggested.
    """
    if isinstance(layer, nn.Module):
        for name, module in model.named_modules():
            if module is layer:
                return name, module
        raise ValueError(
            f"the layer {type(layer).__name__} is not a module of this {type(model).__name__}; "
            "take it from the model that is explained, or give its dotted name"
        )
    if not isinstance(layer, str):
        raise TypeError(f"layer must be a module or its dotted name, got {type(layer).__name__}")
    modules = dict(model.named_modules())
    if layer in modules:
        return layer, modules[layer]
    close = difflib.get_close_matches(layer, modules, n=3, cutoff=0.3)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "see model.named_modules()"
    raise ValueError(f"{type(model).__name__} has no layer {layer!r}; {hint}")
