"""Models that call layers with keywords, `self.conv(input=x)`: the same numbers in both adapters.

What a rule cannot serve is in `zennit_adapter/test_validate.py`.
"""

from __future__ import annotations

import pytest
import torch
from captum.attr import LRP, DeepLift, InputXGradient, IntegratedGradients, LayerDeepLift
from torch import Tensor, nn
from zennit.attribution import Gradient
from zennit.attribution import IntegratedGradients as ZennitIntegratedGradients
from zennit.composites import BetaSmooth, EpsilonPlus, GuidedBackprop, LayerMapComposite
from zennit.core import Composite, Hook
from zennit.rules import Pass

from captum_drsa import DisentangledAttribution
from tests.model_state import model_state
from tests.toys import subspaces, vectors
from zennit_drsa import ConvNetGamma, DisentangledAttributor, DisentangledComposite, doctor
from zennit_drsa.rules import BoundedInput, PixelBox, PositiveGamma, ZeroRule

LAYERS = ("below", "act", "above", "last", "head")


class Named(nn.Module):
    """Five layers, of which those in `named` get their input by its name."""

    def __init__(self, named: tuple[str, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below, self.act = nn.Linear(6, 8), nn.ReLU()
        self.above, self.last, self.head = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5)
        self.named = named
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        for name in LAYERS:
            layer = getattr(self, name)
            x = layer(input=x) if name in self.named else layer(x)
        return x


def of_linear(rule: Hook) -> Composite:
    return LayerMapComposite([(nn.ReLU, Pass()), (nn.Linear, rule)])


COMPOSITES = {
    "none": lambda: None,
    "epsilon plus": EpsilonPlus,
    "guided": GuidedBackprop,
    "smooth": BetaSmooth,
    "convnet gamma": lambda: ConvNetGamma(0.25, canonizers=[]),
    "positive gamma": lambda: of_linear(PositiveGamma()),
    "zero": lambda: of_linear(ZeroRule()),
    "pixel box": lambda: of_linear(PixelBox(-9.0, 9.0)),
    "bounded input": lambda: of_linear(BoundedInput(-9.0, 9.0)),
}
ZENNIT = {
    f"{kind.__name__}, {composite}": lambda model, kind=kind, make=make: DisentangledAttributor(
        kind(model, make()), "act", subspaces(8)
    )
    for kind in (Gradient, ZennitIntegratedGradients)
    for composite, make in COMPOSITES.items()
}
CAPTUM = {
    kind.__name__: lambda model, kind=kind: DisentangledAttribution(kind(model), "last", subspaces(8))
    for kind in (LRP, DeepLift, InputXGradient, IntegratedGradients)
}
CONTEXTS = {
    "contexts of LRP": lambda model: DisentangledAttribution(
        InputXGradient(model), "act", subspaces(8), "lrp"
    ),
    "contexts of LayerDeepLift": lambda model: DisentangledAttribution(
        InputXGradient(model), "act", subspaces(8), LayerDeepLift(model, model.act)
    ),
}
WRAPPERS = {**ZENNIT, **CAPTUM, **CONTEXTS}


@pytest.mark.filterwarnings("ignore:.*negative inputs", "ignore:.*sits on zero activations")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_maps_and_contexts_are_the_same(wrapper: str) -> None:
    def explained(named: tuple[str, ...]) -> tuple[Tensor, ...]:
        model = Named(named)
        before = model_state(model)
        run = WRAPPERS[wrapper](model)
        found = run.explain(vectors(), 1)
        assert model_state(model) == before
        assert found.whole is not None
        return found.maps, found.whole, run.context(vectors(), 1)[1]

    for here, there in zip(explained(LAYERS), explained(()), strict=True):
        assert torch.equal(here, there)


def test_one_concept_with_zennits_own_attributor() -> None:
    def relevance(named: tuple[str, ...]) -> Tensor:
        model = Named(named)
        before = model_state(model)
        with Gradient(model, DisentangledComposite(EpsilonPlus(), "act", subspaces(8), 0)) as attributor:
            for _ in range(2):
                found: Tensor = attributor(vectors(), torch.eye(5)[[1] * 3])[1]
        assert model_state(model) == before
        return found

    assert torch.equal(relevance(LAYERS), relevance(()))


def test_what_the_doctor_sees_is_the_same() -> None:
    def by_layer(named: tuple[str, ...]) -> list[tuple[str, float, float]]:
        found = doctor(Named(named), EpsilonPlus(), vectors(), 1, verbose=False)
        return [(layer.name, layer.received, layer.handed_down) for layer in found.layers]

    assert by_layer(LAYERS) == by_layer(())
