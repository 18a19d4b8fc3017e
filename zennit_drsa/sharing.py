"""One set of modified forward passes for K backward passes through Zennit's rules.

Zennit's `BasicHook` repeats its modified forward passes in every backward pass. They depend on the layer's
input and weights, not on the relevance that comes in. While hooks are shared they are computed in the first
backward pass and kept for the others, which then cost no more than their vector-Jacobian products.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from zennit.core import BasicHook, Hook, ParamMod
from zennit.rules import AlphaBeta, Epsilon, Gamma, Norm, ReLUDeconvNet, ReLUGuidedBackprop, ZBox, ZPlus

Gradients: TypeAlias = tuple[Tensor | None, ...]

# Rules that reduce to a sum of input ⊙ gradient: where an input is zero its gradient does not matter.
_MULTIPLIED_BY_INPUT = (AlphaBeta, Epsilon, Gamma, Norm, ZBox, ZPlus)
# Rules that drop what is negative, and so are not linear in what comes in.
NONLINEAR_RULES = (ReLUDeconvNet, ReLUGuidedBackprop)


@contextmanager
def shared_forwards(hooks: Iterable[Hook]) -> Iterator[None]:
    """Share the modified forward passes of these hooks among all backward passes in the context.

    The passes must go back through the same forward pass of the model. Values are those of the hooks
    themselves: products with zeros are left out, nothing else changes. The first pass must be that of the whole
    relevance if there are `NONLINEAR_RULES`: its signs decide for all passes, so that parts add up to the whole.
    """
    shared = list(hooks)
    try:
        for hook in shared:
            if type(hook).backward is BasicHook.backward:
                hook.backward = partial(_BasicPasses(hook).backward)
            elif type(hook) in NONLINEAR_RULES:
                hook.backward = partial(_SignPasses(hook).backward)
        yield
    finally:
        for hook in shared:
            vars(hook).pop("backward", None)
            hook.stored_tensors.pop("grad_output", None)


class _BasicPasses:
    """What a `BasicHook` computes backward, with its modified forward passes kept."""

    def __init__(self, hook: BasicHook) -> None:
        self.hook = hook
        self.inputs: list[Tensor] | None = None
        self.outputs: list[Tensor] = []
        self.needed: list[bool] = []

    def backward(self, module: nn.Module, grad_input: Gradients, grad_output: Gradients) -> Any:
        relevance = grad_output[0]
        if relevance is None or relevance.requires_grad:  # a graph of the backward pass itself is asked for
            return type(self.hook).backward(self.hook, module, grad_input, grad_output)
        inputs = self._forward(module) if self.inputs is None else self.inputs
        mapped = self.hook.gradient_mapper(relevance, self.outputs)
        mapped = [mapped] if isinstance(mapped, Tensor) else list(mapped)
        gradients = [
            _vjp(output, input, gradient) if needed else torch.zeros_like(input)
            for output, input, gradient, needed in zip(self.outputs, inputs, mapped, self.needed, strict=True)
        ]
        reduced = self.hook.reducer(inputs, gradients)
        return tuple(reduced if g is not None and g.shape == reduced.shape else None for g in grad_input)

    def _forward(self, module: nn.Module) -> list[Tensor]:
        hook = self.hook
        original = hook.stored_tensors["input"][0].detach()
        self.inputs = []
        skip_zeros = type(hook) in _MULTIPLIED_BY_INPUT
        modifiers = zip(hook.input_modifiers, hook.param_modifiers, hook.output_modifiers, strict=True)
        for modify_input, modify_parameters, modify_output in modifiers:
            # A modifier may return what it got: the clone keeps requires_grad_ off the stored input.
            input = modify_input(original.clone()).detach().requires_grad_()
            with ParamMod.ensure(modify_parameters)(module) as modified, torch.enable_grad():
                self.outputs.append(modify_output(modified.forward(input)))
            self.inputs.append(input)
            self.needed.append(not skip_zeros or bool(input.any()))
        return self.inputs


class _SignPasses:
    """`ReLUDeconvNet` and `ReLUGuidedBackprop` with the signs of the first pass."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.positive: Tensor | None = None

    def backward(self, module: nn.Module, grad_input: Gradients, grad_output: Gradients) -> Any:
        gradient = grad_output[0]
        if gradient is None:
            return None
        if self.positive is None:
            self.positive = gradient > 0
        passed = gradient if isinstance(self.hook, ReLUDeconvNet) else grad_input[0]
        return None if passed is None else (passed * self.positive,)


def _vjp(output: Tensor, input: Tensor, gradient: Tensor) -> Tensor:
    if not gradient.any():
        return torch.zeros_like(input)
    (result,) = torch.autograd.grad(output, input, gradient, retain_graph=True)
    return result
