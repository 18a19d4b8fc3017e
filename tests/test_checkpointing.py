"""Layers in checkpointed parts of a model run twice: right in both adapters, or refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import (
    LRP,
    DeepLift,
    InputXGradient,
    IntegratedGradients,
    LayerDeepLift,
    LayerFeatureAblation,
    LayerGradientXActivation,
    LayerIntegratedGradients,
    ShapleyValueSampling,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zennit.attribution import Gradient, Occlusion
from zennit.attribution import IntegratedGradients as ZennitIntegratedGradients
from zennit.composites import BetaSmooth, EpsilonPlus

from captum_drsa import DisentangledAttribution
from tests.model_state import model_state
from tests.toys import subspaces, vectors
from zennit_drsa import ConvNetGamma, DisentangledAttributor, DisentangledComposite, SubspaceFilter

pytestmark = pytest.mark.filterwarnings(
    "ignore:Setting forward, backward hooks", "ignore:.*goes around layer"
)
#: Below the layer up to it, around it, and above it.
SEGMENTS = ("below", "around", "above")


class Checkpointed(nn.Module):
    """Parts of which one may be checkpointed; the layer of the tests is `act`.

    With `has_bypass` the part above the layer does not take another batch size than the input.
    """

    def __init__(self, segment: str = "", is_reentrant: bool = False, has_bypass: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.act = nn.Linear(6, 6), nn.Linear(6, 8), nn.ReLU()
        self.above, self.last, self.head = nn.Linear(8, 8), nn.ReLU(), nn.Linear(14, 5)
        self.segment, self.is_reentrant, self.has_bypass = segment, is_reentrant, has_bypass
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if self.segment == "around":
            h = self._run(lambda x: self._upper(self._lower(x)), x)
        elif self.segment == "below":
            h = self._upper(self._run(self._lower, x))
        elif self.segment == "above":
            h = self._run(self._upper, self._lower(x))
        else:
            h = self._upper(self._lower(x))
        rest = x if self.has_bypass else h.new_zeros(len(h), 6)
        scores: Tensor = self.head(torch.cat([h, rest], 1))
        return scores

    def _run(self, part, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(part, x, use_reentrant=self.is_reentrant)
        return result

    def _lower(self, x: Tensor) -> Tensor:
        result: Tensor = self.act(self.second(torch.tanh(3 * self.first(x))))
        return result

    def _upper(self, a: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(3 * self.above(a)))
        return result


COMPOSITES: dict[str, Any] = {
    "none": lambda: None,
    "epsilon plus": EpsilonPlus,
    "smooth": BetaSmooth,
    "convnet gamma": lambda: ConvNetGamma(0.25, canonizers=[]),
}
WRAPPERS: dict[str, Any] = {
    f"zennit {kind.__name__}, {name}": lambda model, kind=kind, make=make: DisentangledAttributor(
        kind(model, make()), "act", subspaces(8)
    )
    for kind in (Gradient, ZennitIntegratedGradients, Occlusion)
    for name, make in COMPOSITES.items()
} | {
    f"captum {kind.__name__}": lambda model, kind=kind: DisentangledAttribution(
        kind(model), "act", subspaces(8)
    )
    for kind in (LRP, DeepLift, InputXGradient, IntegratedGradients, ShapleyValueSampling)
}


def maps_of(wrapper: str, model: nn.Module) -> Tensor:
    before = model_state(model)
    torch.manual_seed(0)
    found: Tensor = WRAPPERS[wrapper](model).explain(vectors(), 1, whole=False).maps
    assert model_state(model) == before
    return found


@pytest.mark.parametrize("segment", SEGMENTS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_maps_of_checkpointed_models(segment: str, wrapper: str) -> None:
    expected = maps_of(wrapper, Checkpointed())
    torch.testing.assert_close(maps_of(wrapper, Checkpointed(segment)), expected, rtol=1e-6, atol=1e-7)
    reentrant = Checkpointed(segment, is_reentrant=True)
    if "Shapley" in wrapper:  # needs no gradients
        assert torch.equal(maps_of(wrapper, reentrant), expected)
        return
    with pytest.raises(ValueError, match=r"checkpoint.* use_reentrant="):
        maps_of(wrapper, reentrant)


@pytest.mark.parametrize("segment", SEGMENTS)
@pytest.mark.parametrize("composite", ["none", "epsilon plus", "filter"])
def test_one_concept_with_zennits_own_attributor(segment: str, composite: str) -> None:
    def relevance(model: nn.Module) -> Tensor:
        if composite == "filter":
            chosen: Any = EpsilonPlus(canonizers=[SubspaceFilter("act", subspaces(8), 0)])
        else:
            chosen = DisentangledComposite(COMPOSITES[composite](), "act", subspaces(8), 0)
        with Gradient(model, chosen) as attributor:
            for _ in range(2):
                found: Tensor = attributor(vectors(), torch.eye(5)[[1] * 3])[1]
        return found

    assert torch.equal(relevance(Checkpointed(segment)), relevance(Checkpointed()))


def test_filters_are_right_in_reentrant_parts_that_torch_can_differentiate() -> None:
    def gradient(model: nn.Module) -> Tensor:
        x = vectors().requires_grad_()
        with DisentangledComposite(None, "act", subspaces(8), 0).context(model):
            model(x)[:, 1].sum().backward()
        assert x.grad is not None
        return x.grad

    for segment in SEGMENTS:
        assert torch.equal(gradient(Checkpointed(segment, is_reentrant=True)), gradient(Checkpointed()))


@pytest.mark.parametrize("has_bypass", [False, True])
def test_the_second_run_sees_the_activations_of_the_path(has_bypass: bool) -> None:
    """Where copies of the example are run, the second run has the right shape, and had the wrong values."""

    def context(segment: str) -> Tensor:
        model = Checkpointed(segment, has_bypass=has_bypass)
        run = DisentangledAttribution(IntegratedGradients(model), "act", subspaces(8))
        return run.context(vectors(), 1)[1]

    assert torch.equal(context("around"), context(""))


@pytest.mark.parametrize(
    "method", [LayerDeepLift, LayerFeatureAblation, LayerGradientXActivation, LayerIntegratedGradients]
)
def test_captums_layer_methods(method) -> None:
    takes_baselines = method in (LayerDeepLift, LayerIntegratedGradients)
    options: dict[str, Any] = {"baselines": 0.0} if takes_baselines else {}

    def maps(segment: str) -> Tensor:
        model = Checkpointed(segment, has_bypass=True)
        before = model_state(model)
        torch.manual_seed(0)
        run = DisentangledAttribution(method(model, model.first), "act", subspaces(8))
        found: Tensor = run.attribute(vectors(), target=1, **options)
        assert model_state(model) == before
        return found

    torch.testing.assert_close(maps("around"), maps(""), rtol=1e-6, atol=1e-7)


def test_layers_without_gradients_are_named() -> None:
    class Frozen(Checkpointed):
        def _lower(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super()._lower(x)

    for wrapper in ("zennit Gradient, none", "captum InputXGradient"):
        with pytest.raises(ValueError, match=r"layer 'act' runs without gradients .* torch.no_grad\(\) away"):
            maps_of(wrapper, Frozen())
