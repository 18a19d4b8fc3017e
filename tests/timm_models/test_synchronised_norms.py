"""`nn.SyncBatchNorm`, as training on several devices leaves it: merged as other batch norms, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.model_state import model_state

from .zoo import explain, image, normed

tv = pytest.importorskip("torchvision").models

from drsa_core import Subspaces  # noqa: E402
from zennit.attribution import Gradient  # noqa: E402
from zennit.composites import EpsilonPlus, GuidedBackprop  # noqa: E402
from zennit.torchvision import ResNetCanonizer  # noqa: E402

from zennit_drsa import ConvNetGamma, DisentangledAttributor  # noqa: E402


def randomised(model: nn.Module) -> nn.Module:
    """In evaluation mode, with statistics that are not trivial."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
    return model.eval()


def synchronised(model: nn.Module) -> Any:
    return nn.SyncBatchNorm.convert_sync_batchnorm(model).eval()


@pytest.mark.parametrize(
    "build",
    [
        lambda: normed("resnet18"),
        lambda: normed("densenet121", block_config=(2, 2)),
        lambda: randomised(tv.mobilenet_v3_small(num_classes=10)),
        lambda: randomised(tv.resnet18(num_classes=10)),
        lambda: randomised(nn.Sequential(tv.vgg11_bn(num_classes=10))),
    ],
)
def test_they_are_merged(build):
    torch.manual_seed(0)
    model, x = build(), image(64)
    _, expected = explain(model, ConvNetGamma(), x)
    _, relevance = explain(synchronised(model), ConvNetGamma(), x)
    # The same weights in the same order: nothing is rounded differently.
    assert torch.equal(relevance, expected)
    assert expected.abs().max() > 0


def test_zennits_canonizers_do_not_know_them():
    model = synchronised(randomised(tv.resnet18(num_classes=10)))
    before = model_state(model)
    attributor = DisentangledAttributor(Gradient(model, EpsilonPlus(canonizers=[ResNetCanonizer()])), "conv1")
    with pytest.raises(ValueError, match=r"is a SyncBatchNorm, which Zennit neither merges .*BatchNorm2d"):
        attributor.context(image(64), 3)
    assert model_state(model) == before


def test_gradients_go_through_them():
    model = synchronised(randomised(tv.resnet18(num_classes=10)))
    concepts = Subspaces(torch.eye(128), [64, 64])
    start = torch.eye(10)[[3]]
    with Gradient(model, GuidedBackprop()) as attributor:
        _, whole = attributor(image(64), start)
    _, maps = DisentangledAttributor(Gradient(model, GuidedBackprop()), "layer2", concepts)(image(64), start)
    assert (maps.sum(1) - whole).abs().max() <= 1e-5 * whole.abs().max()
