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
from drsa_core import RelevanceLossWarning
from torch import Tensor, nn
from zennit.attribution import Gradient, Occlusion, SmoothGrad
from zennit.attribution import IntegratedGradients as ZennitIntegratedGradients
from zennit.composites import EpsilonPlus, LayerMapComposite
from zennit.rules import Epsilon, Flat
from zennit.types import Linear

from captum_drsa import DisentangledAttribution
from tests.toys import Around, subspaces
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


def images(n: int = 2) -> Tensor:
    return torch.randn(n, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def scores(output: Tensor) -> Tensor:
    return output[:, 1] - output[:, 2]


LRP_RULES = LayerMapComposite([(Linear, Epsilon(epsilon=1e-12))])
ZENNIT: dict[str, Any] = {
    "lrp": lambda model: Gradient(model, LRP_RULES),
    "gradient": Gradient,
    "smooth": lambda model: SmoothGrad(model, n_iter=3),
    "path": lambda model: ZennitIntegratedGradients(model, n_iter=5),
    "occlusion": lambda model: Occlusion(model, window=(4, 4), stride=(4, 4)),
}


@pytest.mark.parametrize("target", [1, [1, 4], torch.tensor([1, 4]), scores])
@pytest.mark.parametrize("kind", ZENNIT)
def test_zennit(kind: str, target: Any) -> None:
    model, x = network(), images()
    run = DisentangledAttributor(ZENNIT[kind](model), "1", subspaces(6), context_steps=64)
    torch.manual_seed(1)
    found = run.explain(x, target)
    assert found.maps.shape == (2, 3, 3, 8, 8)
    assert found.whole is not None
    assert found.whole.shape == x.shape
    assert found.provenance.layer == "1"
    expected = scores(model(x)) if callable(target) else model(x)[range(2), torch.as_tensor(target).expand(2)]
    torch.testing.assert_close(found.score, expected.detach())
    torch.testing.assert_close(found.concept_relevance, run.concept_relevance(x, target))
    certificate = found.certificate()
    assert certificate.around_the_layer == 0
    adds_up_by_pixel = kind in ("lrp", "gradient", "smooth")
    assert certificate.maps_to_whole == (pytest.approx(0, abs=1e-10) if adds_up_by_pixel else None)
    if kind in ("lrp", "gradient"):  # linear above the layer up to a ReLU: R at the layer is the score
        assert certificate.layer_to_score == pytest.approx(0, abs=1e-9)
        assert certificate.maps_to_layer == (pytest.approx(0, abs=1e-9) if kind == "lrp" else None)
    if kind == "lrp":
        assert certificate.share_of_score == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("target", [1, [1, 4], scores], ids=["int", "list", "fn"])
@pytest.mark.parametrize("method", [InputXGradient, LRP, Saliency, IntegratedGradients, FeatureAblation])
def test_captum(method: Any, target: Any) -> None:
    model, x = network(), images()
    if method is LRP:  # which has no rule for Flatten
        model = nn.Sequential(*model[:4], nn.AdaptiveAvgPool2d(4), nn.Conv2d(6, 5, 4, bias=False).double())
        by_kind: dict[Any, Any] = {int: (1, 0, 0), list: [(1, 0, 0), (4, 0, 0)]}
        target = by_kind.get(type(target), lambda output: scores(output[:, :, 0, 0]))
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.long)
    options: dict[str, Any] = {"feature_mask": mask} if method is FeatureAblation else {}
    context = "gradient" if method is FeatureAblation else None
    run = DisentangledAttribution(method(model), "1", subspaces(6), context)
    found = run.explain(x, target, **options)
    torch.testing.assert_close(found.maps, run.attribute(x, target=target, **options))
    torch.testing.assert_close(found.concept_relevance, run.concept_relevance(x, target))
    if method is LRP and callable(target):  # which Captum's LRP does not take
        assert found.whole is None
    else:
        assert found.whole is not None
        # Captum's rules add 1e-9 to denominators.
        by_pixel = pytest.approx(0, abs=1e-6) if method in (InputXGradient, LRP) else None
        assert found.certificate().maps_to_whole == by_pixel
    assert run.explain(x, target, whole=False, **options).whole is None


def test_one_input_is_explained() -> None:
    for run in (
        DisentangledAttributor(Gradient(network()), "1", subspaces(6)),
        DisentangledAttribution(InputXGradient(network()), "1", subspaces(6)),
    ):
        with pytest.raises(TypeError, match="one input tensor"):
            run.explain((images(), images()), 1)


# ---------------------------------------------------------------------- the certificate


def test_the_certificate_names_what_is_missing() -> None:
    model, x = network(bias=True), images()
    run = DisentangledAttributor(Gradient(model, EpsilonPlus()), "1", subspaces(6, dims=[2, 1]))
    found = run.explain(x, 1)
    assert "2 examples, 2 concepts" in repr(found)
    certificate = found.certificate()
    assert not certificate.is_complete
    assert certificate.maps_to_whole is not None
    assert certificate.maps_to_whole > 0.01
    assert certificate.layer_to_score is None
    assert "not complete" in str(certificate)
    assert certificate.as_dict()["on_zero_activations"] == 0.0
    flat = LayerMapComposite([(Linear, Flat())])
    with pytest.warns(RelevanceLossWarning):
        lost = DisentangledAttributor(Gradient(model, flat), "1", subspaces(6)).explain(x, 1).certificate()
    assert lost.on_zero_activations > 0.1
    printed = str(run.explain(x, 1, whole=False).certificate())
    assert "against the whole map: not defined here" in printed
    assert "off by not defined" not in printed


def test_an_example_does_not_hide_behind_large_ones() -> None:
    """Of sums over the batch the error was 0.02 %."""
    model, x = network(), images(4)
    run = DisentangledAttributor(Gradient(model, LRP_RULES), "1", subspaces(6))
    x[:3] *= 1e4
    found = run.explain(x, 1)
    assert found.whole is not None
    assert found.certificate().maps_to_whole == pytest.approx(0, abs=1e-9)
    maps = found.maps.clone()
    maps[3] *= -0.01  # misses 101 % of the whole
    certificate = replace(found, maps=maps).certificate()
    assert certificate.maps_to_whole == pytest.approx(1.01, rel=1e-6)
    assert certificate.maps_to_layer == pytest.approx(1.01, rel=1e-6)
    assert certificate.share_of_score == pytest.approx(-0.01, rel=1e-6)
    of_layer = found.concept_relevance.clone()
    of_layer[3] *= 2
    doubled = replace(found, concept_relevance=of_layer).certificate()
    assert doubled.layer_to_score == pytest.approx(1, rel=1e-6)


def test_scores_of_both_signs_do_not_cancel() -> None:
    """The second image is the first one with its sign changed, nearly: their sum is small, "14203 %"."""
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(12, 6, bias=False), nn.Linear(6, 3, bias=False)]
    model = nn.Sequential(*layers).double().eval()
    x = torch.randn(1, 3, 2, 2, dtype=torch.float64)
    run = DisentangledAttributor(Gradient(model, LRP_RULES), "1", subspaces(6))
    certificate = run.explain(torch.cat([x, -x * (1 + 1e-5)]), 1).certificate()
    assert certificate.share_of_score == pytest.approx(1, abs=1e-6)
    assert certificate.layer_to_score == pytest.approx(0, abs=1e-6)


def test_evidence_that_cancels_in_a_score_has_no_share() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)).double().eval()
    model[0].weight.data = torch.eye(2, dtype=torch.float64)
    model[1].weight.data = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    run = DisentangledAttributor(Gradient(model, LRP_RULES), "0", subspaces(2, 2))
    x = torch.tensor([[1.0, 1.0 + 1e-9]], dtype=torch.float64)
    cancelling = run.explain(x, 0).certificate()
    assert cancelling.share_of_score is None
    assert "sum of all maps: not defined here" in str(cancelling)
    both = run.explain(torch.cat([x, x[:, :1] * torch.tensor([[3.0, 1.0]])]), 0).certificate()
    assert both.share_of_score == pytest.approx(1)


def test_what_goes_around_is_in_the_certificate() -> None:
    model = network()
    model[1] = Around(nn.Conv2d(6, 6, 1)).double()
    for run in (
        DisentangledAttributor(Gradient(model), "1.inner", subspaces(6)),
        DisentangledAttribution(InputXGradient(model), "1.inner", subspaces(6)),
    ):
        with pytest.warns(RelevanceLossWarning, match="goes around"):
            certificate = run.explain(images(), 1).certificate()
        assert certificate.around_the_layer is not None
        assert 0.2 < certificate.around_the_layer < 0.9
        assert certificate.maps_to_whole is not None
        assert certificate.maps_to_whole > 0.1


@pytest.mark.parametrize("method", [LRP, InputXGradient])
def test_the_share_around_is_that_of_the_method_and_of_all_examples(method: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 6), Around(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 5)).double()
    x = torch.randn(4, 12, dtype=torch.float64)
    run = DisentangledAttribution(method(model.eval()), "1.inner", subspaces(6))
    with pytest.warns(RelevanceLossWarning, match="goes around") as caught:
        found = run.explain(x, 1)
    assert len(caught) == 1
    assert found.whole is not None
    through = found.maps.sum(1)
    around = found.whole - through
    if method is InputXGradient:  # the share is that of gradients
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
    run = DisentangledAttribution(IntegratedGradients(model), "3", subspaces(6), context_method=method)
    with pytest.warns(RelevanceLossWarning, match="zero activations"):
        certificate = run.explain(x, 1, n_steps=2).certificate()
    assert certificate.on_zero_activations == pytest.approx(expected, rel=1e-6)
    assert expected > 0.01


NUMBERS = torch.arange(64).reshape(8, 8) // 16  # four features of two rows
MASKS: dict[str, Any] = {
    "patches": NUMBERS[None, None],
    "one for each example": torch.stack([NUMBERS, NUMBERS.T // 2 + 3])[:, None].repeat(1, 3, 1, 1),
    "few axes": NUMBERS,
    "in a tuple": (NUMBERS[None, None],),
}


@pytest.mark.parametrize("mask", MASKS)
def test_a_feature_counts_once_in_the_certificate(mask: str) -> None:
    """Its value stands at each of its pixels, and counted there each time: 48 times in the first case."""
    run = DisentangledAttribution(ShapleyValues(network()), "1", subspaces(6), "gradient")
    found = run.explain(images(), 1, whole=False, feature_mask=MASKS[mask])
    torch.testing.assert_close(found.maps, run.attribute(images(), target=1, feature_mask=MASKS[mask]))
    certificate = found.certificate()
    # Exact Shapley values of a layer without biases sum to R_k, which sum to the score; they are float32.
    assert certificate.maps_to_layer == pytest.approx(0, abs=1e-5)
    assert certificate.share_of_score == pytest.approx(1, abs=1e-5)


def test_maps_that_are_no_relevance_have_no_share_of_the_score() -> None:
    """Windows may overlap, and squares of gradients are of another scale."""
    model, x = network(), images()
    windows = DisentangledAttribution(CaptumOcclusion(model), "1", subspaces(6), "gradient")
    tunnel = DisentangledAttribution(NoiseTunnel(InputXGradient(model)), "1", subspaces(6))
    for run, options in (
        (windows, {"sliding_window_shapes": (3, 4, 4)}),
        (tunnel, {"nt_type": "vargrad"}),
        (tunnel, {"nt_type": "smoothgrad_sq"}),
    ):
        certificate = run.explain(x, 1, whole=False, **options).certificate()
        assert (certificate.maps_to_layer, certificate.share_of_score) == (None, None)
    assert tunnel.explain(x, 1, whole=False, stdevs=1e-9).certificate().share_of_score == pytest.approx(1)
