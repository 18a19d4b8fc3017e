"""Concept maps of canonized timm models: modules that return an inner module's output, sums and gates."""

from __future__ import annotations

import pytest
import torch
from drsa_core import RandomSubspaces
from torch import nn
from zennit.attribution import Gradient
from zennit.composites import EpsilonGammaBox

from tests.model_state import model_state
from zennit_drsa import DisentangledAttributor, TimmCanonizer, collect

from .zoo import image, normed


@pytest.mark.parametrize(
    ("name", "layer"),
    [("tf_efficientnet_lite0", "blocks.2"), ("mobilenetv3_small_050", "blocks.1"), ("resnet18", "layer2")],
)
def test_maps_add_up_to_zennits_own_map(name: str, layer: str) -> None:
    model, x = normed(name).double(), image(64, n=2).double()
    composite = EpsilonGammaBox(torch.full_like(x, -3), torch.full_like(x, 3), canonizers=[TimmCanonizer()])
    one_hot = nn.functional.one_hot(torch.tensor([3, 5]), 10)
    with Gradient(model, composite) as attributor:
        _, whole = attributor(x, lambda y: y * one_hot)
    before = model_state(model)  # Zennit 1's own rules leave other Parameter objects behind
    a, c = collect(model, composite, layer, [x], torch.tensor([3, 5]), positions=None, progress=False)
    assert bool(a.any())
    assert bool(c.any())
    subspaces = RandomSubspaces(4, random_state=0).fit(a).subspaces_
    with DisentangledAttributor(Gradient(model, composite), layer, subspaces) as disentangled:
        _, maps = disentangled(x, lambda y: y * one_hot)
    assert maps.shape == (2, 4, *x.shape[1:])
    assert float((maps.sum(1) - whole).abs().max()) <= 1e-9 * float(whole.abs().max())
    assert model_state(model) == before
