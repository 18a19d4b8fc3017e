"""The two steps of Note B with a wrapped Captum method, on a request: contexts, then K maps."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from captum.attr import LRP, Attribution, DeepLift, GradientShap, NoiseTunnel
from drsa_core.checks import check_finite
from drsa_core.explainer import Explainer, refuse_noise_on_padding
from drsa_core.layer import BackwardPass, ContextMethod, GradientContext, Request, guarded
from torch import Tensor

from ._captum import draw_baselines
from .below_layer import FromLayer
from .captum_lrp import LRPPass
from .context import LayerAttributionContext, ShapleyContext
from .explain import explain_at_input
from .inputs import as_captum_target, for_own_arguments, of_function, own_arguments
from .methods import Explain, Method, within_tunnels
from .relevance_model import RelevanceModel, baseline_relevance, check_baselines


@dataclass(frozen=True)
class Steps:
    """What both steps gave: maps (N, K, …), one for each input, a, c at the layer, and what the maps miss.

    `share_around` is None where the method has not measured it.
    """

    maps: tuple[Tensor, ...]
    activation: Tensor
    context: Tensor
    lost: float = 0.0
    share_around: float | None = None


class TwoSteps(Explainer):
    """What `DisentangledAttribution` does once it has a request; the model is guarded meanwhile.

    Attributes
    ----------
    attribution_method : captum.attr.Attribution
        The wrapped method.
    """

    attribution_method: Attribution
    _record: Method
    _context_method: ContextMethod
    _own_context: bool

    def _both_steps(self, request: Request, options: dict[str, Any]) -> Steps:
        if self._adds_noise(options):
            for x in request.inputs:
                refuse_noise_on_padding(self._known_model(), x)
        if self._record.explain is None:
            unknown = sorted(set(options) - {"verbose"})
            if unknown:
                raise TypeError(
                    f"{type(self.attribution_method).__name__} takes no keyword {unknown[0]!r} here; it "
                    "knows verbose"
                )
            return self._lrp(request, **options)
        if self._takes_one_pass:
            return self._one_pass(request, options)
        return self._two_steps(request, self._record.explain, options)

    def _lrp(self, request: Request, verbose: bool = False) -> Steps:
        own = None
        if not self._own_context:  # before Captum's hooks are there
            # Guarded, as Captum's LayerLRP takes the user's rules off the model.
            own = guarded(self._known_model(), lambda: self._step_1(request)[1])
        backward = LRPPass(self.attribution_method, request, verbose)
        context = backward.context if own is None else own
        self._check_step_1(request, backward.activation, context)
        self._check_fits(backward.activation)
        maps = backward.through(context, self._fitted(), self.channel_dim)
        return Steps(maps, backward.activation, context, backward.lost, backward.share_around)

    def _one_pass(self, request: Request, options: dict[str, Any]) -> Steps:
        """Step 2 goes on with the forward pass of step 1, as the method asks for no other."""
        backward = BackwardPass(request)
        self._check_step_1(request, backward.activation, backward.context)
        self._check_fits(backward.activation)
        gradients = backward.through(self._fitted(), self.channel_dim)
        maps = explain_at_input(self._method_for(request), request, gradients, options)
        return Steps(maps, backward.activation, backward.context, share_around=backward.share_around)

    def _two_steps(self, request: Request, explain: Explain, options: dict[str, Any]) -> Steps:
        activation, context, lost = self._step_1_with_loss(request, bool(options.get("show_progress")))
        self._check_fits(activation)
        if "baselines" in options and self._record.at_input is None:
            # In place: the convergence delta needs the baselines that were drawn here.
            is_distribution = bool(options.get("draw_baseline_from_distrib"))
            options["baselines"] = self._drawn(request, options["baselines"], is_distribution)
        model = RelevanceModel(request, context, self._fitted(), self._record.needs_gradient)
        return Steps(explain(self._method_for(request), request, model, options), activation, context, lost)

    def _method_for(self, request: Request) -> Attribution:
        """The wrapped method; of a layer method its counterpart, for a request that has e as its input."""
        if self._record.at_input is None:
            return self.attribution_method
        return self._record.at_input.attributor(self.attribution_method, cast(FromLayer, request.forward))

    def _options(self, request: Request, given: dict[str, Any]) -> dict[str, Any]:
        """Keywords of the wrapped method as those of `_method_for(request)`, in a dict of their own."""
        if self._record.at_input is None:
            return dict(given)
        return self._record.at_input.options(cast(FromLayer, request.forward), given)

    def _delta(self, request: Request, steps: Steps, options: dict[str, Any]) -> Tensor:
        total = _sum_of_pixels(steps.maps)
        if self._record.explain is None:
            return self._relevance(steps.activation, steps.context) - total
        return total - self._total(request, steps.activation, steps.context, options.get("baselines"))

    def _whole(self, request: Request, options: dict[str, Any]) -> Tensor | None:
        """The map of the wrapped method by itself; None where Captum has none for a callable target."""
        method, target = self._method_for(request), as_captum_target(request.target)
        if callable(target):
            if isinstance(within_tunnels(method), DeepLift | LRP):
                return None
            forward, target = request.forward, None
            method = of_function(method, lambda *args: request.select(forward(*own_arguments(request, args))))
        else:
            method = for_own_arguments(method, request)
        method = copy.copy(method)  # Captum keeps its working state on the attributor
        inputs = request.inputs[0].detach().clone()
        if self._record.needs_gradient:
            inputs.requires_grad_()  # else Captum does it, and warns
        whole: Tensor = method.attribute(
            inputs,
            target=target,
            additional_forward_args=request.args or None,
            **options,
        )
        return whole.detach()

    def _step_1(self, request: Request) -> tuple[Tensor, Tensor]:
        return self._step_1_with_loss(request)[:2]

    def _step_1_with_loss(
        self, request: Request, show_progress: bool = False
    ) -> tuple[Tensor, Tensor, float]:
        """a, c, and the share of the relevance that sits on zero activations; gradients lose none."""
        method = self._context_method
        if show_progress and isinstance(method, ShapleyContext):
            method = replace(method, show_progress=True)  # it may take longer than step 2
        if isinstance(method, LayerAttributionContext):
            activation, context, lost = method.with_loss(request)
        else:
            activation, context = method(request)
            lost = 0.0
        self._check_step_1(request, activation, context)
        return activation, context, lost

    def _total(self, request: Request, activation: Tensor, context: Tensor, baselines: Any) -> Tensor:
        model = RelevanceModel(request, context, self._fitted())
        with torch.no_grad():
            example = torch.arange(len(request), device=activation.device)
            at_input = model.relevance(activation, example)
            together = None
            if self._record.draws_baselines:  # GradientShap draws those of each input by themselves
                is_shap = isinstance(within_tunnels(self.attribution_method), GradientShap)
                together = product if is_shap else zip
            return at_input - baseline_relevance(request, model, baselines, together)

    def _drawn(self, request: Request, baselines: Any, is_distribution: bool = False) -> Any:
        """Baselines as Captum takes them, drawn now if they are a distribution given as a function."""
        if self._record.at_input is not None:
            return self._record.at_input.baselines(cast(FromLayer, request.forward), baselines)
        if self._record.draws_baselines and baselines is not None:
            inputs = request.inputs if len(request.inputs) > 1 else request.inputs[0]
            baselines = draw_baselines(baselines, inputs)
        if self._record.needs_gradient:  # methods that perturb broadcast whatever fits
            is_distribution = is_distribution or self._record.draws_baselines
            is_exact = isinstance(within_tunnels(self.attribution_method), DeepLift)
            check_baselines(request, baselines, is_distribution, is_exact)
        return baselines

    @property
    def _takes_one_pass(self) -> bool:
        in_tunnel = isinstance(self.attribution_method, NoiseTunnel)
        return (
            self._record.in_one_pass and not in_tunnel and isinstance(self._context_method, GradientContext)
        )

    def _adds_noise(self, options: dict[str, Any]) -> bool:
        """Whether the method puts noise on its input; `GradientShap` does so only if it is asked to."""
        is_shap = isinstance(self.attribution_method, GradientShap)
        return isinstance(self.attribution_method, NoiseTunnel) or (
            is_shap and bool(np.any(options.get("stdevs", 0)))
        )

    def _check_step_1(self, request: Request, activation: Tensor, context: Tensor) -> None:
        if len(activation) != len(request) or activation.shape != context.shape:
            raise ValueError(
                f"layer {self.layer_name!r} must give an activation (N, …) for the {len(request)} examples "
                f"and the context method a context of its shape, got {tuple(activation.shape)} and "
                f"{tuple(context.shape)}"
            )
        check_finite(activation, f"the activation of layer {self.layer_name!r}")
        check_finite(context, f"the context at layer {self.layer_name!r}")


def _sum_of_pixels(maps: tuple[Tensor, ...]) -> Tensor:
    exact = torch.promote_types(maps[0].dtype, torch.float32)
    return torch.stack([m.reshape(*m.shape[:2], -1).sum(2, dtype=exact) for m in maps]).sum(0)
