"""The names that examples in docstrings take for granted: a model, images, a loader, subspaces."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from drsa_core import DRSA, Subspaces
from PIL import Image
from torch import Tensor, nn


def small_vgg() -> nn.Module:
    """VGG16 with few channels: the layers of torchvision's under the same names, 1000 outputs."""
    from torchvision.models.vgg import make_layers

    layers: list[int | str] = [4, 4, "M", 4, 4, "M", 8, 8, 8, "M", 8, 8, 8, "M", 8, 8, 8, "M"]
    parts = {
        "features": make_layers(layers),
        "avgpool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "classifier": nn.Linear(8, 1000),
    }
    return nn.Sequential(OrderedDict(parts)).eval()


def names() -> dict[str, Any]:
    """A new set of them, the same at every call."""
    import timm
    from captum.attr import IntegratedGradients
    from zennit.attribution import Gradient
    from zennit.composites import EpsilonPlus, EpsilonPlusFlat

    import captum_drsa
    import zennit_drsa

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, nfnet = small_vgg(), timm.create_model("test_nfnet", num_classes=1000).eval()
        vit = timm.create_model("test_vit", num_classes=1000, img_size=32).eval()
        images: Tensor = torch.rand(2, 3, 32, 32)
    labels = torch.tensor([430, 430])
    return {
        "torch": torch,
        "model": model,
        "nfnet": nfnet,
        "vit": vit,
        "images": images,
        "labels": labels,
        "loader": [images],
        "one_hot": nn.functional.one_hot(labels, 1000).float(),
        "subspaces": Subspaces(torch.eye(8), [2, 2, 2, 2]),
        "composite": EpsilonPlusFlat(),
        "DRSA": DRSA,
        "collect": zennit_drsa.collect,
        "DisentangledAttribution": captum_drsa.DisentangledAttribution,
        "DisentangledAttributor": zennit_drsa.DisentangledAttributor,
        "EpsilonPlus": EpsilonPlus,
        "EpsilonPlusFlat": EpsilonPlusFlat,
        "Gradient": Gradient,
        "IntegratedGradients": IntegratedGradients,
        "TransformerGamma": zennit_drsa.TransformerGamma,
    }


def folders_of_images(place: Path) -> None:
    """`train` and `val`, which examples of the command take for granted."""
    generator = torch.Generator().manual_seed(0)
    for name in ("train", "val"):
        (place / name).mkdir()
        for number in range(6):
            pixels = (torch.rand(64, 64, 3, generator=generator) * 255).byte().numpy()
            Image.fromarray(pixels).save(place / name / f"{number}.png")
