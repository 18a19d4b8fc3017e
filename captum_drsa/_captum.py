"""The one place that touches Captum's private parts; when a Captum release moves them, look here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any, TypeVar, cast

import torch
from captum._utils.common import _run_forward
from captum.attr import LRP, Attribution, DeepLift, NoiseTunnel
from captum.attr._utils.common import _format_callable_baseline
from captum.attr._utils.lrp_rules import EpsilonRule, PropagationRule
from captum.log import log_usage
from drsa_core.layer import Request, copies, eager, gradients_at_inputs
from drsa_core.lrp import check_exchangeable
from drsa_core.targets import select_scores, target_of_example
from torch import Tensor, nn

_F = TypeVar("_F", bound=Callable[..., Any])

#: What Captum's LRP and DeepLift write on modules.
ATTRIBUTES = ("activation", "activations", "rule", "input", "input_ref", "output")


def logged(attribute: _F) -> _F:
    """Mark a method as Captum marks its `attribute` methods: NoiseTunnel looks for the mark."""
    return cast(_F, log_usage(part_of_slo=True)(attribute))


def draw_baselines(baselines: Any, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Baselines as a tuple, drawn if they come as a function (GradientShap, DeepLiftShap)."""
    given = inputs if len(inputs) > 1 else inputs[0]
    return cast("tuple[Any, ...]", _format_callable_baseline(baselines, given))


# ---------------------------------------------------------------------- the network as Captum runs it


class Network(nn.Module):
    """The network as Captum runs it; its output are the explained scores (n,), or what subclasses read.

    Called with the inputs, (n, 1, …) with a concept axis, and `additional_args`: further arguments that have
    a row for each example, and the numbers (n,) of the examples that the rows come from. Captum repeats these
    with the rows, for steps or samples: the numbers say whose target and context is meant.
    """

    def __init__(self, request: Request, has_concept_axis: bool = False) -> None:
        super().__init__()
        self.forward_func = request.forward  # a child module if it is one: Captum looks for its layers
        self.request, self._has_concept_axis = request, has_concept_axis
        further = zip(request.args, request.has_rows, strict=True)
        numbers = torch.arange(len(request), device=request.inputs[0].device)
        self.additional_args = (*(value for value, has_rows in further if has_rows), numbers)
        self.scale = 1.0  # a power of two by which gradients are multiplied on their way

    def forward(self, *given: Any) -> Tensor:
        *rows, example = given
        request, n_inputs = self.request, len(self.request.inputs)
        inputs, of_rows = rows[:n_inputs], iter(rows[n_inputs:])
        if self._has_concept_axis:
            inputs = [x.squeeze(1) for x in inputs]
        further = zip(request.args, request.has_rows, strict=True)
        return self.read((*inputs, *(next(of_rows) if has_rows else v for v, has_rows in further)), example)

    def read(self, args: tuple[Any, ...], example: Tensor) -> Tensor:
        target: Any = self.request.target
        if target is not None and not callable(target):
            target = [target_of_example(target, i) for i in example.tolist()]
        return select_scores(self.request.forward(*copies(args)), target, len(example))

    def gradients(
        self,
        forward_fn: Callable[..., Any],
        inputs: tuple[Tensor, ...],
        target_ind: object = None,
        additional_forward_args: object = None,
    ) -> tuple[Tensor, ...]:
        """In place of Captum's gradient function: gradients of all K outputs (n, K), shapes (n, K, …)."""
        gradients = []
        with torch.enable_grad():
            outputs = _run_forward(forward_fn, inputs, None, additional_forward_args).unbind(1)
            # DeepLift's hooks use up what they left on the modules.
            hooked = [vars(module) for module in self.modules() if {"input", "output"} <= vars(module).keys()]
            used_up = [(a, a["input"], a["output"]) for a in hooked]
            for output in outputs:
                for attributes, before, after in used_up:
                    attributes.update(input=before, output=after)
                retain = output is not outputs[-1]
                total = self.scale * output.sum()
                gradients.append(
                    gradients_at_inputs(total, inputs, self.request.layer_name, retain_graph=retain)
                )
        return tuple(torch.cat(parts, dim=1) / self.scale for parts in zip(*gradients, strict=True))


def for_network(method: Attribution, network: Network, has_concepts: bool = False) -> Any:
    """A copy of a method that explains another network; Captum keeps its working state on its objects.

    `has_concepts`: its K outputs at once, by gradients.
    """
    copied = copy.copy(method)
    copied.forward_func = network
    if has_concepts:
        copied.gradient_func = network.gradients
    if isinstance(method, NoiseTunnel):
        copied.attribution_method = for_network(method.attribution_method, network, has_concepts)
    if isinstance(method, DeepLift | LRP):
        copied.model = network
        copied.forward_handles, copied.backward_handles = [], []
    if isinstance(method, DeepLift):  # its eps of 1e-10 is 0 in float16, and 0 / 0 would be a slope
        limits = [torch.finfo(x.dtype) for x in network.request.inputs if x.is_floating_point()]
        copied.eps = max(method.eps, *(limit.tiny * limit.eps for limit in limits))
    return copied


# ---------------------------------------------------------------------- hooks and rules


def hand_inputs_on_by_place(model: nn.Module) -> None:
    """Let the hooks of LRP and DeepLift see inputs that a model gives by keyword, `conv(input=x)`."""
    for module in model.modules():
        if next(module.children(), None) is None:
            module.register_forward_pre_hook(_by_place, prepend=True, with_kwargs=True)


def _by_place(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    first = next(iter(signature(module.forward).parameters), "")
    if args or first not in keywords:
        return None
    return (keywords[first],), {name: value for name, value in keywords.items() if name != first}


def rules_on(model: nn.Module) -> list[tuple[str, PropagationRule]]:
    """The rules that a user, or Captum's LRP, put on the modules of a model, with the modules' names."""
    return [
        (name, value)
        for name, module in model.named_modules()
        for value in list(vars(module).values())  # another thread may be putting its rules there
        if isinstance(value, PropagationRule)
    ]


def lrp_rules_in_force(method: LRP, request: Request, verbose: bool = False) -> tuple[Tensor, Tensor]:
    """Put LRP's rules on the model, which stay until `restored` takes them off.

    Returns the model's own output and activation at the layer, not those under the rules' weights.
    """
    lrp, activations = copy.copy(method), []
    lrp.verbose, lrp.model = verbose, eager(method.model)
    lrp.layers, lrp.forward_handles, lrp.backward_handles = [], [], []
    lrp._get_layers(lrp.model)
    lrp._check_and_attach_rules()
    for layer in lrp.layers:
        rule = getattr(layer, "rule", None)
        if rule is not None and type(rule)._manipulate_weights is not EpsilonRule._manipulate_weights:
            check_exchangeable(layer)

    def note(activation: Tensor) -> Tensor:
        activations.append(activation.clone())
        return activation

    def first_pass(*args: Any) -> Tensor:
        return cast(Tensor, lrp._compute_output_and_change_weights(args, None, None))

    with torch.no_grad():
        with replace(request, forward=first_pass).running(note) as output:
            pass
        lrp._remove_forward_hooks()  # which give the second pass the inputs of the first
        request.refuse_tokens_first(activations[0])
        lrp._register_pre_hooks()
    lrp._register_forward_hooks()
    return output, activations[0]
