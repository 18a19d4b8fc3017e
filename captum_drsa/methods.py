"""Which Captum methods can be wrapped, and the context method that each of them goes with."""

from __future__ import annotations

from enum import Enum
from typing import Any

from captum.attr import (
    LRP,
    Attribution,
    DeepLift,
    FeatureAblation,
    GradientShap,
    InputXGradient,
    IntegratedGradients,
    LayerAttribution,
    Lime,
    NeuronAttribution,
    NoiseTunnel,
    Saliency,
    ShapleyValueSampling,
)
from torch import nn

from .context import (
    ContextMethod,
    GradientContext,
    IntegratedGradientsContext,
    LayerAttributionContext,
    ShapleyContext,
)
from .lrp import LRPContext


class Family(Enum):
    """How a method explains the K outputs of the relevance model."""

    GRADIENT = "one forward pass, K backward passes"
    LRP = "one LRP pass to the layer, K from there"
    PERTURBATION = "one run with K outputs"
    SURROGATE = "one run, K fits"


# Subclasses count: ShapleyValues, Occlusion, KernelShap, DeepLiftShap.
_FAMILIES: dict[Family, tuple[type[Attribution], ...]] = {
    Family.GRADIENT: (IntegratedGradients, InputXGradient, Saliency, GradientShap, DeepLift),
    Family.LRP: (LRP,),
    Family.PERTURBATION: (ShapleyValueSampling, FeatureAblation),
    Family.SURROGATE: (Lime,),
}


def innermost(method: Attribution) -> Attribution:
    """The method inside a `NoiseTunnel`, or the method itself."""
    return innermost(method.attribution_method) if isinstance(method, NoiseTunnel) else method


def family_of(method: object) -> Family:
    """The family of a method, or an error that says which methods can be wrapped."""
    wrapped = isinstance(method, NoiseTunnel)
    inner: Any = innermost(method)
    if not isinstance(inner, LayerAttribution | NeuronAttribution):
        for family, kinds in _FAMILIES.items():
            if isinstance(inner, kinds) and (family is Family.GRADIENT or not wrapped):
                return family
    name = f"NoiseTunnel({type(inner).__name__})" if wrapped else type(inner).__name__
    hint = "; NoiseTunnel(DisentangledAttribution(...)) takes any of them" if wrapped else ""
    raise TypeError(
        f"{name} cannot be split into concepts. These can: IntegratedGradients, InputXGradient, Saliency, "
        "GradientShap, DeepLift, DeepLiftShap, NoiseTunnel around one of those; LRP, ShapleyValueSampling, "
        f"ShapleyValues, KernelShap, Lime, FeatureAblation, Occlusion{hint}"
    )


def choose_context(
    choice: str | ContextMethod | Attribution | None, method: Attribution, model: nn.Module | None
) -> ContextMethod:
    """The context method that the user names, or the one that goes with the attribution method."""
    if choice is None:
        inner = innermost(method)
        if isinstance(inner, LRP):
            return LRPContext(inner)
        if isinstance(inner, IntegratedGradients):
            return IntegratedGradientsContext()
        return GradientContext() if family_of(method) is Family.GRADIENT else ShapleyContext()
    if isinstance(choice, LayerAttribution):
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
    if callable(choice):
        return choice
    raise ValueError(
        "context_method must be one of 'gradient', 'integrated_gradients', 'shapley' and (for modules) "
        "'lrp', a context object such as ShapleyContext(n_samples=100), or a Captum layer attributor, "
        f"got {choice!r}"
    )
