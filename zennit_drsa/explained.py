"""What is explained at the output: Zennit's `attr_output`, or a target as both adapters take it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeAlias

import torch
from drsa_core.targets import Target, gradient_at_output, select_scores
from torch import Tensor

AttrOutput: TypeAlias = Callable[[Tensor], Tensor]


def start_of_target(target: Target, holds_relevance: bool, n_examples: int | None = None) -> AttrOutput:
    """What the gradient slot holds at the output: ∂y/∂output, times the output for relevance (Note A).

    A function that returns something of the output's shape is Zennit's `attr_output`, and is that already.
    `n_examples` is the number of rows that the output must have.
    """

    def start(output: Tensor) -> Tensor:
        if callable(target) and is_attr_output(target, output):
            value: Any = target(output.clone())  # it may write into what it gets, here and below
            return value
        gradient = gradient_at_output(output, target, n_examples)
        return output.detach() * gradient if holds_relevance else gradient

    return start


def scores_as_output(target: Target) -> AttrOutput:
    """The scores of a target as Zennit's `Occlusion` takes them: it sums over all axes but the first."""
    return lambda output: select_scores(output, target).reshape(-1, *[1] * (output.ndim - 1))


def terms_of_score(attr_output: AttrOutput) -> AttrOutput:
    """What Zennit's `Occlusion` is to sum to the score: of a tensor, its products with the output.

    Given a tensor, Zennit sums that, which is the same number for every window.
    """

    def terms(output: Tensor) -> Tensor:
        value = attr_output(output)
        return value if _depends_on(attr_output, output) else value * output.detach()

    return terms


def gradient_of_score(attr_output: AttrOutput) -> AttrOutput:
    """∂y/∂output for the score y that Zennit's `Occlusion` explains, the sum of `attr_output`.

    A tensor, which does not depend on the output, is that gradient already.
    """

    def gradient(output: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = output.detach().clone().requires_grad_()
            value = attr_output(leaf)
        return torch.autograd.grad(value.sum(), leaf)[0] if value.requires_grad else value

    return gradient


def _depends_on(attr_output: AttrOutput, output: Tensor) -> bool:
    with torch.enable_grad():
        return attr_output(output.detach().requires_grad_().clone()).requires_grad


def is_attr_output(target: Target, output: Tensor) -> bool:
    """Whether a target is Zennit's `attr_output`: none, a tensor of floats, or a function that gives one.

    Of a model with one output a function of it gives its score: that has the output's shape (N, 1) as well.
    """
    if target is None or (isinstance(target, Tensor) and target.is_floating_point()):
        return True
    if not callable(target) or output.ndim < 2:
        return False
    value = target(output.clone())
    if not isinstance(value, Tensor) or value.shape != output.shape:
        return False
    return output.numel() != len(output) or not _depends_on(target, output)


class ScoreOf:
    """Scores y (n,) whose gradient by the output is `attr_output`: a target for what integrates gradients.

    Parameters
    ----------
    attr_output : function
        Output (N, …) ↦ its attribution, of the same shape.
    rows : tensor (N, …) and int, optional
        Outputs of a whole batch, and the number of the example that the rows of further outputs belong to.

    Attributes
    ----------
    is_potential : bool
        Whether `attr_output` was the same for all rows so far. If it depends on the output, no function has
        it as its gradient.
    """

    def __init__(self, attr_output: AttrOutput, rows: tuple[Tensor, int] | None = None) -> None:
        self._attr_output, self._rows = attr_output, rows
        self._outputs: Tensor | None = None
        self._first: Tensor | None = None
        self.is_potential = True

    def __call__(self, output: Tensor) -> Tensor:
        """Scores (n,) of outputs (n, …)."""
        if self._rows is None:
            self._outputs = output.detach()
            start = self._attr_output(output.detach())
        else:
            batch, i = self._rows
            starts = []
            for row in output.detach():
                exchanged = batch.clone()
                exchanged[i] = row
                starts.append(self._attr_output(exchanged)[i])
            start = torch.stack(starts)
            self._first = start[:1] if self._first is None else self._first
            self.is_potential = self.is_potential and bool((start == self._first).all())
        return (output * start.detach()).flatten(1).sum(1) if output.ndim > 1 else output * start.detach()

    def of_example(self, i: int) -> Self:
        """The scores of example i of the batch that this was called with last."""
        if self._outputs is None:
            raise ValueError("the outputs of the batch must be known before those of an example")
        return type(self)(self._attr_output, (self._outputs, i))


def checked_attr_output(attr_output: object) -> Tensor | AttrOutput | None:
    """Zennit's `attr_output`, or an error for what it does not take."""
    if attr_output is None or isinstance(attr_output, Tensor) or callable(attr_output):
        return attr_output
    raise TypeError(
        "attr_output must be a tensor of the output's shape, or a function of the output, got "
        f"{type(attr_output).__name__}; for class 3 of 10 pass torch.eye(10)[[3]]"
    )


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


def targets_in(start: Tensor) -> list[int] | None:
    """The outputs that are explained, if every row of a start (N, C) explains a single one."""
    if start.ndim != 2 or not bool(((start != 0).sum(1) == 1).all()):
        return None
    return sorted(set((start != 0).float().argmax(1).tolist()))
