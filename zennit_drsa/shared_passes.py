"""K backward passes through Zennit's rules for little more than the price of their vector-Jacobian products.

Zennit's `BasicHook` repeats its modified forward passes in every backward pass, though they depend on the
layer's input and weights alone: `shared_forwards` keeps them. And before a rule replaces a layer's gradient,
autograd has computed that gradient in vain: `skipped_gradients` leaves it out. Neither changes a value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from zennit.core import BasicHook, Hook
from zennit.rules import ReLUBetaSmooth, ReLUGuidedBackprop

from ._zennit import (
    NONLINEAR_RULES,
    Gradients,
    hooks_by_module,
    is_active,
    is_basic,
    keep,
    mapped_relevance,
    modified_forwards,
    multiplies_by_input,
    original_backward,
    reduced,
    replaced_method,
    replaces_gradient,
)
from .rules import ForwardRule


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


@contextmanager
def skipped_gradients(model: nn.Module) -> Iterator[None]:
    """Leave out gradients that a rule replaces, in backward passes of forward passes made in this context."""
    with ExitStack() as stack:
        for module, hook in list(hooks_by_module(model)):
            if replaces_gradient(hook):
                store = partial(_store_gradient, weakref.ref(hook))
                stack.enter_context(replaced_method(hook, "pre_backward", store))
                handle = module.register_forward_hook(partial(_cut, weakref.ref(hook)))
                stack.callback(handle.remove)
        yield


def _store_gradient(
    hook_ref: weakref.ref[Hook], module: nn.Module, grad_input: Gradients, grad_output: Gradients
) -> None:
    hook = hook_ref()
    if hook is not None and any(gradient is not None for gradient in grad_output):
        keep(hook, grad_output=grad_output)


def _cut(hook_ref: weakref.ref[Hook], module: nn.Module, args: Any, output: Any) -> None:
    """Keep what comes in at the layer's output for its rule, and give autograd nothing to go on with."""
    if not isinstance(output, Tensor) or output.grad_fn is None:
        return
    # A module that returns an inner module's output as it is shares that output's node: one prehook serves
    # the rules of both.
    node: Any = output.grad_fn  # torch declares `metadata` as a method, but it is a dict
    waiting = node.metadata.setdefault("zennit_drsa: rules", [])
    waiting.append(hook_ref)
    if len(waiting) > 1:
        return

    def before(grad_output: Gradients) -> Gradients | None:
        hooks = [hook for ref in waiting if (hook := ref()) is not None and is_active(hook)]
        for hook in hooks:
            keep(hook, grad_output=grad_output)
        return (None,) * len(grad_output) if hooks else None

    node.register_prehook(before)


@contextmanager
def shared_forwards(hooks: Iterable[Hook]) -> Iterator[Callable[[], None]]:
    """Share the modified forward passes of these hooks among all backward passes in this context.

    The passes must go back through one forward pass of the model. Values are those of the hooks themselves;
    products with zeros are left out. With `NONLINEAR_RULES` the first pass must be that of the whole: its
    signs decide for all passes, so that parts add up to the whole.

    Yields
    ------
    function
        To be called before each backward pass.
    """
    signs: list[_SignPasses] = []

    def start_pass() -> None:
        for sign in signs:
            sign.start_pass()

    with ExitStack() as stack:
        for hook in list(hooks):
            if is_basic(hook):
                backward = _BasicPasses(hook).backward
            elif type(hook) in NONLINEAR_RULES:
                signs.append(_SignPasses(hook))
                backward = signs[-1].backward
            elif type(hook) is ReLUBetaSmooth:
                backward = _SmoothPasses(hook).backward
            else:
                continue
            stack.enter_context(replaced_method(hook, "backward", backward))
        yield start_pass


class _BasicPasses:
    """What a `BasicHook` computes backward, with its modified forward passes kept."""

    def __init__(self, hook: BasicHook) -> None:
        self._hook = weakref.ref(hook)
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.needed: list[bool] = []

    def backward(self, module: nn.Module, grad_input: Gradients, grad_output: Gradients) -> Any:
        hook, relevance = self._hook(), grad_output[0]
        if hook is None or relevance is None:
            return None
        if relevance.requires_grad:  # a graph of the backward pass itself is asked for
            return original_backward(hook, module, grad_input, grad_output)
        if not self.inputs:
            self._forward(hook, module)
        mapped = mapped_relevance(hook, relevance, self.outputs)
        gradients = [
            _vjp(output, input, gradient) if needed else torch.zeros_like(input)
            for output, input, gradient, needed in zip(
                self.outputs, self.inputs, mapped, self.needed, strict=True
            )
        ]
        result = reduced(hook, self.inputs, gradients).detach()
        return tuple(result if g is not None and g.shape == result.shape else None for g in grad_input)

    def _forward(self, hook: BasicHook, module: nn.Module) -> None:
        skip_zeros = multiplies_by_input(hook)
        for input, output in modified_forwards(hook, module):
            self.inputs.append(input)
            self.outputs.append(output)
            self.needed.append(not skip_zeros or bool(input.any()))


class _SignPasses:
    """`ReLUDeconvNet` and `ReLUGuidedBackprop` with the signs of the first pass.

    A module may run several times in a forward pass; every backward pass meets these runs in the same order.
    """

    def __init__(self, hook: Hook) -> None:
        self.passes_own_gradient = isinstance(hook, ReLUGuidedBackprop)
        self.positive: list[Tensor] = []
        self.n_met = 0

    def start_pass(self) -> None:
        self.n_met = 0

    def backward(self, module: nn.Module, grad_input: Gradients, grad_output: Gradients) -> Any:
        gradient = grad_output[0]
        if gradient is None:
            return None
        if self.n_met == len(self.positive):
            self.positive.append(gradient > 0)
        positive = self.positive[self.n_met]
        self.n_met += 1
        passed = grad_input[0] if self.passes_own_gradient else gradient
        return None if passed is None else (torch.where(positive, passed, 0),)


class _SmoothPasses:
    """`ReLUBetaSmooth` with its factor, the derivative of a softplus at the input, kept."""

    def __init__(self, hook: ReLUBetaSmooth) -> None:
        self._hook = weakref.ref(hook)
        self.factor: Tensor | None = None

    def backward(self, module: nn.Module, grad_input: Gradients, grad_output: Gradients) -> Any:
        hook, gradient = self._hook(), grad_output[0]
        if hook is None or gradient is None:
            return None
        if torch.is_grad_enabled():  # a graph of the backward pass itself is asked for
            return original_backward(hook, module, grad_input, grad_output)
        if self.factor is None:
            self.factor = original_backward(hook, module, grad_input, (gradient.new_ones(()),))[0]
        return (self.factor * gradient,)


def _vjp(output: Tensor, input: Tensor, gradient: Tensor) -> Tensor:
    if not gradient.any():
        return torch.zeros_like(input)
    (result,) = torch.autograd.grad(output, input, gradient, retain_graph=True)
    return result
