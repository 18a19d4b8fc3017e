"""Σ_k maps = the map of the wrapped attributor, for every composite in Zennit's registry."""

from __future__ import annotations

import pytest
import torch
from zennit.attribution import Gradient
from zennit.composites import COMPOSITES
from zennit.core import Composite
from zennit.torchvision import ResNetCanonizer, VGGCanonizer

from tests.toys import subspaces, torchvision_model
from zennit_drsa import DisentangledAttributor

# Layer and its number of features.
LAYERS = {
    "vgg11": [("features.4", 128), ("features.14", 512), ("features.19", 512)],
    "vgg11_bn": [("features.6", 128), ("features.20", 512), ("features.27", 512)],
    "resnet18": [("layer1", 64), ("layer3", 256), ("layer4", 512)],
}


@pytest.fixture(scope="module")
def networks():
    return {name: torchvision_model(name) for name in LAYERS}


def make(composite: str, network: str) -> Composite:
    canonizer = ResNetCanonizer() if network == "resnet18" else VGGCanonizer()
    bounds = {"low": -3.0, "high": 3.0} if composite == "epsilon_gamma_box" else {}
    extra = {} if composite == "vgg_gamma" and network != "resnet18" else {"canonizers": [canonizer]}
    return COMPOSITES[composite](**bounds, **extra)


def registered() -> list[str]:
    # Of this package's composites, only the VGG one is meant for these networks.
    return [name for name in COMPOSITES if not name.startswith(("nfnet", "transformer"))]


@pytest.mark.parametrize("network", LAYERS)
@pytest.mark.parametrize("composite", registered())
def test_maps_add_up_to_the_whole(networks, network, composite):
    if composite == "vgg_gamma" and network == "resnet18":
        pytest.skip("VGGGamma is for the VGG family")
    if composite == "beta_smooth" and network == "resnet18":
        pytest.skip("the rule of BetaSmooth remembers one run, and a block's ReLU runs twice: refused")
    model = networks[network]
    input = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    gradient = Gradient(model, make(composite, network))
    target = torch.eye(10)[[3]]
    _, whole = gradient(input, target)
    assert whole.abs().max() > 0
    for layer, n_features in LAYERS[network]:
        attributor = DisentangledAttributor(gradient, layer, subspaces(n_features))
        _, maps = attributor(input, target)
        assert maps.shape == (1, 3, 3, 32, 32)
        error = (maps.sum(1) - whole).abs().max() / whole.abs().max()
        assert error <= 1e-5, (layer, error)
        # The parts are parts: none of them is the whole, or nothing.
        assert all((part - whole[0]).abs().max() > 1e-3 * whole.abs().max() for part in maps[0])
