"""K backward passes through Zennit's rules for little more than the price of their vector-Jacobian products.

Zennit's `BasicHook` repeats its modified forward passes in every backward pass, though they depend on the
layer's input and weights only; here they are made once. And before a rule replaces a layer's gradient,
autograd has computed that gradient in vain; here it is left out. Neither changes a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from zennit.core import BasicHook, Hook
from zennit.rules import ReLUBetaSmooth, ReLUGuidedBackprop

from ._zennit import (
    MULTIPLIED_BY_INPUT,
    NONLINEAR_RULES,
    Gradients,
    hooks_by_module,
    is_basic,
    modified_forwards,
    replaces_gradient,
)
from .rules import ForwardRule


class shared_passes:
    """Context in which backward passes through one forward pass of the model share what they have in common.

    Call it before each backward pass below the layer.

    Parameters
    ----------
    model : module
        With its rules registered.
    create_graph : bool
        Whether the results are to be differentiated again: then all gradients are computed.

    Attributes
    ----------
    is_linear : bool
        Whether there is none of the `NONLINEAR_RULES`. With these the first pass below the layer must be that
        of the whole: its signs decide for all passes, so that parts add up to the whole.
    """

    def __init__(self, model: nn.Module, create_graph: bool = False) -> None:
        self._hooks = list(hooks_by_module(model))
        self._skips_gradients, self._is_first = not create_graph, True
        self._signs: list[_SignPasses] = []
        self._handles: list[Any] = []
        self.is_linear = not {type(hook) for _, hook in self._hooks} & set(NONLINEAR_RULES)

    def __enter__(self) -> Self:
        for module, hook in self._hooks:
            if self._skips_gradients and replaces_gradient(hook):
                vars(hook)["pre_backward"] = partial(_store, hook)
                self._handles.append(_registered_behind(hook, module, partial(_cut, hook)))
        return self

    def __call__(self) -> None:
        """A backward pass below the layer begins; what lies above was passed once, before."""
        for _, hook in self._hooks if self._is_first else ():
            if is_basic(hook):
                vars(hook)["backward"] = _BasicPasses(hook).backward
            elif type(hook) in NONLINEAR_RULES:
                self._signs.append(_SignPasses(hook))
                vars(hook)["backward"] = self._signs[-1].backward
            elif type(hook) is ReLUBetaSmooth:
                vars(hook)["backward"] = _SmoothPasses(hook).backward
        self._is_first = False
        for sign in self._signs:
            sign.n_met = 0

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        for _, hook in self._hooks:
            vars(hook).pop("pre_backward", None)
            vars(hook).pop("backward", None)


def check_differentiable(hooks: Iterable[Hook]) -> None:
    """Refuse to differentiate relevance again under rules whose graph has no true derivative."""
    found = next((hook for hook in hooks if isinstance(hook, ForwardRule)), None)
    if found is not None:
        raise ValueError(
            f"create_graph=True: the rule {type(found).__name__} is written into the graph of the model, so "
            "that derivatives of its relevance would be wrong; use Zennit's own rules, such as "
            "EpsilonGammaBox with a canonizer, or VGGGamma"
        )


def _store(hook: Hook, module: nn.Module, grad_input: Gradients, grad_output: Gradients) -> None:
    if grad_output[0] is not None:  # else `_cut` has stored it
        hook.stored_tensors["grad_output"] = grad_output


def _registered_behind(hook: Hook, module: nn.Module, function: Callable[..., None]) -> RemovableHandle:
    """A forward hook behind those of a rule, and before what a user's own hooks make of the output."""
    before = list(module._forward_hooks.items())
    last = max(i for i, (_, other) in enumerate(before) if getattr(other, "__self__", None) is hook)
    handle = module.register_forward_hook(function)
    for key, _ in before[last + 1 :]:
        module._forward_hooks.move_to_end(key)  # type: ignore[attr-defined]
    return handle


def _cut(hook: Hook, module: nn.Module, args: Any, output: Any) -> None:
    """Store what comes in at the layer's output for its rule, and give autograd nothing to go on with."""
    if not isinstance(output, Tensor) or output.grad_fn is None:
        return
    # A module that returns an inner module's output shares that output's node: one prehook serves both rules.
    node: Any = output.grad_fn  # torch declares `metadata` as a method, but it is a dict
    waiting = node.metadata.setdefault("zennit_drsa: rules", [])
    waiting.append(hook)
    if len(waiting) > 1:
        return

    def before(grad_output: Gradients) -> Gradients | None:
        is_any_active = False
        for hook in waiting:
            if hook.active:
                hook.stored_tensors["grad_output"] = grad_output
                is_any_active = True
        return (None,) * len(grad_output) if is_any_active else None

    node.register_prehook(before)


class _BasicPasses:
    """What a `BasicHook` computes backward, with its modified forward passes made once."""

    def __init__(self, hook: BasicHook) -> None:
        self._hook = hook
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._is_zero: list[bool] = []

    def backward(self, module: nn.Module, grad_input: Gradients, grad_output: Gradients) -> Any:
        hook, relevance = self._hook, grad_output[0]
        if relevance is None:
            return None
        if relevance.requires_grad:  # a graph of the backward pass itself is asked for
            return type(hook).backward(hook, module, grad_input, grad_output)
        if not self._inputs:
            for input, output in modified_forwards(hook, module):
                self._inputs.append(input)
                self._outputs.append(output)
                self._is_zero.append(type(hook) in MULTIPLIED_BY_INPUT and not input.any())
        mapped = hook.gradient_mapper(relevance, self._outputs)
        gradients = []
        for i, gradient in enumerate([mapped] if isinstance(mapped, Tensor) else mapped):
            if self._is_zero[i] or not gradient.any():  # products with zeros are left out
                gradients.append(torch.zeros_like(self._inputs[i]))
            else:
                through = torch.autograd.grad(self._outputs[i], self._inputs[i], gradient, retain_graph=True)
                gradients.append(through[0])
        result = hook.reducer(self._inputs, gradients).detach()
        return tuple([result if g is not None and g.shape == result.shape else None for g in grad_input])


class _SignPasses:
    """`ReLUDeconvNet` and `ReLUGuidedBackprop` with the signs of the first pass.

    A module may run several times in a forward pass; every backward pass meets these runs in the same order.
    """

    def __init__(self, hook: Hook) -> None:
        self._passes_own_gradient = isinstance(hook, ReLUGuidedBackprop)
        self._positive: list[Tensor] = []
        self.n_met = 0

    def backward(self, module: nn.Module, grad_input: Gradients, grad_output: Gradients) -> Any:
        gradient = grad_output[0]
        if gradient is None:
            return None
        if self.n_met == len(self._positive):
            self._positive.append(gradient > 0)
        positive = self._positive[self.n_met]
        self.n_met += 1
        passed = grad_input[0] if self._passes_own_gradient else gradient
        return None if passed is None else (torch.where(positive, passed, 0),)


class _SmoothPasses:
    """`ReLUBetaSmooth` with its factor, the derivative of a softplus at the input, computed once."""

    def __init__(self, hook: ReLUBetaSmooth) -> None:
        self._hook = hook
        self._factor: Tensor | None = None

    def backward(self, module: nn.Module, grad_input: Gradients, grad_output: Gradients) -> Any:
        gradient, original = grad_output[0], partial(type(self._hook).backward, self._hook, module)
        if gradient is None:
            return None
        if torch.is_grad_enabled():  # a graph of the backward pass itself is asked for
            return original(grad_input, grad_output)
        if self._factor is None:
            self._factor = original(grad_input, (gradient.new_ones(()),))[0]
        return (self._factor * gradient,)
