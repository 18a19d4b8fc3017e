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
from captum.attr._core.deep_lift import SUPPORTED_NON_LINEAR
from captum.attr._utils.common import _format_callable_baseline
from captum.attr._utils.lrp_rules import EpsilonRule, PropagationRule
from captum.log import log_usage
from drsa_core.layer import Request, copies, eager
from drsa_core.lrp import check_exchangeable
from drsa_core.targets import select_scores, target_of_example
from torch import Tensor, nn

_F = TypeVar("_F", bound=Callable[..., Any])

#: What Captum's LRP and DeepLift write on modules.
ATTRIBUTES = ("activation", "activations", "rule", "input", "input_ref", "output")


def logged(attribute: _F) -> _F:
    """Mark a method as Captum marks its `attribute` methods: NoiseTunnel looks for the mark."""
    return cast(_F, log_usage(part_of_slo=True)(attribute))


def call_forward(forward: Callable[..., Any], inputs: tuple[Tensor, ...], args: Any) -> Tensor:
    """Call a forward function as Captum's gradient methods do: DeepLift's takes no arguments at all."""
    return cast(Tensor, _run_forward(forward, inputs, None, args))


def draw_baselines(baselines: Any, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Baselines as a tuple, drawn if they come as a function (GradientShap, DeepLiftShap)."""
    given = inputs if len(inputs) > 1 else inputs[0]
    return cast("tuple[Any, ...]", _format_callable_baseline(baselines, given))


def rules_on(model: nn.Module) -> list[tuple[str, PropagationRule]]:
    """The rules that a user, or Captum's LRP, put on the modules of a model, with the modules' names."""
    return [
        (name, value)
        for name, module in model.named_modules()
        for value in list(vars(module).values())  # another thread may be putting its rules there
        if isinstance(value, PropagationRule)
    ]


# ---------------------------------------------------------------------- the network as Captum runs it


class Network(nn.Module):
    """A function of the network as Captum runs it.

    Called with the inputs, the further arguments that have a row for each example, and last the numbers (n,) of
    the examples that the rows come from. Captum repeats these as it repeats the rows, for steps or samples: the
    numbers say whose target and context is meant. What is the same for all examples stays as it is.

    Parameters
    ----------
    request : Request
    has_concept_axis : bool
        Whether the inputs come as (n, 1, …).
    """

    def __init__(self, request: Request, has_concept_axis: bool = False) -> None:
        super().__init__()
        self.forward_func = request.forward  # a child module if it is one: Captum looks for its layers
        self._request = (request,)  # in a tuple, so that the layer does not become a child a second time
        self._has_concept_axis = has_concept_axis

    @property
    def request(self) -> Request:
        return self._request[0]

    @property
    def additional_args(self) -> tuple[Any, ...]:
        """What Captum is to hand on after the inputs."""
        request = self.request
        rows = (value for value, has_rows in zip(request.args, request.has_rows, strict=True) if has_rows)
        return (*rows, torch.arange(len(request), device=request.inputs[0].device))

    def forward(self, *given: Any) -> Tensor:
        *rows, example = given
        request, n_inputs = self.request, len(self.request.inputs)
        inputs, of_rows = rows[:n_inputs], iter(rows[n_inputs:])
        if self._has_concept_axis:
            inputs = [x.squeeze(1) for x in inputs]
        further = zip(request.args, request.has_rows, strict=True)
        return self.read((*inputs, *(next(of_rows) if has_rows else v for v, has_rows in further)), example)

    def read(self, args: tuple[Any, ...], example: Tensor) -> Tensor:
        """The explained scores (n,); subclasses read something else."""
        target: Any = self.request.target
        if target is not None and not callable(target):
            target = [target_of_example(target, i) for i in example.tolist()]
        return select_scores(self.request.forward(*copies(args)), target, len(example))


def for_network(method: Attribution, network: Network) -> Any:
    """A copy of a method that explains another network; Captum keeps its working state on its objects."""
    copied = copy.copy(method)
    copied.forward_func = network
    if isinstance(method, NoiseTunnel):
        copied.attribution_method = for_network(method.attribution_method, network)
    if isinstance(method, DeepLift | LRP):
        copied.model = network
        copied.forward_handles, copied.backward_handles = [], []
    if isinstance(method, DeepLift):  # its eps of 1e-10 is 0 in float16, and 0 / 0 would be a slope
        smallest = (torch.finfo(x.dtype).tiny for x in network.request.inputs if x.is_floating_point())
        copied.eps = max(method.eps, *smallest)
    return copied


# ---------------------------------------------------------------------- hooks


def hand_inputs_on_by_place(method: object, model: nn.Module) -> None:
    """Make models that call a layer by keyword, `conv(input=x)`, fit the hooks of LRP and DeepLift."""
    for module in model.modules():
        is_leaf = next(module.children(), None) is None
        is_hooked = isinstance(method, LRP) or type(module) in SUPPORTED_NON_LINEAR
        if isinstance(method, LRP | DeepLift) and is_leaf and is_hooked:
            module.register_forward_pre_hook(_by_place, prepend=True, with_kwargs=True)


def _by_place(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    first = next(iter(signature(module.forward).parameters), "")
    if args or first not in keywords:
        return None
    return (keywords[first],), {name: value for name, value in keywords.items() if name != first}


def deep_lift_state(network: nn.Module) -> Callable[[], None]:
    """A function that gives DeepLift's backward hooks again what they use up in one backward pass."""
    used_up = [
        (m, m.input, m.output) for m in network.modules() if hasattr(m, "input") and hasattr(m, "output")
    ]

    def restore() -> None:
        for module, before, after in used_up:
            vars(module).update(input=before, output=after)

    return restore


def lrp_rules_in_force(method: LRP, request: Request, verbose: bool = False) -> tuple[Tensor, Tensor]:
    """Put LRP's rules on the model, which stay until `restored` takes them off.

    Returns
    -------
    output : tensor
        Of the model itself.
    activation : tensor, shape (N, …, D, …)
        Its own activation at the layer, not the one under the rules' weights.
    """
    lrp = copy.copy(method)
    lrp.verbose, lrp.model = verbose, eager(method.model)
    lrp.layers, lrp.forward_handles, lrp.backward_handles = [], [], []
    lrp._get_layers(lrp.model)
    lrp._check_and_attach_rules()
    for layer in lrp.layers:
        rule = getattr(layer, "rule", None)
        if rule is not None and type(rule)._manipulate_weights is not EpsilonRule._manipulate_weights:
            check_exchangeable(layer)
    activations: list[Tensor] = []

    def note(activation: Tensor) -> Tensor:
        activations.append(activation.clone())
        return activation

    def first_pass(*args: Any) -> Tensor:
        return cast(Tensor, lrp._compute_output_and_change_weights(args, None, None))

    with torch.no_grad(), replace(request, forward=first_pass).running(note) as output:
        lrp._register_forward_hooks()
    return output, activations[0]
