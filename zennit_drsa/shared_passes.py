"""K backward passes through Zennit's rules for little more than the price of their vector-Jacobian products.

Zennit's `BasicHook` repeats its modified forward passes in every backward pass, though they depend on the
layer's input and weights only; here they are made once. And before a rule replaces a layer's gradient,
autograd has computed that gradient in vain; here it is left out. Neither changes a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
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


@contextmanager
def shared_passes(model: nn.Module, create_graph: bool = False) -> Iterator[Callable[[], None]]:
    """Share what backward passes through one forward pass of the model, made in this context, have in common.

    With `NONLINEAR_RULES` the first pass below the layer must be that of the whole: its signs decide for all
    passes, so that parts add up to the whole.

    Parameters
    ----------
    model : module
        With its rules registered.
    create_graph : bool
        Whether the results are to be differentiated again: then all gradients are computed.

    Yields
    ------
    function
        To be called before each backward pass.
    """
    hooks = list(hooks_by_module(model))
    signs: list[_SignPasses] = []
    is_first = True

    def start_pass() -> None:
        nonlocal is_first
        if is_first:  # what lies above the layer is passed once, before
            for _, hook in hooks:
                if is_basic(hook):
                    vars(hook)["backward"] = _BasicPasses(hook).backward
                elif type(hook) in NONLINEAR_RULES:
                    signs.append(_SignPasses(hook))
                    vars(hook)["backward"] = signs[-1].backward
                elif type(hook) is ReLUBetaSmooth:
                    vars(hook)["backward"] = _SmoothPasses(hook).backward
        is_first = False
        for sign in signs:
            sign.n_met = 0

    with ExitStack() as stack:
        for module, hook in hooks:
            if not create_graph and replaces_gradient(hook):
                vars(hook)["pre_backward"] = partial(_store, hook)
                stack.callback(vars(hook).pop, "pre_backward", None)
                stack.callback(module.register_forward_hook(partial(_cut, hook)).remove)
            stack.callback(vars(hook).pop, "backward", None)
        yield start_pass


def has_nonlinear_rules(hooks: Iterable[Hook]) -> bool:
    """Whether there are rules that let pass parts by the signs of the whole."""
    return any(isinstance(hook, NONLINEAR_RULES) for hook in hooks)


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
