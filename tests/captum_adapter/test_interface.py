"""Targets, inputs, arguments, and contexts."""

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
    FeatureAblation,
    InputXGradient,
    IntegratedGradients,
    LayerDeepLift,
    LayerGradientXActivation,
    NoiseTunnel,
    Saliency,
    ShapleyValueSampling,
)
from drsa_core import Subspaces
from torch import Tensor, nn

from captum_drsa import (
    DisentangledAttribution,
    IntegratedGradientsContext,
    LayerAttributionContext,
    ShapleyContext,
)
from tests.captum_adapter.networks import Tokens, TwoInputs, conv_net, images, subspaces

pytestmark = pytest.mark.filterwarnings("ignore:Setting forward, backward hooks", "ignore:Input Tensor")


def split(method, layer="features.4", n_features=8, **options) -> DisentangledAttribution:
    return DisentangledAttribution(method, layer, subspaces(n_features), **options)


# ---------------------------------------------------------------------- targets


@pytest.mark.parametrize("method", [InputXGradient, LRP, IntegratedGradients, ShapleyValueSampling])
@pytest.mark.parametrize(
    "target",
    [torch.tensor(3), torch.tensor([3]), [3, 3], torch.tensor([3, 3]), (3,), [(3,), (3,)], lambda y: y[:, 3]],
)
def test_every_form_of_target(method, target) -> None:
    da = split(
        method(conv_net()), context_method=ShapleyContext(2) if method is ShapleyValueSampling else None
    )
    torch.manual_seed(0)
    expected = da.concept_relevance(images(), 3)
    torch.manual_seed(0)
    torch.testing.assert_close(da.concept_relevance(images(), target), expected)


def test_targets_of_each_example() -> None:
    da = split(IntegratedGradients(conv_net()))
    both = da.attribute(images(), target=[1, 4], n_steps=3)
    for n, target in enumerate((1, 4)):
        alone = da.attribute(images()[n : n + 1], target=target, n_steps=3)
        torch.testing.assert_close(both[n : n + 1], alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [IntegratedGradients, ShapleyValueSampling, LRP])
@pytest.mark.parametrize("target", [[3], torch.tensor([3]), [(3,)]])
def test_lists_for_one_example(method, target) -> None:
    da = split(
        method(conv_net()), context_method=ShapleyContext(2) if method is ShapleyValueSampling else None
    )
    torch.manual_seed(0)
    expected = da.concept_relevance(images(1), 3)
    torch.manual_seed(0)
    torch.testing.assert_close(da.concept_relevance(images(1), target), expected)


def test_progress_of_both_steps(capsys: pytest.CaptureFixture[str]) -> None:
    da = split(ShapleyValueSampling(conv_net()), context_method=ShapleyContext(1))
    da.attribute(images(1, 6), target=1, n_samples=1, show_progress=True)
    assert capsys.readouterr().err.count("100%") >= 2


def test_outputs_with_more_axes() -> None:
    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = conv_net()

        def forward(self, x: Tensor):
            return self.net(x)[:, None] * torch.tensor([[1.0], [2.0]])  # (N, 2, 5)

    da = split(InputXGradient(Grid()), "net.features.4")
    torch.testing.assert_close(
        da.attribute(images(), target=(1, 3)), 2 * da.attribute(images(), target=(0, 3))
    )
    mixed = da.attribute(images(), target=[(1, 3), (0, 2)])
    torch.testing.assert_close(mixed[1], da.attribute(images(), target=(0, 2))[1])


def test_one_score_per_example_needs_no_target() -> None:
    model = conv_net()
    da = DisentangledAttribution(InputXGradient(lambda x: model(x)[:, 2]), model.features[4], subspaces(8))
    torch.testing.assert_close(
        da.attribute(images()), split(InputXGradient(model)).attribute(images(), target=2)
    )


def test_callable_target_is_linear_in_the_scores() -> None:
    for method in (InputXGradient, IntegratedGradients):
        steps = IntegratedGradientsContext(20) if method is IntegratedGradients else None  # the same for all
        da = split(method(conv_net()), context_method=steps)
        difference = da.attribute(images(), target=lambda y: y[:, 1] - y[:, 0])
        expected = da.attribute(images(), target=1) - da.attribute(images(), target=0)
        torch.testing.assert_close(difference, expected, rtol=1e-3, atol=1e-6)


# ---------------------------------------------------------------------- inputs and arguments


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (InputXGradient, {}),
        (IntegratedGradients, {"n_steps": 40}),
        (
            IntegratedGradients,
            {"n_steps": 40, "internal_batch_size": 9, "baselines": (0.1, torch.ones(1, 3))},
        ),
        (DeepLift, {}),
        (ShapleyValueSampling, {"n_samples": 2}),
        (FeatureAblation, {}),
    ],
)
def test_tuples_of_inputs_and_further_arguments(method, options) -> None:
    torch.manual_seed(0)
    model = TwoInputs().eval()
    inputs = (torch.randn(2, 4), torch.randn(2, 3))
    scale = torch.tensor([1.0, 3.0])
    da = split(method(model), "layer", 6, context_method="gradient")
    maps = da.attribute(inputs, target=1, additional_forward_args=(scale, 2), **options)
    assert isinstance(maps, tuple)
    assert [m.shape for m in maps] == [(2, 3, 4), (2, 3, 3)]
    total = da.exact_totals(inputs, 1, options.get("baselines"), (scale, 2))
    if method is not InputXGradient and method is not FeatureAblation:
        attributed = sum(m.sum(2) for m in maps)
        # 40 steps along a path with kinks; the others are exact.
        tolerance = 0.03 if method is IntegratedGradients else 1e-5
        assert (attributed - total).abs().max() <= tolerance * total.abs().max()
    for n in range(2):  # the argument of each example goes with it
        torch.manual_seed(1)
        alone = da.attribute(
            tuple(t[n : n + 1] for t in inputs),
            target=1,
            additional_forward_args=(scale[n : n + 1], 2),
            **options,
        )
        if method is not ShapleyValueSampling:
            torch.testing.assert_close(maps[0][n : n + 1], alone[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("context", ["integrated_gradients", ShapleyContext(3)])
def test_contexts_with_tuples_and_arguments(context) -> None:
    torch.manual_seed(0)
    model = TwoInputs().eval()
    inputs, scale = (torch.randn(2, 4), torch.randn(2, 3)), torch.tensor([1.0, 3.0])
    da = split(InputXGradient(model), "layer", 6, context_method=context)
    a, c = da.context(inputs, 1, (scale, 1))
    # y is linear in a: every context is the gradient, scale · w, where maps are active.
    expected = (scale[:, None] * model.out.weight[1]).detach()
    active = a != 0
    torch.testing.assert_close(c[active], expected[active], rtol=1e-4, atol=1e-5)


def test_tokens_with_features_last() -> None:
    torch.manual_seed(0)
    model, x = Tokens().eval(), torch.randn(2, 7, 5)
    for method in (InputXGradient(model), ShapleyValueSampling(model)):
        da = DisentangledAttribution(method, "layer", subspaces(8), channel_dim=-1)
        options: dict[str, Any] = {} if isinstance(method, InputXGradient) else {"n_samples": 1}
        assert da.attribute(x, target=1, **options).shape == (2, 3, 7, 5)
        assert da.concept_relevance(x, 1).shape == (2, 3)
    whole = InputXGradient(model).attribute(x.clone().requires_grad_(), target=1)
    parts = DisentangledAttribution(InputXGradient(model), "layer", subspaces(8), channel_dim=-1)
    torch.testing.assert_close(parts.attribute(x, target=1).sum(1), whole.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [InputXGradient, IntegratedGradients, LRP, DeepLift, ShapleyValueSampling])
def test_under_no_grad_and_with_frozen_weights(method) -> None:
    model = conv_net()
    da = split(method(model), context_method="gradient" if method is ShapleyValueSampling else None)
    options: dict[str, Any] = {"n_samples": 1} if method is ShapleyValueSampling else {}
    x = images(1, 6)
    torch.manual_seed(0)
    expected = da.attribute(x, target=1, **options)
    model.requires_grad_(False)
    torch.manual_seed(0)
    with torch.no_grad():
        torch.testing.assert_close(da.attribute(x, target=1, **options), expected)


def test_double_precision_stays_double() -> None:
    da = split(InputXGradient(conv_net().double()))
    assert da.attribute(images().double(), target=1).dtype == torch.float64


def test_what_captum_asks_of_an_attributor() -> None:
    model = conv_net()
    for method in (
        IntegratedGradients(model, False),
        IntegratedGradients(model),
        LRP(model),
        Saliency(model),
    ):
        da = split(method)
        assert da.multiplies_by_inputs == method.multiplies_by_inputs
        assert da.has_convergence_delta() == method.has_convergence_delta()
        assert da.forward_func is model
    assert not split(NoiseTunnel(IntegratedGradients(model))).has_convergence_delta()


def test_concept_relevance_adds_up_to_the_score() -> None:
    """IG conserves from the layer: Σ_k R_k = y(a) − y(0)."""
    model = conv_net()
    relevance = split(IntegratedGradients(model)).concept_relevance(images(), 2)
    assert relevance.shape == (2, 3)
    with torch.no_grad():
        a = model.features(images())
        y, y_0 = (model.classifier(model.top(t).flatten(1))[:, 2] for t in (a.clone(), a * 0))
    torch.testing.assert_close(relevance.sum(1), y - y_0, rtol=0.01, atol=0)  # what the steps were chosen for


# ---------------------------------------------------------------------- contexts


def integrated_by_hand(model: nn.Module, layer: nn.Module, x: Tensor, target: int) -> Tensor:
    """c = ∫ ∂y/∂a dt from 0 to a by 100 Gauss–Legendre nodes, each a run of the whole model.

    Captum's LayerIntegratedGradients starts at φ(0) instead, so that it cannot serve as the reference.
    """
    nodes, weights = np.polynomial.legendre.leggauss(100)
    total: Tensor | float = 0.0
    for t, w in zip((nodes + 1) / 2, weights / 2, strict=True):
        leaves: list[Tensor] = []

        def scale(_: nn.Module, __: object, a: Tensor, t: float = float(t), leaves=leaves):
            leaves.append((t * a).detach().requires_grad_())
            return leaves[0].clone()

        handle = layer.register_forward_hook(scale)
        score = model(x)[:, target].sum()
        handle.remove()
        total = total + float(w) * torch.autograd.grad(score, leaves[0])[0]
    assert isinstance(total, Tensor)
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
    torch.testing.assert_close(
        split(InputXGradient(model), context_method=IntegratedGradientsContext()).context(x, 3)[1],
        ig,
    )
    lrp = split(InputXGradient(model), context_method="lrp").context(x, 3)[1]
    torch.testing.assert_close(lrp, split(LRP(model)).context(x, 3)[1])
    attributor = LayerGradientXActivation(model, model.features[4])
    gradient = split(InputXGradient(model)).context(x, 3)[1]
    by_relevance = split(InputXGradient(model), context_method=attributor).context(x, 3)[1]
    torch.testing.assert_close(by_relevance, torch.where(a != 0, gradient, 0), rtol=1e-4, atol=1e-6)
    deep = split(DeepLift(model), context_method=LayerAttributionContext(LayerDeepLift(model, model.top[0])))
    with pytest.raises(ValueError, match=r"made for another layer than 'features\.4'"):
        deep.context(x, 3)


class Bypass(nn.Module):
    """What bypasses the layer is added, concatenated, or reshaped with the batch size of the input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lower, self.layer, self.kind = nn.Linear(4, 6), nn.ReLU(), kind
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
        return self.head(torch.tanh(self.upper(a)))


@pytest.mark.parametrize("kind", ["plain", "add", "cat", "reshape"])
def test_contexts_of_models_with_a_bypass(kind: str) -> None:
    """Whether or not the lower part can be shared, the context is the one by hand."""
    model = Bypass(kind).eval()
    x = torch.randn(3, 4)
    _, c = split(IntegratedGradients(model), "layer", 6).context(x, 1)
    torch.testing.assert_close(c, integrated_by_hand(model, model.layer, x, 1), rtol=1e-4, atol=1e-6)


def test_lower_part_is_shared_in_step_1() -> None:
    """100 steps, which fit into one batch here, run the lower part on one image, not on 100."""
    model = conv_net()
    rows = {"below": 0, "above": 0}
    model.features[0].register_forward_hook(lambda _, __, y: rows.update(below=rows["below"] + len(y)))
    model.classifier.register_forward_hook(lambda _, __, y: rows.update(above=rows["above"] + len(y)))
    split(IntegratedGradients(model), context_method=IntegratedGradientsContext(100)).context(images(1), 1)
    # Two more runs find a, and try with 3 activations whether the lower part can be shared.
    assert rows == {"below": 1 + 2, "above": 100 + 1 + 3}


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
        (Kinks([2.0, 1.0], [0.9, 0.95]), 3, r"3 steps is off by 100% of y\(a\) − y\(0\).*n_steps=12"),
        (Kinks([2.0, 1.0], [0.9, 0.95]), 100, None),
        # Σ aᵀc = 0 for y(a) − y(0) = −0.009, next to terms of ±1.5: that is no error to speak of.
        (Kinks([3.0, -3.0], [0.503, 0.5]), 10, None),
    ],
)
def test_too_few_steps_above_the_layer_are_reported(model: Kinks, n_steps: int, warns: str | None) -> None:
    """Σ aᵀc must be y(a) − y(0), which is known."""
    context = IntegratedGradientsContext(n_steps)
    da = DisentangledAttribution(IntegratedGradients(model), "layer", context_method=context)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        da.context(torch.ones(2, 2))
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (warns is not None)
    if warns is not None:
        assert re.search(warns, messages[0])


def test_dual_subspaces() -> None:
    """Non-orthogonal concepts (Note I): R_k = (U_kᵀa)ᵀ(V_kᵀc), and the parts still add up."""
    torch.manual_seed(0)
    basis = torch.eye(8) + 0.2 * torch.randn(8, 8)
    u = Subspaces(basis, [3, 5], dual=torch.linalg.inv(basis).T)
    model, x = conv_net(), images()
    whole = InputXGradient(model).attribute(x.clone().requires_grad_(), target=1).detach()
    da = DisentangledAttribution(InputXGradient(model), "features.4", u)
    torch.testing.assert_close(da.attribute(x, target=1).sum(1), whole, rtol=1e-4, atol=1e-5)
    a, c = da.context(x, 1)
    torch.testing.assert_close(
        da.exact_totals(x, 1),
        torch.stack(
            [
                ((a - model.features(x * 0)) * u.project_context(c, k)).sum((1, 2, 3)).detach()
                for k in range(2)
            ],
            dim=1,
        ),
        rtol=1e-4,
        atol=1e-6,
    )


# ---------------------------------------------------------------------- warnings


@pytest.mark.parametrize("method", [InputXGradient, Saliency, DeepLift, LRP, IntegratedGradients])
def test_captum_does_not_complain_about_inputs_that_are_our_own_copies(method) -> None:
    x = images()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = split(method(conv_net())).explain(x, 3)
    assert not [str(w.message) for w in caught if "did not already require gradients" in str(w.message)]
    assert found.whole is not None
    assert not found.whole.requires_grad
    assert not x.requires_grad


def test_nor_about_those_of_a_layer_attributor() -> None:
    model = conv_net()
    da = split(InputXGradient(model), context_method=LayerDeepLift(model, model.features[4]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, context = da.context(images(), 3)
    assert not [str(w.message) for w in caught if "did not already require gradients" in str(w.message)]
    assert not context.requires_grad


def test_a_tuple_of_one_input_is_that_input() -> None:
    """The layout of tokens was unknown then, and `token_maps` an error."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor):
            return self.head(self.block(self.embed(x).flatten(2).transpose(1, 2)).relu().mean(1))

    x = images()
    da = DisentangledAttribution(InputXGradient(Patches()), "block", subspaces(8), channel_dim=-1)
    expected = da.explain(x, 1)
    torch.testing.assert_close(da.explain((x,), 1).token_maps, expected.token_maps)
    assert expected.token_maps.shape == (2, 3, 3, 3)
