"""What is to be explained: forward function, layer, inputs and target, and the ways to run it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..targets import Target, select_scores, target_of_example
from .shapes import as_activation

Forward: TypeAlias = Callable[..., Any]
Inputs: TypeAlias = "Tensor | tuple[Tensor, ...]"


class _Stop(BaseException):
    """Ends a forward pass at the layer. Not an Exception: a model's own `except Exception` would keep it."""


@dataclass(frozen=True)
class Request:
    """One batch to explain.

    Attributes
    ----------
    forward : callable
        The attributor's forward function, usually the model.
    layer, layer_name
        The module whose output is the activation a = φ(x), and how to call it in messages.
    inputs : tuple of tensor
        Shapes (N, …).
    target
        Which output is explained.
    channel_dim : int
        Axis of the features in the activation.
    args : tuple
        Additional forward arguments.
    has_batch_axis : tuple of bool
        Which of `args` are tensors with the examples along their first axis; see `with_batch_axes`.
    """

    forward: Forward
    layer: nn.Module
    layer_name: str
    inputs: tuple[Tensor, ...]
    target: Target
    channel_dim: int = 1
    args: tuple[Any, ...] = ()
    has_batch_axis: tuple[bool, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs[0])

    # ------------------------------------------------------------------ parts

    def example(self, i: int) -> Request:
        """The request for example i alone, as a batch of one."""
        return replace(
            self,
            inputs=tuple(x[i : i + 1] for x in self.inputs),
            args=self._mapped_args(lambda v: v[i : i + 1]),
            target=target_of_example(self.target, i),
        )

    def repeated(self, times: int) -> Request:
        """The request for a batch of one with that example repeated."""
        return replace(
            self,
            inputs=tuple(x.expand(times, *x.shape[1:]) for x in self.inputs),
            args=self._mapped_args(lambda v: v.expand(times, *v.shape[1:])),
        )

    def _mapped_args(self, change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        pairs = zip(self.args, self.has_batch_axis, strict=True)
        return tuple(change(value) if batched else value for value, batched in pairs)

    def select(self, output: object) -> Tensor:
        """The explained score y of each row of the model's output, shape (n,)."""
        # A scalar is the score of one example; rows may be more than examples (`UpperNetwork`).
        is_scalar = isinstance(output, Tensor) and output.ndim == 0
        return select_scores(output, self.target, len(self) if is_scalar else None)

    def scores(self, output: object) -> Tensor:
        """As `select`, shape (N,); an error if the output does not have one row for each example."""
        return select_scores(output, self.target, len(self))

    # ------------------------------------------------------------------ runs

    def n_outputs(self) -> int | None:
        """Number of the model's outputs, by one forward pass; None if its output is not (n, n_outputs)."""
        with torch.no_grad():
            output = self.forward(*copies((*self.inputs, *self.args)))
        return output.shape[1] if isinstance(output, Tensor) and output.ndim == 2 else None

    def run(self, cut: Callable[[Tensor], Tensor]) -> Any:
        """The model's output, with `cut(activation)` in the place of the layer's activation."""
        with self.running(cut) as output:
            return output

    @contextmanager
    def running(self, cut: Callable[[Tensor], Tensor]) -> Iterator[Any]:
        """As `run`, for a `cut` that gives another value than the activation, and a backward pass inside.

        Parts of a model that are checkpointed run a second time in the backward pass. What they compute there
        must be what they computed before: the layer gets `cut(activation)` again.
        """
        n_runs, is_forward = 0, True

        def hook(activation: object) -> Tensor:
            nonlocal n_runs
            n_runs += is_forward
            if n_runs > 1:
                raise ValueError(
                    f"layer {self.layer_name!r} runs more than once in a forward pass, so that it has no "
                    "single activation; choose a layer that runs once (e.g. the block around it)"
                )
            return cut(self._checked(activation, len(self)))

        with _hooked(self.layer, self.layer_name, hook):
            output = self.forward(*copies((*self.inputs, *self.args)))
            if not n_runs:
                raise ValueError(_not_reached(self.layer_name))
            is_forward = False
            yield output

    def activation(self) -> Tensor:
        """φ(x), shape (N, …, D, …); nothing above the layer is run."""
        return self.activation_of((*self.inputs, *self.args))

    def activation_of(self, args: Sequence[Any]) -> Tensor:
        """The layer's activation for other arguments of the forward function."""
        found: list[Tensor] = []

        def hook(activation: object) -> Tensor:
            found.append(self._checked(activation, len(args[0])))
            raise _Stop

        with _hooked(self.layer, self.layer_name, hook):
            try:
                self.forward(*copies(args))
            except _Stop:
                return found[0]
        raise ValueError(_not_reached(self.layer_name))

    def _checked(self, activation: object, n_examples: int) -> Tensor:
        return as_activation(activation, self.layer, self.layer_name, self.channel_dim, n_examples)


def copies(args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of a forward function that it may overwrite: a layer, or the model itself, may work in place.

    Tensors are copied, also those in lists, tuples and dictionaries.
    """
    return tuple(_copied(value) for value in args)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return {key: _copied(part) for key, part in value.items()} if type(value) is dict else value


def with_batch_axes(request: Request) -> Request:
    """The request with the additional arguments told apart: one row for each example, or the same for all.

    A tensor whose length is not N is the same for all. For one of length N the model is asked: of a batch,
    an example alone must get the score that it gets in the batch. That is tried with the first, and with
    those whose rows differ most from its row: if each row stands for an output, the first example may have
    the right score by chance. The reading that comes closest is taken: where a score is near a bound (the
    softmax of a sure network), all of them come close.
    """
    n = len(request)
    unclear = tuple(isinstance(v, Tensor) and v.ndim > 0 and len(v) == n for v in request.args)
    request = replace(request, has_batch_axis=unclear)
    if not any(unclear):
        return request
    only = [i for i, is_unclear in enumerate(unclear) if is_unclear]
    choices = [unclear, *(tuple(u and i != j for i, u in enumerate(unclear)) for j in only)]
    choices = list(dict.fromkeys([*choices, (False,) * len(unclear)]))
    examples = sorted({0, *(_most_different(request.args[i]) for i in only)})
    with torch.no_grad():
        expected = request.select(request.forward(*copies((*request.inputs, *request.args))))
        readings = [replace(request, has_batch_axis=choice) for choice in choices]
        differences = [_difference(reading, expected, examples) for reading in readings]
    # Another batch size may change the order of summation, hence not bit for bit; and half precision has few
    # digits.
    if min(differences) <= (1e-3 if expected.dtype in (torch.float32, torch.float64) else 0.05):
        return readings[differences.index(min(differences))]
    raise ValueError(
        f"additional_forward_args {only} (counted from 0) have as many rows as there are examples ({n}), "
        "but the model gives an example alone another score than in the batch, whether it gets its row of "
        "them or all rows; bind what is the same for all examples into the forward function"
    )


def _difference(request: Request, expected: Tensor, examples: Sequence[int]) -> float:
    """Largest difference between the scores of examples alone and in the batch, relative to these.

    Those of the batch that are far below the largest count as 1 % of it. Infinite if there are no scores, or
    not one for each example: rows of arguments that are meant for others give further ones.
    """
    largest, sizes = 0.0, expected.abs().double()
    sizes = sizes.clamp(min=max(1e-2 * float(sizes.max()), 1e-300))
    for i in examples:
        try:
            part = request.example(i) if len(request) > 1 else request.repeated(2)
            score = part.select(part.forward(*copies((*part.inputs, *part.args))))
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            return math.inf
        if len(score) != len(part):
            return math.inf
        difference = float(((score - expected[i]).double() / sizes[i]).abs().max())
        if not math.isfinite(difference):
            return math.inf
        largest = max(largest, difference)
    return largest


def _most_different(rows: Tensor) -> int:
    """Number of the row that differs most from the first."""
    numbers = rows.detach().reshape(len(rows), -1).double()
    return int((numbers - numbers[:1]).abs().sum(1).argmax())


@contextmanager
def _hooked(layer: nn.Module, name: str, hook: Callable[[object], Tensor]) -> Iterator[None]:
    thread, needs_graph = threading.get_ident(), torch.is_grad_enabled()

    def forward_hook(module: nn.Module, args: object, output: object) -> Tensor | None:
        # Another thread may run the same model for other purposes. Backward passes have threads of their own.
        if threading.get_ident() != thread and not is_backward():
            return None
        if needs_graph and not torch.is_grad_enabled():
            raise ValueError(
                f"layer {name!r} runs without gradients inside of the model, so that nothing can be passed "
                "back through it: switch checkpointing off, or set use_reentrant=False in it; or take the "
                "torch.no_grad() away, or choose a layer above it"
            )
        return hook(output)

    handle = layer.register_forward_hook(forward_hook)
    try:
        yield
    finally:
        handle.remove()


def is_backward() -> bool:
    """Whether this runs in a backward pass: what is checkpointed runs again there."""
    return torch._C._current_graph_task_id() != -1


def _not_reached(name: str) -> str:
    return (
        f"layer {name!r} was not run in the forward pass: it is no part of this model, or the model skips it "
        "for these inputs; choose a layer that is called as a module"
    )
