"""`NFNetCanonizer`, `NFNetGamma`: the model stays what it was, relevance is conserved, bad input is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drsa_core import RandomSubspaces
from torch import nn

from tests.closeness import assert_same
from tests.model_state import model_state

from .zoo import HIGH, LOW, NFNETS, explain, image, nfnet, timm, without_biases

from zennit.attribution import Gradient  # isort: skip
from zennit.composites import EpsilonPlus  # isort: skip
from zennit_drsa import DisentangledAttributor, NFNetCanonizer, NFNetGamma  # isort: skip


@pytest.mark.parametrize("name", NFNETS)
def test_logits_stay_relevance_is_conserved_and_the_model_comes_back(name):
    model = without_biases(nfnet(name))
    model.get_parameter("stages.0.0.conv1.weight").grad = torch.ones_like(
        model.get_parameter("stages.0.0.conv1.weight")
    )
    model.get_parameter("stages.0.0.conv3.weight").requires_grad_(False)
    x = image(64, n=2)
    before, expected = model_state(model), model(x).detach()
    logits, relevance = explain(model, NFNetGamma(LOW, HIGH), x)
    assert model_state(model) == before
    assert (logits - expected).abs().max() <= 1e-6 * expected.abs().max()
    # Without biases only dropped denominators (|d| ≤ 1e-3) lose relevance.
    error = (relevance.sum((1, 2, 3)) - logits[:, 3]).abs() / logits[:, 3].abs()
    assert error.max() <= 1e-3


def test_any_zennit_composite_conserves_relevance_on_the_canonical_form():
    model = without_biases(nfnet("nf_regnet_b0")).double()
    logits, relevance = explain(
        model, EpsilonPlus(1e-12, 1e-12, canonizers=[NFNetCanonizer()]), image(48).double()
    )
    assert float(relevance.sum()) == pytest.approx(float(logits[0, 3]), rel=1e-6)


def test_drop_path_in_training_mode_passes_relevance():
    model = without_biases(nfnet("nfnet_f0", drop_path_rate=0.5)).double().train()
    torch.manual_seed(0)
    logits, relevance = explain(model, NFNetGamma(LOW, HIGH, threshold=0), image(48).double())
    assert float(relevance.sum()) == pytest.approx(float(logits[0, 3]), rel=1e-6)


class Stop(Exception):
    pass


def test_a_frozen_model_and_one_inside_another_model():
    model = nfnet("test_nfnet").requires_grad_(False)
    wrapped = nn.Sequential(nn.Identity(), model)
    x = image(32)
    _, expected = explain(model, NFNetGamma(LOW, HIGH), x)
    _, relevance = explain(wrapped, NFNetGamma(LOW, HIGH), x)
    assert_same(relevance, expected)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"gamma": -0.1}, ValueError, "gamma must be finite and at least 0, got -0.1"),
        ({"gamma": float("nan")}, ValueError, "gamma"),
        ({"gamma": "0.1"}, TypeError, "gamma must be a number, got str"),
        ({"threshold": -1.0}, ValueError, "threshold"),
        ({"low": HIGH, "high": LOW}, ValueError, "exchanged"),
        ({"high": float("inf")}, ValueError, "low and high must be finite"),
        ({"bias": "none"}, ValueError, "bias must be 'neuron'"),
    ],
)
def test_bad_parameters_are_named(kwargs, error, match):
    with pytest.raises(error, match=match):
        NFNetGamma(**{"low": LOW, "high": HIGH, **kwargs})


def test_bounds_of_another_shape_are_named_and_the_model_comes_back():
    model = nfnet("test_nfnet")
    before = model_state(model)
    with pytest.raises(
        ValueError, match=r"low and high must be broadcastable to the input of shape \(1, 3, 32, 32\)"
    ):
        explain(model, NFNetGamma(torch.full((1, 4, 1, 1), -9.0), 9.0), image(32))
    assert model_state(model) == before


def test_another_family_is_told_which_are_supported():
    model = timm.create_model("resnet18")
    before = model_state(model)
    with pytest.raises(ValueError, match=r"no NFNet in this ResNet.*dm_nfnet_f\*.*TimmCanonizer"):
        NFNetCanonizer().apply(model)
    with pytest.raises(ValueError, match="no NFNet"), NFNetGamma(LOW, HIGH).context(model):
        pass
    assert model_state(model) == before


def test_an_unknown_attention_layer_is_named():
    model = nfnet("nf_resnet26", attn_layer="cbam")
    before = model_state(model)
    with pytest.raises(ValueError, match=r"stages\.0\.0\.attn_last is a CbamModule.*SEModule"):
        NFNetCanonizer().apply(model)
    assert model_state(model) == before


def test_pooling_by_a_sum_is_named():
    with pytest.raises(ValueError, match=r"'avgmax'.*global_pool='avg'"):
        NFNetCanonizer().apply(nfnet("test_nfnet", global_pool="avgmax"))


def test_one_forward_pass_serves_k_maps():
    model: Any = nfnet("dm_nfnet_f0")
    runs: list[int] = []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    split = RandomSubspaces(2, random_state=0).fit(torch.randn(2, model.head.fc.in_features)).subspaces_
    attributor = DisentangledAttributor(Gradient(model, NFNetGamma(LOW, HIGH)), "final_conv", split)
    attributor(image(48))  # the first use validates the rules
    runs.clear()
    assert attributor(image(48))[1].shape[1] == 2
    assert len(runs) == 1
