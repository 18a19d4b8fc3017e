"""Layers in checkpointed parts of a model run twice: right in both adapters, or refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("captum")
pytest.importorskip("zennit")

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
from zennit.attribution import Gradient, Occlusion
from zennit.attribution import IntegratedGradients as ZennitIntegratedGradients
from zennit.composites import BetaSmooth, EpsilonPlus

from captum_drsa import DisentangledAttribution
from tests.model_state import model_state
from tests.zennit_adapter.models import subspaces
from zennit_drsa import ConvNetGamma, DisentangledAttributor, DisentangledComposite, SubspaceFilter

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


def vectors() -> Tensor:
    return torch.rand(3, 6, generator=torch.Generator().manual_seed(1)) + 0.1


COMPOSITES = {
    "none": lambda: None,
    "epsilon plus": EpsilonPlus,
    "smooth": BetaSmooth,
    "convnet gamma": lambda: ConvNetGamma(0.25, canonizers=[]),
}
CAPTUM = (LRP, DeepLift, InputXGradient, IntegratedGradients, ShapleyValueSampling)
LAYER_METHODS = (
    LayerDeepLift,
    LayerFeatureAblation,
    LayerGradientXActivation,
    LayerIntegratedGradients,
)


@pytest.mark.parametrize("segment", SEGMENTS)
@pytest.mark.parametrize("composite", COMPOSITES)
@pytest.mark.parametrize("attributor", [Gradient, ZennitIntegratedGradients, Occlusion])
def test_zennit(segment: str, composite: str, attributor) -> None:
    def maps(model: nn.Module) -> Tensor:
        before = model_state(model)
        run = DisentangledAttributor(attributor(model, COMPOSITES[composite]()), "act", subspaces(8))
        found = run.explain(vectors(), 1, whole=False).maps
        assert model_state(model) == before
        return found

    torch.testing.assert_close(maps(Checkpointed(segment)), maps(Checkpointed()), rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match=r"checkpoint.* use_reentrant=False"):
        maps(Checkpointed(segment, is_reentrant=True))


@pytest.mark.parametrize("segment", SEGMENTS)
@pytest.mark.parametrize("composite", ["none", "epsilon plus"])
@pytest.mark.parametrize("kind", ["composite", "filter"])
def test_zennit_filters(segment: str, composite: str, kind: str) -> None:
    def relevance(model: nn.Module) -> Tensor:
        chosen = DisentangledComposite(COMPOSITES[composite](), "act", subspaces(8), 0)
        if kind == "filter" and composite != "none":
            chosen = EpsilonPlus(canonizers=[SubspaceFilter("act", subspaces(8), 0)])
        with Gradient(model, chosen) as attributor:
            for _ in range(2):
                found: Tensor = attributor(vectors(), torch.eye(5)[[1] * 3])[1]
        return found

    assert torch.equal(relevance(Checkpointed(segment)), relevance(Checkpointed()))


def test_filters_are_right_in_reentrant_parts_that_torch_can_differentiate() -> None:
    def gradient(model: nn.Module) -> Tensor | None:
        x = vectors().requires_grad_()
        with DisentangledComposite(None, "act", subspaces(8), 0).context(model):
            model(x)[:, 1].sum().backward()
        return x.grad

    plain = gradient(Checkpointed())
    assert plain is not None
    for segment in SEGMENTS:
        found = gradient(Checkpointed(segment, is_reentrant=True))
        assert found is not None
        assert torch.equal(found, plain)


@pytest.mark.filterwarnings("ignore:Setting forward, backward hooks")
@pytest.mark.parametrize("segment", SEGMENTS)
@pytest.mark.parametrize("method", CAPTUM)
def test_captum(segment: str, method) -> None:
    def maps(model: nn.Module) -> Tensor:
        before = model_state(model)
        torch.manual_seed(0)
        run = DisentangledAttribution(method(model), "act", subspaces(8))
        found: Tensor = run.attribute(vectors(), target=1)
        assert model_state(model) == before
        return found

    torch.testing.assert_close(maps(Checkpointed(segment)), maps(Checkpointed()), rtol=1e-6, atol=1e-7)
    reentrant = Checkpointed(segment, is_reentrant=True)
    if method is ShapleyValueSampling:  # needs no gradients
        assert torch.equal(maps(reentrant), maps(Checkpointed()))
        return
    with pytest.raises(ValueError, match=r"checkpoint.* use_reentrant="):
        maps(reentrant)


@pytest.mark.filterwarnings("ignore:.*goes around layer")
@pytest.mark.parametrize("has_bypass", [False, True])
def test_the_second_run_sees_the_activations_of_the_path(has_bypass: bool) -> None:
    """Where copies of the example are run, the second run has the right shape, and had the wrong values."""

    def context(segment: str) -> Tensor:
        model = Checkpointed(segment, has_bypass=has_bypass)
        run = DisentangledAttribution(IntegratedGradients(model), "act", subspaces(8))
        return run.context(vectors(), 1)[1]

    assert torch.equal(context("around"), context(""))


@pytest.mark.filterwarnings("ignore:Setting forward, backward hooks", "ignore:.*goes around layer")
@pytest.mark.parametrize("method", LAYER_METHODS)
def test_captum_layer_methods(method) -> None:
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

    model = Frozen()
    for explain in (
        DisentangledAttributor(Gradient(model), "act", subspaces(8)).explain,
        DisentangledAttribution(InputXGradient(model), "act", subspaces(8)).explain,
    ):
        with pytest.raises(ValueError, match=r"layer 'act' runs without gradients .* torch.no_grad\(\) away"):
            explain(vectors(), 1)


@pytest.mark.parametrize("method", LAYER_METHODS[1:])
def test_layer_methods_of_functions_leave_no_hook(method) -> None:
    model = Checkpointed()
    before = model_state(model)
    run = DisentangledAttribution(method(lambda x: model(x), model.first), model.act, subspaces(8))
    run.attribute(vectors(), target=1)
    assert model_state(model) == before
    assert model(vectors()).shape == (3, 5)
