"""LRP against a literal backward pass and against Captum's own map."""

from __future__ import annotations

import copy

import pytest
import torch
from captum.attr import LRP, LayerLRP
from captum.attr._utils.lrp_rules import EpsilonRule, GammaRule
from drsa_core import context_from_relevance
from torch import Tensor, nn

from captum_drsa import DisentangledAttribution, LRPContext
from tests.captum_adapter.networks import conv_net, images, subspaces
from tests.closeness import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:Input Tensor 0 did not already require gradients")


def conv_rules(model):
    model.features[0].rule = GammaRule(0.5)
    model.features[3].rule = GammaRule(0.25)
    model.top[0].rule = EpsilonRule(1e-6)
    return model


@pytest.mark.parametrize(
    "layer", ["features.1", "features.2", "features.3", "features.4", "features", "top.1", "top"]
)
def test_parts_add_up_to_captums_own_map(layer: str) -> None:
    """Σ_k R_pk = R_p after ReLU, pooling, convolution, for containers; with rules that change the weights."""
    model, x = conv_net(), images()
    n_features = {"features.1": 6, "features.2": 6}.get(layer, 10 if "top" in layer else 8)
    split = DisentangledAttribution(LRP(conv_rules(model)), layer, subspaces(n_features)).attribute(
        x, target=[0, 3]
    )
    whole = LRP(conv_rules(copy.deepcopy(model))).attribute(x, target=[0, 3]).detach()
    assert (split.sum(1) - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_context_is_that_of_layer_lrp() -> None:
    """c ⊙ a is the relevance that LayerLRP gives at the input of the next layer."""
    model, x = conv_net(), images()
    a, c = DisentangledAttribution(LRP(conv_rules(model)), "features.4").context(x, 3)
    torch.testing.assert_close(a, model.features(x).detach())
    reference = conv_rules(copy.deepcopy(model))
    relevance = LayerLRP(reference, reference.top[0]).attribute(x, target=3, attribute_to_layer_input=True)
    relevance = (relevance[0] if isinstance(relevance, tuple) else relevance).detach()
    assert (a * c - relevance).abs().max() <= 1e-5 * relevance.abs().max()
    assert not c[a == 0].any()
    torch.testing.assert_close(c, context_from_relevance(a, relevance), rtol=1e-3, atol=1e-6)


def test_conservation_and_delta() -> None:
    """Without biases Σ_p R_pk = R_k; delta is what is missing, and Σ_k R_k = y."""
    model, x = conv_net(), images()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    da = DisentangledAttribution(LRP(model), "features.4", subspaces(8))
    maps, delta = da.attribute(x, target=1, return_convergence_delta=True)
    relevance = da.concept_relevance(x, 1)
    torch.testing.assert_close(delta, relevance - maps.flatten(2).sum(2), rtol=1e-4, atol=1e-6)
    assert delta.abs().max() <= 1e-4 * relevance.abs().max()
    torch.testing.assert_close(relevance.sum(1), model(x)[:, 1].detach(), rtol=1e-4, atol=1e-6)


def test_difference_of_logits_as_initial_relevance() -> None:
    """LRP is linear in the initial relevance: the maps of y_3 − y_1 are those of y_3 minus those of y_1."""
    model, x = conv_net(), images()
    da = DisentangledAttribution(LRP(conv_rules(model)), "features.4", subspaces(8))
    difference = da.attribute(x, target=lambda y: y[:, 3] - y[:, 1])
    expected = da.attribute(x, target=3) - da.attribute(x, target=1)
    torch.testing.assert_close(difference, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


def test_another_context_than_lrps() -> None:
    """context_method replaces c; the way down stays LRP."""
    model, x = conv_net(), images()
    own = DisentangledAttribution(LRP(model), "features.4", subspaces(8)).attribute(x, target=1)
    same = DisentangledAttribution(
        LRP(model), "features.4", subspaces(8), context_method=LRPContext(LRP(model))
    ).attribute(x, target=1)
    other = DisentangledAttribution(
        LRP(model), "features.4", subspaces(8), context_method="integrated_gradients"
    ).attribute(x, target=1)
    assert_same(own, same)
    assert not torch.allclose(own, other, rtol=1e-2)


def test_relevance_on_inactive_neurons_is_reported() -> None:
    """A rule of the user's that leaves relevance on zero activations: the share that is lost is named."""

    class Flat(EpsilonRule):  # type: ignore[misc]
        """Relevance to all inputs alike, active or not."""

        def _create_backward_hook_input(self, inputs: Tensor):
            return lambda grad: torch.ones_like(grad)

    model, x = conv_net(), images()
    model.top[0].rule = Flat()
    with pytest.warns(UserWarning, match="sits on zero activations"):
        DisentangledAttribution(LRP(model), "features.4", subspaces(8)).attribute(x, target=1)


def test_layer_lrp_as_context_leaves_the_rules_to_the_maps() -> None:
    """Captum takes the rules off the model after each call, so that the maps were those of its defaults."""
    model, x = conv_rules(conv_net()), images()
    expected = DisentangledAttribution(LRP(model), "features.3", subspaces(8)).attribute(x, target=1)
    by_layer = DisentangledAttribution(
        LRP(model), "features.3", subspaces(8), context_method=LayerLRP(model, model.features[3])
    )
    assert_same(by_layer.attribute(x, target=1), expected)
    assert isinstance(model.features[0].rule, GammaRule)
