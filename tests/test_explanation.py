"""`explain` of both adapters, and the certificate: what adds up to what, in numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from captum.attr import (
    LRP,
    FeatureAblation,
    InputXGradient,
    IntegratedGradients,
    LayerConductance,
    LayerDeepLift,
    NoiseTunnel,
    Saliency,
    ShapleyValues,
)
from captum.attr import Occlusion as CaptumOcclusion
from drsa_core import Explanation, RandomSubspaces, RelevanceLossWarning, Subspaces
from torch import Tensor, nn
from zennit.attribution import Gradient, Occlusion, SmoothGrad
from zennit.attribution import IntegratedGradients as ZennitIntegratedGradients
from zennit.composites import EpsilonPlus, LayerMapComposite
from zennit.rules import Epsilon, Flat
from zennit.types import Linear

from captum_drsa import DisentangledAttribution
from zennit_drsa import DisentangledAttributor


def network(bias: bool = False) -> nn.Sequential:
    """Without biases and max-pooling every method conserves exactly."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 6, 3, bias=bias),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, bias=bias),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 16, 5, bias=bias),
    ]
    return nn.Sequential(*layers).double().eval()


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def subspaces(n_subspaces: int = 3, dims: list[int] | None = None) -> Subspaces:
    data = torch.zeros(1, 6, dtype=torch.float64)
    return RandomSubspaces(n_subspaces, dims, random_state=0).fit(data).subspaces_


def scores(output: Tensor) -> Tensor:
    return output[:, 1] - output[:, 2]


@pytest.mark.parametrize(
    "target", [1, [1, 4], torch.tensor([1, 4]), scores], ids=["int", "list", "tensor", "fn"]
)
@pytest.mark.parametrize("kind", ["lrp", "gradient", "smooth", "path", "occlusion"])
def test_zennit(kind: str, target: Any) -> None:
    model, x = network(), images()
    composite = LayerMapComposite([(Linear, Epsilon(epsilon=1e-12))]) if kind == "lrp" else None
    wrapped = {
        "lrp": lambda: Gradient(model, composite),
        "gradient": lambda: Gradient(model),
        "smooth": lambda: SmoothGrad(model, n_iter=3),
        "path": lambda: ZennitIntegratedGradients(model, n_iter=5),
        "occlusion": lambda: Occlusion(model, window=(4, 4), stride=(4, 4)),
    }[kind]()
    run = DisentangledAttributor(wrapped, "1", subspaces(), context_steps=64)
    torch.manual_seed(1)
    explanation = run.explain(x, target)
    assert explanation.maps.shape == (2, 3, 3, 8, 8)
    assert explanation.whole is not None
    assert explanation.whole.shape == x.shape
    expected = scores(model(x)) if callable(target) else model(x)[range(2), torch.as_tensor(target).expand(2)]
    torch.testing.assert_close(explanation.score, expected.detach())
    torch.testing.assert_close(explanation.concept_relevance, run.concept_relevance(x, target))
    certificate = explanation.certificate()
    if kind in ("lrp", "gradient", "smooth"):
        assert certificate.maps_to_whole is not None
        assert certificate.maps_to_whole < 1e-10
    else:
        assert certificate.maps_to_whole is None
    # Linear above the layer up to a ReLU: without biases R at the layer is the score.
    if kind in ("lrp", "gradient"):
        assert certificate.layer_to_score is not None
        assert certificate.layer_to_score < 1e-9
    if kind == "lrp":
        assert certificate.maps_to_layer is not None
        assert certificate.maps_to_layer < 1e-9
        assert certificate.share_of_score == pytest.approx(1, abs=1e-9)
    if kind == "gradient":
        assert certificate.maps_to_layer is None
    assert certificate.around_the_layer == 0
    assert explanation.provenance.layer == "1"


@pytest.mark.parametrize("target", [1, [1, 4], scores], ids=["int", "list", "fn"])
@pytest.mark.parametrize(
    ("method", "by_pixel"),
    [
        (InputXGradient, True),
        (LRP, True),
        (Saliency, False),
        (IntegratedGradients, False),
        (FeatureAblation, False),
    ],
)
def test_captum(method, by_pixel: bool, target: Any) -> None:
    model, x = network(), images()
    if method is LRP:
        # Captum's LRP has no rule for Flatten.
        model = nn.Sequential(*model[:4], nn.AdaptiveAvgPool2d(4), nn.Conv2d(6, 5, 4, bias=False).double())

        def flat(output: Tensor) -> Tensor:
            return output[:, 1, 0, 0] - output[:, 2, 0, 0]

        target = flat if callable(target) else ((1, 0, 0) if target == 1 else [(1, 0, 0), (4, 0, 0)])
    context = "gradient" if method is FeatureAblation else None
    options: dict[str, Any] = (
        {"feature_mask": torch.zeros(1, 1, 8, 8, dtype=torch.long)} if method is FeatureAblation else {}
    )
    run = DisentangledAttribution(method(model), "1", subspaces(), context)
    explanation = run.explain(x, target, **options)
    torch.testing.assert_close(explanation.maps, run.attribute(x, target=target, **options))
    torch.testing.assert_close(explanation.concept_relevance, run.concept_relevance(x, target))
    certificate = explanation.certificate()
    if method is LRP and callable(target):
        assert explanation.whole is None
    else:
        assert explanation.whole is not None
        assert (certificate.maps_to_whole is not None) == by_pixel
        if by_pixel:
            assert certificate.maps_to_whole is not None
            assert certificate.maps_to_whole < 1e-6  # Captum's rules add 1e-9 to denominators
    assert run.explain(x, target, whole=False, **options).whole is None


def test_the_certificate_names_what_is_missing() -> None:
    model, x = network(bias=True), images()
    run = DisentangledAttributor(Gradient(model, EpsilonPlus()), "1", subspaces(2, [2, 1]))
    certificate = run.explain(x, 1).certificate()
    assert not certificate.is_complete
    assert certificate.maps_to_whole is not None
    assert certificate.maps_to_whole > 0.01
    assert certificate.layer_to_score is None
    text = str(certificate)
    assert "not complete" in text
    assert len(text.splitlines()) == 7
    assert certificate.as_dict()["on_zero_activations"] == 0.0
    flat = LayerMapComposite([(Linear, Flat())])
    with pytest.warns(RelevanceLossWarning):
        lost = DisentangledAttributor(Gradient(model, flat), "1", subspaces()).explain(x, 1).certificate()
    assert lost.on_zero_activations > 0.1


def test_what_goes_around_is_in_the_certificate() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(6, 6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)

    model = network()
    model[1] = Skip().double()
    for run in (
        DisentangledAttributor(Gradient(model), "1.inner", subspaces()),
        DisentangledAttribution(InputXGradient(model), "1.inner", subspaces()),
    ):
        with pytest.warns(RelevanceLossWarning, match="goes around"):
            certificate = run.explain(images(), 1).certificate()
        assert certificate.around_the_layer is not None
        assert 0.2 < certificate.around_the_layer < 0.9
        assert certificate.maps_to_whole is not None
        assert certificate.maps_to_whole > 0.1


def test_the_share_around_is_that_of_the_method_and_of_all_examples() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x + self.inner(x))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 6), Skip(), nn.Linear(6, 5)).double().eval()
    x = torch.randn(4, 12, dtype=torch.float64)
    for method in (LRP(model), InputXGradient(model)):
        run = DisentangledAttribution(method, "1.inner", subspaces())
        with pytest.warns(RelevanceLossWarning, match="goes around") as caught:
            found = run.explain(x, 1)
        assert len(caught) == 1
        assert found.whole is not None
        through = found.maps.sum(1)
        around = found.whole - through
        if isinstance(method, InputXGradient):  # the share is that of gradients
            through, around = through / x, around / x
        expected = around.abs().sum() / (around.abs().sum() + through.abs().sum())
        assert found.losses.around_the_layer == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("layer_method", [LayerDeepLift, LayerConductance])
def test_relevance_of_a_layer_method_on_zero_activations_is_lost_aloud(layer_method: Any) -> None:
    """A neuron that is active at the baseline and not at the input has relevance, but no context."""
    model, x = network(bias=True), images()
    method = layer_method(model, model[3])
    relevance, a = method.attribute(x, target=1).detach(), model[:4](x)
    expected = float(relevance[a == 0].abs().sum() / relevance.abs().sum())
    run = DisentangledAttribution(IntegratedGradients(model), "3", subspaces(), context_method=method)
    with pytest.warns(RelevanceLossWarning, match="zero activations"):
        certificate = run.explain(x, 1, n_steps=2).certificate()
    assert certificate.on_zero_activations == pytest.approx(expected, rel=1e-6)
    assert expected > 0.01


def test_shapley_values_know_their_total() -> None:
    """Exact Shapley values conserve: Σ_p R_pk = R_k for a baseline whose activation is zero."""
    model, x = network(), images()
    mask = (torch.arange(64).reshape(1, 1, 8, 8) // 32).expand(1, 3, 8, 8).contiguous()
    run = DisentangledAttribution(ShapleyValues(model), "1", subspaces(), "gradient")
    explanation: Explanation = run.explain(x, 1, whole=False, feature_mask=mask)
    # A feature's value stands at each of its 96 pixels; Captum's Shapley values are float32.
    total = explanation.maps.double().sum((2, 3, 4)) / 96
    torch.testing.assert_close(total, explanation.concept_relevance, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", ["patches", "one for each example", "few axes", "in a tuple"])
def test_a_feature_counts_once_in_the_certificate(mask: str) -> None:
    """Its value stands at each of its pixels, and counted there each time: 48 times in the first case."""
    model, x = network(), images()
    numbers = torch.arange(64).reshape(8, 8) // 16  # four features of two rows
    masks: dict[str, Any] = {
        "patches": numbers[None, None],
        "one for each example": torch.stack([numbers, numbers.T // 2 + 3])
        .expand(3, 2, 8, 8)
        .transpose(0, 1)
        .contiguous(),
        "few axes": numbers,
        "in a tuple": (numbers[None, None],),
    }
    run = DisentangledAttribution(ShapleyValues(model), "1", subspaces(), "gradient")
    explanation = run.explain(x, 1, whole=False, feature_mask=masks[mask])
    torch.testing.assert_close(explanation.maps, run.attribute(x, target=1, feature_mask=masks[mask]))
    certificate = explanation.certificate()
    # Exact Shapley values of a layer without biases sum to R_k, which sum to the score; they are float32.
    assert certificate.maps_to_layer == pytest.approx(0, abs=1e-5)
    assert certificate.share_of_score == pytest.approx(1, abs=1e-5)


def test_maps_that_are_no_relevance_have_no_share_of_the_score() -> None:
    """Windows may overlap, and squares of gradients are of another scale."""
    model, x = network(), images()
    windows = DisentangledAttribution(CaptumOcclusion(model), "1", subspaces(), "gradient")
    tunnel = DisentangledAttribution(NoiseTunnel(InputXGradient(model)), "1", subspaces())
    for run, options in (
        (windows, {"sliding_window_shapes": (3, 4, 4)}),
        (tunnel, {"nt_type": "vargrad"}),
        (tunnel, {"nt_type": "smoothgrad_sq"}),
    ):
        certificate = run.explain(x, 1, whole=False, **options).certificate()
        assert (certificate.maps_to_layer, certificate.share_of_score) == (None, None)
    assert tunnel.explain(x, 1, whole=False, stdevs=1e-9).certificate().share_of_score == pytest.approx(1)


def test_several_inputs_are_refused() -> None:
    for run in (
        DisentangledAttributor(Gradient(network()), "1", subspaces()),
        DisentangledAttribution(InputXGradient(network()), "1", subspaces()),
    ):
        with pytest.raises(TypeError, match="one input tensor"):
            run.explain((images(), images()), 1)


def lrp_of(x: Tensor) -> Explanation:
    """LRP of a linear network without biases, which conserves in each example."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)).double()
    return DisentangledAttribution(LRP(model.eval()), "1", subspaces()).explain(x, 1)


def test_the_certificate_is_that_of_the_worst_example() -> None:
    """One whose maps miss 101 % of it hid behind three that are a thousand times as large (0.02 %)."""
    x = torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = lrp_of(x * torch.tensor([[1.0], [1.0], [1.0], [1e-3]]).double())
    good = found.certificate()
    assert good.maps_to_whole == pytest.approx(0, abs=1e-3)
    assert good.share_of_score == pytest.approx(1, abs=1e-3)
    maps = found.maps.clone()
    maps[3] *= -0.01
    bad = replace(found, maps=maps).certificate()
    assert bad.maps_to_whole == pytest.approx(1.01, abs=1e-3)
    assert bad.share_of_score == pytest.approx(-0.01, abs=1e-3)
    assert bad.maps_to_layer is not None
    assert bad.maps_to_layer > 1


def test_scores_of_both_signs_have_shares() -> None:
    """They cancelled in the sum over the batch, of which the maps were "14203 %"."""
    x = torch.randn(40, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = lrp_of(x)
    assert found.score.min() < 0 < found.score.max()
    assert found.certificate().share_of_score == pytest.approx(1, abs=1e-3)
    nothing = replace(found, score=1e-6 * found.score).certificate()
    assert nothing.share_of_score is None
    assert "sum of all maps: not defined here" in str(nothing)


def test_an_explanation_prints_as_one_line() -> None:
    attributor = DisentangledAttributor(Gradient(network(), EpsilonPlus()), "1", subspaces())
    found = repr(attributor.explain(images(), 1))
    assert "\n" not in found
    assert "2 examples, 3 concepts" in found
    assert "maps (3, 8, 8), layer '1'" in found


def test_a_certificate_says_what_is_not_defined() -> None:
    attributor = DisentangledAttributor(Gradient(network(), EpsilonPlus()), "1", subspaces())
    printed = str(attributor.explain(images(), 1, whole=False).certificate())
    assert "against the whole map: not defined here" in printed
    assert "off by not defined" not in printed
