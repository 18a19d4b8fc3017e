"""Step 1: activations and contexts at the layer, by every method that finds them."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import (
    LRP,
    DeepLift,
    InputXGradient,
    IntegratedGradients,
    InternalInfluence,
    LayerDeepLift,
    LayerGradientXActivation,
    LayerIntegratedGradients,
    Saliency,
    ShapleyValueSampling,
)
from drsa_core import Subspaces
from torch import Tensor, nn

from captum_drsa import (
    DisentangledAttribution,
    IntegratedGradientsContext,
    LayerAttributionContext,
    LRPContext,
    ShapleyContext,
)
from tests.captum_adapter.networks import TwoInputs, conv_net, images, subspaces
from tests.closeness import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:Setting forward, backward hooks", "ignore:Input Tensor")


def split(method, layer: Any = "features.4", n_features=8, **options) -> DisentangledAttribution:
    return DisentangledAttribution(method, layer, subspaces(n_features), **options)


# ---------------------------------------------------------------------- which one


def integrated_by_hand(model: nn.Module, layer: nn.Module, x: Tensor, target: int) -> Tensor:
    """c = ∫ ∂y/∂a dt from 0 to a by 100 Gauss–Legendre nodes, each a run of the whole model.

    Captum's LayerIntegratedGradients starts at φ(0) instead, so that it cannot serve as the reference.
    """
    nodes, weights = np.polynomial.legendre.leggauss(100)
    total = torch.zeros(())
    for t, w in zip((nodes + 1) / 2, weights / 2, strict=True):
        leaves: list[Tensor] = []

        def scale(_: nn.Module, __: object, a: Tensor, t: float = float(t), leaves=leaves):
            leaves.append((t * a).detach().requires_grad_())
            return leaves[0].clone()

        handle = layer.register_forward_hook(scale)
        score = model(x)[:, target].sum()
        handle.remove()
        total = total + float(w) * torch.autograd.grad(score, leaves[0])[0]
    return total


def test_default_contexts() -> None:
    """IG: from 0, with 100 steps or as many as it takes; gradient methods: the gradient, as of Captum."""
    model, x = conv_net(), images()
    by_hand = integrated_by_hand(model, model.features[4], x, 3)
    _, c = split(IntegratedGradients(model), context_method=IntegratedGradientsContext(100)).context(x, 3)
    torch.testing.assert_close(c, by_hand, rtol=1e-4, atol=1e-7)
    _, c = split(IntegratedGradients(model)).context(x, 3)
    assert float((c - by_hand).norm()) <= 0.05 * float(by_hand.norm())  # fewer steps along a path with kinks
    for method in (InputXGradient, Saliency, DeepLift):
        a, c = split(method(model)).context(x, 3)
        layer = LayerGradientXActivation(model, model.features[4], multiply_by_inputs=False)
        torch.testing.assert_close(c, layer.attribute(x, target=3).detach())
        torch.testing.assert_close(a, model.features(x).detach())


def test_context_methods_by_name_object_and_layer_attributor() -> None:
    model, x = conv_net(), images()
    a, ig = split(InputXGradient(model), context_method="integrated_gradients").context(x, 3)
    by_object = split(InputXGradient(model), context_method=IntegratedGradientsContext())
    torch.testing.assert_close(by_object.context(x, 3)[1], ig)
    lrp = split(InputXGradient(model), context_method="lrp").context(x, 3)[1]
    torch.testing.assert_close(lrp, split(LRP(model)).context(x, 3)[1])
    attributor = LayerGradientXActivation(model, model.features[4])
    gradient = split(InputXGradient(model)).context(x, 3)[1]
    for target in (3, np.array([3, 3]), lambda y: y[:, 3]):
        by_relevance = split(InputXGradient(model), context_method=attributor).context(x, target)[1]
        torch.testing.assert_close(by_relevance, torch.where(a != 0, gradient, 0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("context", ["integrated_gradients", ShapleyContext(3), "layer"])
def test_contexts_with_tuples_and_arguments(context) -> None:
    torch.manual_seed(0)
    model = TwoInputs().eval()
    inputs, scale = (torch.randn(2, 4), torch.randn(2, 3)), torch.tensor([1.0, 3.0])
    chosen = LayerGradientXActivation(model, model.layer) if context == "layer" else context
    a, c = split(InputXGradient(model), "layer", 6, context_method=chosen).context(inputs, 1, (scale, 1))
    # y is linear in a: every context is the gradient, scale · w, where maps are active.
    expected = (scale[:, None] * model.out.weight[1]).detach()
    torch.testing.assert_close(c[a != 0], expected[a != 0], rtol=1e-4, atol=1e-5)


class TwoHeads(nn.Module):
    """`forward` scores by one head, `other` by another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below, self.act = nn.Linear(6, 8), nn.ReLU()
        self.one, self.two = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(self.act(self.below(x)))

    def other(self, x: Tensor) -> Tensor:
        return self.two(self.act(self.below(x)))


def test_methods_that_explain_modules_are_refused_for_a_bound_method() -> None:
    """LRP and Captum's layer attributors would explain `model.forward` instead."""
    model, x = TwoHeads(), torch.rand(2, 6)
    for context in ("lrp", LRPContext(LRP(model)), LayerDeepLift(model, model.act)):
        with pytest.raises(ValueError, match="context_method"):
            split(InputXGradient(model.other), "act", context_method=context)
    own = split(
        InputXGradient(model.other), "act", context_method=LayerGradientXActivation(model.other, model.act)
    )
    a, c = own.context(x, 1)
    assert_same(c[a != 0], model.two.weight[1].expand(2, 8)[a != 0])
    _, c = split(IntegratedGradients(model.other), "act").context(x, 1)
    assert_same(c, model.two.weight[1].expand(2, 8))


def test_layer_attributors_that_cannot_give_contexts() -> None:
    model, other = conv_net(), conv_net()
    for attributor in (
        LayerGradientXActivation(other, other.features[4]),
        LayerGradientXActivation(model, model.features[3]),
    ):
        with pytest.raises(ValueError, match="made for another model"):
            split(InputXGradient(model), context_method=attributor)
    deep = split(DeepLift(model), context_method=LayerAttributionContext(LayerDeepLift(model, model.top[0])))
    with pytest.raises(ValueError, match=r"made for another layer than 'features\.4'"):
        deep.context(images(), 3)
    for gradients in (
        LayerGradientXActivation(model, model.features[4], multiply_by_inputs=False),
        InternalInfluence(model, model.features[4]),
    ):  # contexts c = R ⊘ a would be ∂y/∂a ⊘ a
        with pytest.raises(ValueError, match="gives no relevance R here"):
            split(InputXGradient(model), context_method=gradients)
    relu = nn.ReLU()
    twice = nn.Sequential(nn.Linear(6, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 3))
    da = split(IntegratedGradients(twice), relu, context_method=LayerDeepLift(twice, relu))
    with pytest.raises(ValueError, match="layer '1' runs more than once in a forward pass"):
        da.context(torch.randn(2, 6), 1)


# ---------------------------------------------------------------------- Integrated Gradients


class Difference(nn.Module):
    """y = f(a₁) − f(a₂), f = Σ_j max(0, a − b_j): what is missed of one cancels with the other."""

    def __init__(self, places: tuple[float, ...]) -> None:
        super().__init__()
        self.layer, self.places = nn.ReLU(), torch.tensor(places)

    def f(self, a: Tensor) -> Tensor:
        return (a[..., None] - self.places).relu().sum(-1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.f(self.layer(x))  # (N, 2)
        return parts[:, 0] - parts[:, 1]


@pytest.mark.parametrize("places", [(0.5, 0.8), (0.7, 0.8, 0.9), (0.93,), tuple(np.linspace(0.1, 0.9, 30))])
@pytest.mark.parametrize("second", [1.0, 0.98, 0.95])
def test_errors_of_default_contexts_do_not_cancel(places: tuple[float, ...], second: float) -> None:
    """R_1 = f(a₁) and R_2 = −f(a₂); they were off by 19 % where their sum is right whatever the steps."""
    model, u = Difference(places), Subspaces(torch.eye(2), [1, 1])
    x = torch.tensor([[1.0, second]])
    found = DisentangledAttribution(IntegratedGradients(model), "layer", u).concept_relevance(x)
    expected = model.f(x) * torch.tensor([1.0, -1.0])
    assert float((found - expected).norm() / expected.norm()) < 0.03


class Kinks(nn.Module):
    """y = Σ_j w_j max(0, a_j − b_j): along the path to a = 1 the gradient jumps at t = b_j."""

    def __init__(self, weights: list[float], places: list[float]) -> None:
        super().__init__()
        self.layer = nn.ReLU()
        self.weights, self.places = torch.tensor(weights), torch.tensor(places)

    def forward(self, x: Tensor):
        return (self.weights * (self.layer(x) - self.places).relu()).sum(1)


@pytest.mark.parametrize(
    ("model", "n_steps", "warns"),
    [
        (Kinks([2.0, 1.0], [0.9, 0.95]), 3, r"is off by 100%.*say 12: n_steps"),
        (Kinks([2.0, 1.0], [0.9, 0.95]), 100, None),
        # Σ aᵀc = 0 for y(a) − y(0) = −0.009, next to terms of ±1.5: that is no error to speak of.
        (Kinks([3.0, -3.0], [0.503, 0.5]), 10, None),
    ],
)
def test_too_few_steps_above_the_layer_are_reported(model: Kinks, n_steps: int, warns: str | None) -> None:
    da = split(IntegratedGradients(model), "layer", context_method=IntegratedGradientsContext(n_steps))
    da.subspaces = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        da.context(torch.ones(2, 2))
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (warns is not None)
    assert warns is None or re.search(warns, messages[0])


class Bypass(nn.Module):
    """What bypasses the layer is added, concatenated, or reshaped with the batch size of the input."""

    def __init__(self, kind: str, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lower, self.layer, self.kind, self.scale = nn.Linear(4, 6), nn.ReLU(), kind, scale
        self.upper = nn.Linear(12 if kind == "cat" else 6, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor):
        below = self.lower(x)
        a = self.layer(below)
        if self.kind == "add":
            a = a + below
        elif self.kind == "cat":
            a = torch.cat([a, below], dim=1)
        elif self.kind == "reshape":
            a = a.reshape(len(x), -1)
        elif self.kind == "attention":  # given activations for one input, it would mix them all
            tokens = 3 * a.reshape(len(x), -1, 6)
            a = ((tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens).reshape(a.shape)
        return self.head(torch.tanh(self.upper(a))) * self.scale


@pytest.mark.filterwarnings("ignore:.*goes around layer")
@pytest.mark.parametrize("kind", ["plain", "add", "cat", "reshape", "attention"])
def test_contexts_of_models_with_a_bypass(kind: str) -> None:
    """Whether or not the lower part can be shared, the context is the one by hand; scores may be small."""
    model, x = Bypass(kind).eval(), torch.randn(3, 4)
    steps = IntegratedGradientsContext(100)
    _, c = split(IntegratedGradients(model), "layer", 6, context_method=steps).context(x, 1)
    torch.testing.assert_close(c, integrated_by_hand(model, model.layer, x, 1), rtol=1e-4, atol=1e-6)
    small = Bypass(kind, 2.0**-24).eval()
    _, c_small = split(IntegratedGradients(small), "layer", 6, context_method=steps).context(x, 1)
    assert_same(c_small * 2.0**24, c)


def test_the_lower_part_is_shared() -> None:
    """100 steps, which fit into one batch here, run the lower part on one image, not on 100."""
    model = conv_net()
    rows = {"below": 0, "above": 0}
    model.features[0].register_forward_hook(lambda _, __, y: rows.update(below=rows["below"] + len(y)))
    model.classifier.register_forward_hook(lambda _, __, y: rows.update(above=rows["above"] + len(y)))
    split(IntegratedGradients(model), context_method=IntegratedGradientsContext(100)).context(images(1), 1)
    # Two more runs find a, and try with 3 activations whether the lower part can be shared.
    assert rows == {"below": 1 + 2, "above": 100 + 1 + 3}


# ---------------------------------------------------------------------- Shapley


def test_context_of_feature_maps() -> None:
    """c_j = R_j / Σ a_j at every position of map j, 0 for a dead map (Note B.2)."""
    model, x = conv_net(), images(1)
    with torch.no_grad():
        model.get_parameter("features.3.weight")[2] = 0
        model.get_parameter("features.3.bias")[2] = -1  # map 2 is dead
    a, c = split(ShapleyValueSampling(model), context_method=ShapleyContext(2)).context(x, 3)
    assert torch.equal(c, c[:, :, :1, :1].expand_as(c))
    assert not c[:, 2].any()
    # The Shapley values of the maps add up to y(a) − y(0) for any number of permutations.
    with torch.no_grad():
        at_a, at_0 = (model.classifier(model.top(t).flatten(1))[0, 3] for t in (a.clone(), a * 0))
    torch.testing.assert_close((a * c).sum(), at_a - at_0, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("layout", "dim"), [("maps", 1), ("tokens", -1), ("tokens", 2)])
def test_context_is_the_mean_over_the_permutations(layout: str, dim: int) -> None:
    """R_j is what map j adds to y when it joins those before it; the permutations are Captum's own draws."""
    torch.manual_seed(0)
    upper = nn.Sequential(nn.Flatten(), nn.Linear(5 * 6, 9), nn.Softplus())
    model = nn.Sequential(nn.ReLU(), *upper, nn.Linear(9, 3))
    x = torch.rand(1, 5, 2, 3) + 0.1 if layout == "maps" else torch.rand(1, 6, 5) + 0.1
    da = split(ShapleyValueSampling(model), "0", 5, context_method=ShapleyContext(4), channel_dim=dim)
    torch.manual_seed(7)
    a, c = da.context(x, 2)
    torch.manual_seed(7)
    maps, relevance = x.movedim(dim, 0), torch.zeros(5)
    for _ in range(4):
        coalition = torch.zeros_like(maps)
        for j in torch.randperm(5).tolist():
            with torch.no_grad():
                before = model(coalition.movedim(0, dim))[0, 2]
                coalition[j] = maps[j]
                relevance[j] += (model(coalition.movedim(0, dim))[0, 2] - before) / 4
    expected = (relevance / maps.flatten(1).sum(1))[:, None].expand(5, 6)
    assert torch.equal(a, x)
    torch.testing.assert_close(c.movedim(dim, 0).flatten(1), expected, rtol=1e-4, atol=1e-6)


def test_contexts_of_maps_that_cancel_are_warned_about() -> None:
    """R_j / Σ a_j explodes where Σ a_j is near zero though a_j is not: layers before the ReLU."""
    model, x = conv_net(), images(1)

    def centre(module: object, args: object, output: Tensor) -> Tensor:
        return output - output.mean((2, 3), keepdim=True) + 1e-4

    handle = model.get_submodule("features.3").register_forward_hook(centre)
    run = {name: split(ShapleyValueSampling(model), name, context_method=ShapleyContext(2)) for name in NAMES}
    with pytest.warns(UserWarning, match=r"100% of the relevance at layer 'features.3'"):
        run["features.3"].context(x, 3)
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run["features.4"].context(x, 3)


NAMES = ("features.3", "features.4")


# ---------------------------------------------------------------------- the axes of activations


class Tokens(nn.Module):
    """Tokens (N, T, 4), of which `inner` gets (T, N, 4) or (N, T, 4)."""

    def __init__(self, tokens_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below, self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.tokens_first = tokens_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.below(x)
        x = self.inner(x.transpose(0, 1)).transpose(0, 1) if self.tokens_first else self.inner(x)
        scores: Tensor = self.head(x.relu().mean(1))
        return scores


@pytest.mark.parametrize(
    "method",
    [
        InputXGradient,
        IntegratedGradients,
        LRP,
        ShapleyValueSampling,
        lambda model: LayerIntegratedGradients(model, model.below),
    ],
)
def test_tokens_first_are_noticed_where_there_are_as_many_as_examples(method) -> None:
    """(T, N, D) has the shape of (N, T, D) then: R_k of one example was that of a token of all."""
    x = torch.rand(3, 3, 4, generator=torch.Generator().manual_seed(0))
    good, bad = Tokens(False), Tokens(True)
    torch.testing.assert_close(good(x), bad(x))
    for use in ("concept_relevance", "context", "explain"):
        run = split(method(bad), "inner", 4, channel_dim=-1)
        with pytest.raises(ValueError, match=r"layer 'inner' gives shape \(3, 1, 4\).*batch_first=True"):
            getattr(run, use)(x, 1)
    run = split(method(good), "inner", 4, channel_dim=-1)
    torch.manual_seed(0)
    together = run.concept_relevance(x, 1)
    torch.manual_seed(0)
    alone = torch.cat([run.concept_relevance(x[i : i + 1], 1) for i in range(3)])
    if method is not ShapleyValueSampling:  # which draws
        assert_same(together, alone)
