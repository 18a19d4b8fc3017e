"""Layers that a model calls with keywords, `self.conv(input=x)`.

Forward hooks see positional arguments alone, unless they ask for the others. Zennit 0.5.1 and Captum do not:
their rules would find no input.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from inspect import Parameter, signature
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


def inputs_in_place(modules: Iterable[tuple[str, nn.Module]]) -> list[RemovableHandle]:
    """Hand the first input of these modules on in its place, where a model gives it by its name.

    Parameters
    ----------
    modules : iterable of (name, module)
        Modules with hooks. Those that are there already run after what is registered here.
    """
    return [
        module.register_forward_pre_hook(partial(_in_place, name), prepend=True, with_kwargs=True)
        for name, module in modules
    ]


def _in_place(
    name: str, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if args or not keywords:
        return None
    first = next(iter(signature(module.forward).parameters.values()), None)
    if first is None or first.kind is not Parameter.POSITIONAL_OR_KEYWORD or first.name not in keywords:
        raise ValueError(
            f"module {name!r} ({type(module).__name__}) is called with keywords alone, "
            f"{', '.join(sorted(keywords))}, of which none is its first argument, but rules need its input "
            "there: call it as module(x), or use rules that leave this module out"
        )
    others = dict(keywords)
    return (others.pop(first.name),), others
