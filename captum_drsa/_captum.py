"""The one place that touches Captum's private parts; when a Captum release moves them, look here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar, cast

import torch
from captum._utils.common import _run_forward
from captum.attr import LRP, DeepLift
from captum.attr._core.deep_lift import SUPPORTED_NON_LINEAR, nonlinear
from captum.attr._utils.common import _format_callable_baseline
from captum.attr._utils.lrp_rules import EpsilonRule, PropagationRule
from captum.log import log_usage
from drsa_core.layer import eager
from drsa_core.lrp import check_exchangeable
from torch import Tensor, nn

__all__ = [
    "RuleHooks",
    "by_concept",
    "call_forward",
    "deep_lift_copy",
    "draw_baselines",
    "logged",
    "modules_with_hooks",
    "rules_on",
]

_F = TypeVar("_F", bound=Callable[..., Any])


def logged(attribute: _F) -> _F:
    """Mark a method as Captum marks its `attribute` methods: NoiseTunnel looks for the mark."""
    return cast(_F, log_usage(part_of_slo=True)(attribute))


def call_forward(forward: Callable[..., Any], inputs: tuple[Tensor, ...], args: Any) -> Tensor:
    """Call a forward function as Captum's gradient methods do: DeepLift's takes no arguments at all."""
    return cast(Tensor, _run_forward(forward, inputs, None, args))


def draw_baselines(baselines: Any, inputs: Any) -> tuple[Any, ...]:
    """Baselines as a tuple, drawn if they come as a function (GradientShap, DeepLiftShap)."""
    return cast("tuple[Any, ...]", _format_callable_baseline(baselines, inputs))


def rules_on(model: nn.Module) -> list[tuple[str, PropagationRule]]:
    """The rules that a user, or Captum's LRP, put on the modules of a model, with the modules' names."""
    return [
        (name, value)
        for name, module in model.named_modules()
        for value in list(vars(module).values())  # another thread may be putting its rules there
        if isinstance(value, PropagationRule)
    ]


def modules_with_hooks(method: object, model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules on which `LRP` or `DeepLift` puts hooks that read their input, with their names."""
    leaves = [(name, m) for name, m in model.named_modules() if next(m.children(), None) is None]
    if isinstance(method, LRP):
        return leaves
    is_lift = isinstance(method, DeepLift)
    return [(name, m) for name, m in leaves if is_lift and type(m) in SUPPORTED_NON_LINEAR]


def by_concept(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """DeepLift's `custom_attribution_func`, called for one concept at a time with the user's own shapes.

    Captum reads from its signature how many arguments it takes: multipliers, inputs, baselines.
    """

    def every(multipliers: tuple[Tensor, ...], *further: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        others = [tuple(tensor.squeeze(1) for tensor in part) for part in further]
        concepts = [
            function(tuple(m[:, k] for m in multipliers), *others) for k in range(multipliers[0].shape[1])
        ]
        return tuple(torch.stack(parts, dim=1) for parts in zip(*concepts, strict=True))

    takes = len(signature(function).parameters)
    forms: dict[int, Callable[..., tuple[Tensor, ...]]] = {
        1: lambda multipliers: every(multipliers),
        2: lambda multipliers, inputs: every(multipliers, inputs),
        3: lambda multipliers, inputs, baselines: every(multipliers, inputs, baselines),
    }
    if takes not in forms:
        raise ValueError(f"custom_attribution_func must take one to three arguments, but takes {takes}")
    return forms[takes]


def deep_lift_copy(method: DeepLift, model: nn.Module) -> DeepLift:
    """A DeepLift like `method` for another model, with hooks of its own, fit for several backward passes."""
    attributor = copy.copy(method)
    attributor.model = model
    attributor._backward_hook = _RescaleHook(method)
    attributor.forward_handles, attributor.backward_handles = [], []
    return attributor


class _RescaleHook:
    """DeepLift's backward hook, for several backward passes from one forward pass.

    The Rescale rule multiplies by Δout / Δin, whatever is explained: it is found in the first pass and kept.
    Everything else, and the error for a module that runs twice, is left to the hook of `method`.
    """

    def __init__(self, method: DeepLift) -> None:
        self._captum_hook, self._eps = method._backward_hook, method.eps
        #: By module: its input (N inputs and N references), where Δin vanishes, and Δout / Δin, (N, …).
        self._slopes: dict[nn.Module, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, module: nn.Module, grad_input: Tensor, grad_output: Tensor) -> Tensor:
        """The gradient by the module's input, shape (2N, …)."""
        rule = SUPPORTED_NON_LINEAR.get(type(module))
        if rule is not nonlinear or not hasattr(module, "input") or not hasattr(module, "output"):
            return cast(Tensor, self._captum_hook(module, grad_input, grad_output))
        inputs, outputs = cast(Tensor, module.input), cast(Tensor, module.output)
        if module not in self._slopes or self._slopes[module][0] is not inputs:
            (x, x_reference), (y, y_reference) = inputs.chunk(2), outputs.chunk(2)
            delta = x - x_reference
            # Not "<", as in Captum: in float16 its eps is 0, and 0 / 0 would be the slope.
            self._slopes[module] = inputs, delta.abs() <= self._eps, (y - y_reference) / delta
        _, vanishes, slope = self._slopes[module]
        del module.input, module.output  # as Captum does, to notice a module that runs twice
        halves = zip(grad_input.chunk(2), grad_output.chunk(2), strict=True)
        return torch.cat([torch.where(vanishes, below, above * slope) for below, above in halves])


class RuleHooks:
    """Captum's two LRP forward passes, one at a time, on a copy of the user's `LRP` object.

    Both change the model (weights, hooks, attributes) and leave it so: run them inside `guarded`.
    """

    def __init__(self, method: LRP, verbose: bool = False) -> None:
        self._lrp = copy.copy(method)  # Captum keeps its working state on the attributor
        self._lrp.verbose = verbose
        self._lrp.model = eager(method.model)
        self._lrp.layers, self._lrp.forward_handles, self._lrp.backward_handles = [], [], []

    def first_pass(self, inputs: tuple[Tensor, ...], args: tuple[Any, ...]) -> Tensor:
        """The model's true output; records activations and puts the rules' weights into the layers."""
        self._lrp._get_layers(self._lrp.model)
        self._lrp._check_and_attach_rules()
        for layer in self._lrp.layers:
            rule = getattr(layer, "rule", None)
            if rule is not None and type(rule)._manipulate_weights is not EpsilonRule._manipulate_weights:
                check_exchangeable(layer)
        with torch.no_grad():
            return cast(Tensor, self._lrp._compute_output_and_change_weights(inputs, None, args))

    def register(self) -> None:
        """Register the hooks that make the gradient of the second pass carry relevance."""
        self._lrp._register_forward_hooks()

    def second_pass(self, inputs: tuple[Tensor, ...], args: tuple[Any, ...]) -> Tensor:
        """The output of the model with the rules' weights, to be differentiated."""
        return call_forward(self._lrp._forward_fn_wrapper, inputs, args)
