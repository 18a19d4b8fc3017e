"""Saying where relevance that is not finite came from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn


def check_finite(
    relevance: Tensor, model: nn.Module, input: Tensor, attr_output_fn: Callable[[Tensor], Tensor]
) -> None:
    """Raise if relevance holds NaN or Inf, and name the layer where it appeared first.

    Nothing but a look at the result is paid for if all is well; else one more pass finds the layer.
    """
    if torch.isfinite(relevance).all():
        return
    n_bad = int((~torch.isfinite(relevance)).sum())
    raise ValueError(f"the relevance has {n_bad} NaN or Inf values; {_origin(model, input, attr_output_fn)}")


def _origin(model: nn.Module, input: Tensor, attr_output_fn: Callable[[Tensor], Tensor]) -> str:
    seen: list[tuple[str, str]] = []
    names = {module: name for name, module in model.named_modules()}

    def watch(module: nn.Module, args: object, output: object) -> None:
        if not isinstance(output, Tensor):
            return
        name = names[module]
        if not torch.isfinite(output).all():
            seen.append(("activation", name))
        if output.requires_grad:
            # The node rather than the tensor: what follows may change the tensor in place.
            node = output.grad_fn
            if node is not None:
                node.register_prehook(lambda gradients: _note(gradients, name))

    def _note(gradients: tuple[Tensor | None, ...], name: str) -> None:
        if any(g is not None and not torch.isfinite(g).all() for g in gradients):
            seen.append(("relevance", name))

    if not torch.isfinite(input).all():
        return "the input itself holds NaN or Inf"
    with ExitStack() as stack:
        for module in model.modules():
            if not list(module.children()):
                stack.callback(module.register_forward_hook(watch).remove)
        point = input.detach().clone().requires_grad_()
        with torch.enable_grad():
            output = model(point)
        if not seen:
            seed = attr_output_fn(output)
            if not torch.isfinite(seed).all():
                return "attr_output holds NaN or Inf"
            torch.autograd.grad(output, point, seed, allow_unused=True)
    if not seen:
        return "it appeared below the layer, in the part of one concept"
    kind, name = seen[0]
    if kind == "activation":
        return f"the model's own activations do so already, first at the output of layer {name!r}"
    return (
        f"they appeared first in the relevance that arrives at the output of layer {name!r}, from the rule "
        "above it: look for a zero denominator there and raise the stabiliser"
    )
