"""What is to be explained: forward function, layer, inputs and target, and the ways to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ._captum import select_index

Forward: TypeAlias = Callable[..., Any]
Inputs: TypeAlias = "Tensor | tuple[Tensor, ...]"
# Captum's forms (int, tuple, tensor, list of either), or a function of the output.
Target: TypeAlias = (
    "int | tuple[int, ...] | Tensor | Sequence[int] | Sequence[tuple[int, ...]]"
    "| Callable[[Tensor], Tensor] | None"
)


class _Stop(BaseException):
    """Ends a forward pass at the layer. Not an Exception, lest a model's own `except Exception` keep it."""


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
    args : tuple
        Additional forward arguments; tensors among them have the examples along their first axis.
    target
        Which output is explained.
    channel_dim : int
        Axis of the features in the activation.
    """

    forward: Forward
    layer: nn.Module
    layer_name: str
    inputs: tuple[Tensor, ...]
    args: tuple[Any, ...]
    target: Target
    channel_dim: int

    def __len__(self) -> int:
        return len(self.inputs[0])

    # ------------------------------------------------------------------ parts

    def example(self, i: int) -> Request:
        """The request for example i alone, as a batch of one."""
        target = self.target
        if isinstance(target, Tensor) and target.numel() > 1:
            target = int(target[i])
        elif isinstance(target, list):
            target = target[i]  # `select` has seen that there is one for each example
        return replace(
            self,
            inputs=tuple(x[i : i + 1] for x in self.inputs),
            args=tuple(v[i : i + 1] if _has_batch_axis(v) else v for v in self.args),
            target=target,
        )

    def repeated(self, times: int) -> Request:
        """The request for a batch of one with that example repeated."""
        return replace(
            self,
            inputs=tuple(x.expand(times, *x.shape[1:]) for x in self.inputs),
            args=tuple(v.expand(times, *v.shape[1:]) if _has_batch_axis(v) else v for v in self.args),
        )

    def select(self, output: object) -> Tensor:
        """The explained score y of each row of the model's output, shape (n,)."""
        if not isinstance(output, Tensor):
            raise TypeError(
                f"the model must return a tensor, got {type(output).__name__}; wrap it in a function that "
                "returns the scores, and give `layer` as a module"
            )
        if callable(self.target):
            score, what = self.target(output), "the callable target"
        else:
            what = f"target {self.target!r}"
            try:
                score = select_index(output, self.target)
            except (IndexError, AssertionError, RuntimeError) as error:
                raise ValueError(
                    f"{what} does not fit the model's output of shape {tuple(output.shape)}: {error}. Give "
                    "an index within the output, one per example, or a function of the output"
                ) from error
        if not isinstance(score, Tensor) or score.numel() != len(output):
            got = tuple(score.shape) if isinstance(score, Tensor) else type(score).__name__
            raise ValueError(
                f"{what} must select one score for each of the {len(output)} rows of the output, of shape "
                f"{tuple(output.shape)}, but gives {got}; name the target class, e.g. target=0"
            )
        return score.reshape(len(output))

    def as_activation(self, output: object) -> Tensor:
        """The layer's output, if it is what can be split into subspaces along `channel_dim`."""
        activation = as_activation(output, self.layer_name)
        if not -activation.ndim <= self.channel_dim < activation.ndim:
            raise ValueError(
                f"channel_dim={self.channel_dim} is no axis of the activation of layer {self.layer_name!r}, "
                f"which has shape {tuple(activation.shape)}; use 1 for (N, D, …), -1 for tokens (N, T, D)"
            )
        return activation

    # ------------------------------------------------------------------ runs

    def activation(self) -> Tensor:
        """φ(x), shape (N, …, D, …); nothing above the layer is run."""
        return activation_at(self.forward, self.layer, self.layer_name, (*self.inputs, *self.args))

    def run(self, cut: Callable[[Tensor], Tensor]) -> object:
        """The model's output, with `cut(activation)` in the place of the layer's activation."""
        calls = 0

        def hook(module: nn.Module, args: object, output: object) -> Tensor:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise ValueError(
                    f"layer {self.layer_name!r} runs more than once in a forward pass, so that it has no "
                    "single activation; choose a layer that runs once"
                )
            return cut(self.as_activation(output))

        with _hooked(self.layer, hook):
            output = self.forward(*self.inputs, *self.args)
        if not calls:
            raise ValueError(_not_reached(self.layer_name))
        return output


def activation_at(forward: Forward, layer: nn.Module, name: str, args: Sequence[Any]) -> Tensor:
    """The layer's activation for these forward arguments; the forward pass ends there."""
    found: list[Tensor] = []

    def hook(module: nn.Module, inputs: object, output: object) -> None:
        found.append(as_activation(output, name))
        raise _Stop

    with _hooked(layer, hook):
        try:
            forward(*args)
        except _Stop:
            return found[0]
    raise ValueError(_not_reached(name))


@contextmanager
def _hooked(layer: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    handle = layer.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def as_activation(output: object, name: str) -> Tensor:
    """A layer's output, if it is what can be split into subspaces."""
    if not isinstance(output, Tensor) or output.ndim < 2:
        got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(
            f"layer {name!r} must return one tensor of shape (N, D, …) or (N, …, D), got {got}; choose a "
            "module inside it"
        )
    if not torch.is_floating_point(output):
        raise TypeError(f"layer {name!r} must return floating-point activations, got {output.dtype}")
    return output


def _not_reached(name: str) -> str:
    return (
        f"the forward pass did not reach layer {name!r}: it is no part of this model, or the model skips it "
        "for these inputs; choose a layer that runs"
    )


def _has_batch_axis(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
