"""Finding the layer that a user named, in the model that the user gave."""

from __future__ import annotations

import difflib

import torch
from torch import nn


def eager(model: nn.Module) -> nn.Module:
    """The module that is explained: of a `torch.compile`d one, the original, which hooks can reach."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "TorchScript modules do not run the hooks that an explanation needs; give the Python model that "
            "was scripted or traced"
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise TypeError(
            "the model's parameters were made in torch.inference_mode(), and cannot be differentiated; build "
            "or load the model outside of it"
        )
    original = getattr(model, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else model


def find_layer(model: nn.Module, layer: str | nn.Module) -> tuple[str, nn.Module]:
    """Dotted name and module of a layer given as either.

    Raises
    ------
    ValueError
        If the model has no such layer; the closest names are suggested.
    """
    if isinstance(layer, nn.Module):
        layer = getattr(layer, "_orig_mod", layer)
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
    aliases = dict(model.named_modules(remove_duplicate=False))
    if layer in aliases:  # one module, one name: provenances are compared by it
        return next((name, module) for name, module in modules.items() if module is aliases[layer])
    close = difflib.get_close_matches(layer, modules, n=3, cutoff=0.3)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "see model.named_modules()"
    raise ValueError(f"{type(model).__name__} has no layer {layer!r}; {hint}")
