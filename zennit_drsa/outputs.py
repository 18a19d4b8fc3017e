"""What is explained at the output: Zennit's `attr_output`, or a target as both adapters take it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self, TypeAlias

import torch
from drsa_core.targets import Target, select_scores
from torch import Tensor, nn

AttrOutput: TypeAlias = Callable[[Tensor], Tensor]


def is_float(target: object) -> bool:
    return isinstance(target, Tensor) and target.is_floating_point()


def is_attr_output(function: Callable[[Tensor], Any], output: Tensor) -> bool:
    """Whether a function is Zennit's `attr_output`, which gives something of the output's shape.

    Of a model with one output a function of it gives its score, which has the output's shape (N, 1) as well.
    """
    if output.ndim < 2:
        return False
    value = function(output.clone())
    if not isinstance(value, Tensor) or value.shape != output.shape:
        return False
    return output.numel() != len(output) or not _depends_on(function, output)


def _depends_on(function: AttrOutput, output: Tensor) -> bool:
    with torch.enable_grad():
        return function(output.detach().requires_grad_().clone()).requires_grad


def checked_start(attr_output: AttrOutput) -> AttrOutput:
    """The function with a check of what it gives."""

    def start(output: Tensor) -> Tensor:
        if not isinstance(output, Tensor):
            raise TypeError(
                f"the model must return a tensor, got {type(output).__name__}; wrap the model in a module "
                "that returns the scores"
            )
        value: Any = attr_output(output.clone())
        if not isinstance(value, Tensor) or value.shape != output.shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"attr_output must have the output's shape {tuple(output.shape)}, got {got}; for one class "
                "pass a row with a one in its place for each example"
            )
        value = value.clone() if value.is_inference() else value  # a graph may need it
        return value.to(device=output.device, dtype=output.dtype)

    return start


def scores_as_output(target: Target) -> AttrOutput:
    """The scores of a target as Zennit's `Occlusion` takes them: it sums over all axes but the first."""
    return lambda output: select_scores(output, target).reshape(-1, *[1] * (output.ndim - 1))


def terms_of_score(attr_output: AttrOutput) -> AttrOutput:
    """What Zennit's `Occlusion` is to sum to the score: of a tensor, its products with the output."""

    def terms(output: Tensor) -> Tensor:
        value = attr_output(output)
        return value if _depends_on(attr_output, output) else value * output.detach()

    return terms


def gradient_of_score(attr_output: AttrOutput) -> AttrOutput:
    """∂y/∂output for the score y that Zennit's `Occlusion` explains, the sum of `attr_output`."""

    def gradient(output: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = output.detach().clone().requires_grad_()
            value = attr_output(leaf)
        return torch.autograd.grad(value.sum(), leaf)[0] if value.requires_grad else value

    return gradient


class ScoreOf:
    """Scores y (n,) whose gradient by the output is `attr_output`: a target for what integrates gradients.

    `rows` are the outputs of a whole batch, and the number of the example that further outputs belong to.
    """

    def __init__(self, attr_output: AttrOutput, rows: tuple[Tensor, int] | None = None) -> None:
        self._attr_output, self._rows = attr_output, rows
        self._outputs: Tensor | None = None

    def __call__(self, output: Tensor) -> Tensor:
        if self._rows is None:
            self._outputs = output.detach()
            start = self._attr_output(self._outputs)
        else:
            batch, i = self._rows
            start = torch.stack([self._attr_output(_exchanged(batch, i, row))[i] for row in output.detach()])
        product = output * start.detach()
        return product.flatten(1).sum(1) if output.ndim > 1 else product

    def of_example(self, i: int) -> Self:
        """The scores of example i of the batch that this was called with last."""
        return self if self._outputs is None else type(self)(self._attr_output, (self._outputs, i))


def _exchanged(batch: Tensor, i: int, row: Tensor) -> Tensor:
    exchanged = batch.clone()
    exchanged[i] = row
    return exchanged


def targets_in(start: Tensor) -> Any:
    """The outputs that are explained, if every row of a start (N, C) explains a single one."""
    if start.ndim != 2 or not bool(((start != 0).sum(1) == 1).all()):
        return None
    return sorted(set((start != 0).float().argmax(1).tolist()))


def first_nonfinite(model: nn.Module, input: Tensor, attr_output: AttrOutput) -> str:
    """Where NaN or Inf appeared first, found by one more forward and backward pass."""
    if not torch.isfinite(input).all():
        return "the input itself holds NaN or Inf"
    seen: list[str] = []

    def watch(name: str, module: nn.Module, output: object) -> None:
        if not isinstance(output, Tensor):
            return
        if not torch.isfinite(output).all():
            seen.append(f"the activations have NaN or Inf, first at the output of layer {name!r}")
        if output.grad_fn is not None:  # the node, as what follows may change the tensor in place
            output.grad_fn.register_prehook(lambda gradients: note(name, gradients))

    def note(name: str, gradients: tuple[Tensor | None, ...]) -> None:
        if any(gradient is not None and not torch.isfinite(gradient).all() for gradient in gradients):
            seen.append(
                f"NaN or Inf appeared first in what arrives at the output of layer {name!r}, from the rule "
                "above it: look for a zero denominator there and raise the stabiliser"
            )

    with ExitStack() as stack, torch.enable_grad():
        for name, module in model.named_modules():
            if not list(module.children()):
                hook = module.register_forward_hook(lambda m, _, output, name=name: watch(name, m, output))
                stack.callback(hook.remove)
        point = input.detach().clone().requires_grad_()
        output = model(point)
        start = attr_output(output)
        if not seen and not torch.isfinite(start).all():
            return "attr_output holds NaN or Inf"
        if not seen:
            torch.autograd.grad(output, point, start, allow_unused=True)
    return seen[0] if seen else "NaN or Inf appeared below the layer, in the part of one concept"
