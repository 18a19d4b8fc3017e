"""Which Captum methods can be wrapped: one record for each, and the context that it goes with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from captum.attr import (
    LRP,
    Attribution,
    DeepLift,
    DeepLiftShap,
    FeatureAblation,
    GradientShap,
    InputXGradient,
    IntegratedGradients,
    KernelShap,
    LayerAttribution,
    LayerDeepLift,
    LayerFeatureAblation,
    LayerGradientXActivation,
    LayerIntegratedGradients,
    Lime,
    NeuronAttribution,
    NoiseTunnel,
    Occlusion,
    Saliency,
    ShapleyValues,
    ShapleyValueSampling,
)
from drsa_core.layer import ContextMethod, GradientContext, IntegratedGradientsContext, Request
from torch import Tensor, nn

from .below_layer import (
    DEEP_LIFT,
    FEATURE_ABLATION,
    GRADIENT_X_ACTIVATION,
    INTEGRATED_GRADIENTS,
    AtInput,
)
from .captum_lrp import LRPContext
from .context import LayerAttributionContext, ShapleyContext
from .explain import explain_by_gradient, explain_by_perturbation, explain_by_surrogate
from .relevance_model import RelevanceModel

Explain: TypeAlias = Callable[[Attribution, Request, RelevanceModel, dict[str, Any]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Method:
    """What there is to know about a Captum method.

    Attributes
    ----------
    kind : type
        Subclasses count, unless they have a record of their own.
    explain : function or None
        How it explains the K outputs of the relevance model (step 2). None: LRP, which has no step 2.
    context : function
        The attributor ↦ its context method (step 1).
    needs_gradient : bool
        Whether inputs must be floating point. Such methods broadcast over an axis of concepts.
    in_one_pass : bool
        Whether it asks for one gradient at the input alone, so that both steps come from one forward pass.
    draws_baselines : bool
        Whether its baselines are a distribution.
    at_input : AtInput or None
        Of a layer method, how it becomes one for inputs. Subclasses of it do not count: what they change
        would be lost.
    """

    kind: type[Attribution]
    explain: Explain | None
    context: Callable[[Attribution], ContextMethod]
    needs_gradient: bool = True
    in_one_pass: bool = False
    draws_baselines: bool = False
    at_input: AtInput | None = None

    def fits(self, method: object) -> bool:
        """Whether this is the record of a method."""
        if self.at_input is not None:
            return type(method) is self.kind
        return isinstance(method, self.kind) and not isinstance(method, LayerAttribution | NeuronAttribution)


def _gradient(method: Attribution) -> ContextMethod:
    return GradientContext()


def _path(method: Attribution) -> ContextMethod:
    return IntegratedGradientsContext()


def _shapley(method: Attribution) -> ContextMethod:
    return ShapleyContext()


# Subclasses stand before the classes that they come from.
METHODS = (
    Method(IntegratedGradients, explain_by_gradient, _path),
    Method(InputXGradient, explain_by_gradient, _gradient, in_one_pass=True),
    Method(Saliency, explain_by_gradient, _gradient, in_one_pass=True),
    Method(GradientShap, explain_by_gradient, _gradient, draws_baselines=True),
    Method(DeepLiftShap, explain_by_gradient, _gradient, draws_baselines=True),
    Method(DeepLift, explain_by_gradient, _gradient),
    Method(LRP, None, LRPContext),
    Method(ShapleyValues, explain_by_perturbation, _shapley, needs_gradient=False),
    Method(ShapleyValueSampling, explain_by_perturbation, _shapley, needs_gradient=False),
    Method(Occlusion, explain_by_perturbation, _shapley, needs_gradient=False),
    Method(FeatureAblation, explain_by_perturbation, _shapley, needs_gradient=False),
    Method(KernelShap, explain_by_surrogate, _shapley, needs_gradient=False),
    Method(Lime, explain_by_surrogate, _shapley, needs_gradient=False),
    Method(LayerIntegratedGradients, explain_by_gradient, _path, at_input=INTEGRATED_GRADIENTS),
    Method(
        LayerGradientXActivation,
        explain_by_gradient,
        _gradient,
        in_one_pass=True,
        at_input=GRADIENT_X_ACTIVATION,
    ),
    Method(LayerDeepLift, explain_by_gradient, _gradient, at_input=DEEP_LIFT),
    Method(
        LayerFeatureAblation,
        explain_by_perturbation,
        _shapley,
        needs_gradient=False,
        at_input=FEATURE_ABLATION,
    ),
)


def within_tunnels(method: Attribution) -> Attribution:
    """The method inside a `NoiseTunnel`, or the method itself."""
    return within_tunnels(method.attribution_method) if isinstance(method, NoiseTunnel) else method


def record_of(method: object) -> Method:
    """The record of a method, or an error that says which methods can be wrapped."""
    in_tunnel = isinstance(method, NoiseTunnel)
    inner: Any = within_tunnels(method)
    for record in METHODS:
        if record.fits(inner) and (not in_tunnel or _fits_a_tunnel(record)):
            return record
    name = f"NoiseTunnel({type(inner).__name__})" if in_tunnel else type(inner).__name__
    hint = "; NoiseTunnel(DisentangledAttribution(...)) takes any of them" if in_tunnel else ""
    tunnels = [record.kind.__name__ for record in METHODS if _fits_a_tunnel(record)]
    others = [record.kind.__name__ for record in METHODS if not _fits_a_tunnel(record)]
    raise TypeError(
        f"{name} cannot be split into concepts. These can: {', '.join(tunnels)}, NoiseTunnel around one of "
        f"those; {', '.join(others)}{hint}"
    )


def _fits_a_tunnel(record: Method) -> bool:
    """Whether the method may stand inside a `NoiseTunnel`, which puts noise on the input."""
    return record.explain is explain_by_gradient and record.at_input is None


def choose_context(
    choice: str | ContextMethod | Attribution | None,
    method: Attribution,
    model: nn.Module | None,
    layer: nn.Module,
) -> ContextMethod:
    """The context method that the user names, or the one that goes with the attribution method."""
    if choice is None:
        return record_of(method).context(within_tunnels(method))
    if isinstance(choice, LayerAttribution):
        if choice.layer is not layer:
            raise ValueError(
                f"context_method {type(choice).__name__} was made for another model or layer; make it with "
                "the model and the layer that are explained"
            )
        return LayerAttributionContext(choice)
    if choice == "lrp" and model is not None:
        return LRPContext(LRP(model))
    by_name: dict[object, ContextMethod] = {
        "gradient": GradientContext(),
        "integrated_gradients": IntegratedGradientsContext(),
        "shapley": ShapleyContext(),
    }
    if isinstance(choice, str) and choice in by_name:
        return by_name[choice]
    if isinstance(choice, LRPContext) and model is not None and choice.method.model is not model:
        raise ValueError("context_method LRPContext was made for another model than the one explained")
    if callable(choice) and not isinstance(choice, type):
        return choice
    raise ValueError(
        "context_method must be one of 'gradient', 'integrated_gradients', 'shapley' and (for modules) "
        "'lrp', a context object such as ShapleyContext(n_samples=100), or a Captum layer attributor, "
        f"got {choice!r}"
    )
