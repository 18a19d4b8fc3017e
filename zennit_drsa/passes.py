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
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from zennit.core import BasicHook, Hook, ParamMod
from zennit.rules import (
    AlphaBeta,
    Epsilon,
    Gamma,
    Norm,
    Pass,
    ReLUBetaSmooth,
    ReLUDeconvNet,
    ReLUGuidedBackprop,
    ZBox,
    ZPlus,
)

from ._zennit import hooks_by_module

Gradients: TypeAlias = tuple[Tensor | None, ...]

# Rules that reduce to a sum of input ⊙ gradient: where an input is zero its gradient does not matter.
_MULTIPLIED_BY_INPUT = (AlphaBeta, Epsilon, Gamma, Norm, ZBox, ZPlus)
# Rules that drop what is negative, and so are not linear in what comes in.
NONLINEAR_RULES = (ReLUDeconvNet, ReLUGuidedBackprop)
# Rules that put their own value in the place of the layer's gradient without reading it.
_REPLACING = (Pass, ReLUBetaSmooth, ReLUDeconvNet)


def replaces_gradient(hook: Hook) -> bool:
    """Whether a rule never reads the gradient that autograd computes for its layer.

    A hook class of one's own says so with a class attribute `replaces_gradient = True`.
    """
    return (
        type(hook).backward is BasicHook.backward
        or type(hook) in _REPLACING
        or getattr(type(hook), "replaces_gradient", False) is True
    )


@contextmanager
def skipped_gradients(model: nn.Module) -> Iterator[None]:
    """Leave out gradients that a rule replaces, in backward passes of forward passes made in this context."""
    with ExitStack() as stack:
        for module, hook in list(hooks_by_module(model)):
            if replaces_gradient(hook):
                stack.callback(vars(hook).pop, "pre_backward", None)
                hook.pre_backward = partial(_store_gradient, weakref.ref(hook))
                handle = module.register_forward_hook(partial(_cut, weakref.ref(hook)))
                stack.callback(handle.remove)
        yield


def _store_gradient(
    hook_ref: weakref.ref[Hook], module: nn.Module, grad_input: Gradients, grad_output: Gradients
) -> None:
    hook = hook_ref()
    if hook is not None and any(gradient is not None for gradient in grad_output):
        hook.stored_tensors["grad_output"] = grad_output


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
        hooks = [hook for ref in waiting if (hook := ref()) is not None and hook.active]
        for hook in hooks:
            hook.stored_tensors["grad_output"] = grad_output
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
            if type(hook).backward is BasicHook.backward:
                backward = _BasicPasses(hook).backward
            elif type(hook) in NONLINEAR_RULES:
                signs.append(_SignPasses(hook))
                backward = signs[-1].backward
            elif type(hook) is ReLUBetaSmooth:
                backward = _SmoothPasses(hook).backward
            else:
                continue
            stack.callback(vars(hook).pop, "backward", None)
            hook.backward = backward
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
            return BasicHook.backward(hook, module, grad_input, grad_output)
        if not self.inputs:
            self._forward(hook, module)
        mapped = hook.gradient_mapper(relevance, self.outputs)
        mapped = [mapped] if isinstance(mapped, Tensor) else mapped
        gradients = [
            _vjp(output, input, gradient) if needed else torch.zeros_like(input)
            for output, input, gradient, needed in zip(
                self.outputs, self.inputs, mapped, self.needed, strict=True
            )
        ]
        reduced = hook.reducer(self.inputs, gradients).detach()
        return tuple(reduced if g is not None and g.shape == reduced.shape else None for g in grad_input)

    def _forward(self, hook: BasicHook, module: nn.Module) -> None:
        original = hook.stored_tensors["input"][0].detach()
        skip_zeros = type(hook) in _MULTIPLIED_BY_INPUT
        modifiers = zip(hook.input_modifiers, hook.param_modifiers, hook.output_modifiers, strict=True)
        for modify_input, modify_parameters, modify_output in modifiers:
            # A modifier may return what it got, or a view of it: requires_grad must not reach what is stored.
            input = modify_input(original).detach().requires_grad_()
            with ParamMod.ensure(modify_parameters)(module) as modified, torch.enable_grad():
                output = modify_output(modified.forward(input))
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
            return type(hook).backward(hook, module, grad_input, grad_output)
        if self.factor is None:
            self.factor = type(hook).backward(hook, module, grad_input, (gradient.new_ones(()),))[0]
        return (self.factor * gradient,)


def _vjp(output: Tensor, input: Tensor, gradient: Tensor) -> Tensor:
    if not gradient.any():
        return torch.zeros_like(input)
    (result,) = torch.autograd.grad(output, input, gradient, retain_graph=True)
    return result
