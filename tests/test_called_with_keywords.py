"""Models that call layers with keywords, `self.conv(input=x)`: right in both adapters, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("captum")
pytest.importorskip("zennit")

from captum.attr import LRP, DeepLift, InputXGradient, IntegratedGradients, LayerDeepLift
from zennit.attribution import Gradient
from zennit.attribution import IntegratedGradients as ZennitIntegratedGradients
from zennit.composites import BetaSmooth, EpsilonPlus, GuidedBackprop, LayerMapComposite
from zennit.core import Composite, Hook
from zennit.rules import Epsilon, Pass

from captum_drsa import DisentangledAttribution
from tests.model_state import model_state
from tests.zennit_adapter.models import subspaces
from zennit_drsa import ConvNetGamma, DisentangledAttributor, DisentangledComposite, SubspaceFilter, doctor
from zennit_drsa._zennit import runs_with_input_alone
from zennit_drsa.kept import BIASES, KeptRelevance
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


class Scaled(nn.Linear):
    """A linear layer with a further argument."""

    def forward(self, input: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(input if scale is None else input * scale)


class WithScale(nn.Module):
    """The further argument of `below` is left out, has its default, or is given by its place or name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below, self.act, self.head, self.how = Scaled(6, 8), nn.ReLU(), nn.Linear(8, 5), how
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.linspace(0.1, 3, 6).expand_as(x)
        call = {
            "not": lambda: self.below(x),
            "default": lambda: self.below(input=x, scale=None),
            "place": lambda: self.below(x, scale),
            "name": lambda: self.below(x, scale=scale),
        }[self.how]
        scores: Tensor = self.head(self.act(call()))
        return scores


def vectors() -> Tensor:
    return torch.rand(3, 6, generator=torch.Generator().manual_seed(1)) + 0.1


def of_linear(rule) -> Composite:
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


@pytest.mark.filterwarnings("ignore:.*negative inputs", "ignore:.*sits on zero activations")
@pytest.mark.parametrize("composite", COMPOSITES)
@pytest.mark.parametrize("attributor", [Gradient, ZennitIntegratedGradients])
def test_zennit(composite: str, attributor) -> None:
    def explained(named: tuple[str, ...]) -> tuple[Tensor, ...]:
        model = Named(named)
        before = model_state(model)
        run = DisentangledAttributor(attributor(model, COMPOSITES[composite]()), "act", subspaces(8))
        found = run.explain(vectors(), 1)
        assert model_state(model) == before
        assert found.whole is not None
        return found.maps, found.whole, found.concept_relevance

    for here, there in zip(explained(LAYERS), explained(()), strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("kind", ["composite", "filter"])
def test_zennit_filters(kind: str) -> None:
    def relevance(named: tuple[str, ...]) -> Tensor:
        model = Named(named)
        before = model_state(model)
        chosen = (
            DisentangledComposite(EpsilonPlus(), "act", subspaces(8), 0)
            if kind == "composite"
            else EpsilonPlus(canonizers=[SubspaceFilter("act", subspaces(8), 0)])
        )
        with Gradient(model, chosen) as attributor:
            for _ in range(2):
                found: Tensor = attributor(vectors(), torch.eye(5)[[1] * 3])[1]
        # Zennit 1.0.0 by itself leaves the parameters elsewhere in memory; our composite puts them back.
        assert kind == "filter" or model_state(model) == before
        return found

    assert torch.equal(relevance(LAYERS), relevance(()))


def test_what_is_kept_and_what_the_doctor_sees_are_the_same() -> None:
    def by_layer(named: tuple[str, ...]) -> list[tuple[str, float, float]]:
        found = doctor(Named(named), EpsilonPlus(), vectors(), 1)
        return [(layer.name, layer.received, layer.handed_down) for layer in found.layers]

    assert by_layer(LAYERS) == by_layer(())
    kept = []
    for named in (LAYERS, ()):
        model, measured = Named(named), KeptRelevance(3)
        with measured.measured(model.modules()):
            model(vectors().requires_grad_()).sum().backward()
        kept.append(measured.by_label()[BIASES])
    assert torch.equal(*kept)


def maps_with_scale(how: str, rule: Hook) -> Tensor:
    run = DisentangledAttributor(Gradient(WithScale(how), of_linear(rule)), "act", subspaces(8))
    return run.explain(vectors(), 1).maps


@pytest.mark.parametrize("rule", [Epsilon, PositiveGamma, lambda: PixelBox(-9.0, 9.0)])
def test_further_arguments_that_a_rule_would_leave_out_are_refused(rule) -> None:
    def maps(how: str) -> Tensor:
        return maps_with_scale(how, rule())

    assert torch.equal(maps("default"), maps("not"))
    for how in ("place", "name"):
        if not runs_with_input_alone(rule()):  # Zennit 1.0.0 hands all arguments on, and is right
            expected = maps_with_scale(how, ZeroRule())  # Epsilon with ε = 0
            torch.testing.assert_close(maps(how), expected, rtol=1e-4, atol=1e-5)
            continue
        with pytest.raises(ValueError, match=r"'below' \(Scaled\) is called with more .* \(scale\), but its"):
            maps(how)


def test_rules_that_take_the_gradient_of_the_layer_serve_further_arguments() -> None:
    assert torch.equal(*(maps_with_scale(how, ZeroRule()) for how in ("place", "name")))


def test_keywords_without_the_first_argument_are_refused() -> None:
    class Only(nn.ReLU):
        def forward(self, *, values: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(values)

    class Model(Named):
        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.head(self.last(self.above(self.act(values=self.below(x)))))
            return scores

    model = Model()
    model.act = Only()
    run = DisentangledAttributor(Gradient(model, EpsilonPlus()), "last", subspaces(8))
    with pytest.raises(ValueError, match=r"'act' \(Only\) is called with keywords alone, values, .* rules"):
        run.explain(vectors(), 1)
    plain = DisentangledAttributor(Gradient(model), "last", subspaces(8)).explain(vectors(), 1)
    assert plain.maps.shape == (3, 3, 6)


@pytest.mark.parametrize("method", [LRP, DeepLift, InputXGradient, IntegratedGradients])
def test_captum(method) -> None:
    def explained(named: tuple[str, ...]) -> tuple[Tensor, ...]:
        model = Named(named)
        before = model_state(model)
        found = DisentangledAttribution(method(model), "last", subspaces(8)).explain(vectors(), 1)
        assert model_state(model) == before
        assert found.whole is not None
        return found.maps, found.whole, found.concept_relevance

    for here, there in zip(explained(LAYERS), explained(()), strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("context", ["lrp", LayerDeepLift])
def test_captum_contexts(context) -> None:
    def contexts(named: tuple[str, ...]) -> Tensor:
        model = Named(named)
        chosen = context if isinstance(context, str) else context(model, model.act)
        run = DisentangledAttribution(InputXGradient(model), "act", subspaces(8), chosen)
        return run.context(vectors(), 1)[1]

    assert torch.equal(contexts(LAYERS), contexts(()))
