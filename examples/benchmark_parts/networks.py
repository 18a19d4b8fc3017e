"""Networks with their weights, preprocessing, LRP rules and default layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from drsa_core.evaluation import Preprocessing
from torch import Tensor, nn
from zennit.canonizers import Canonizer
from zennit.composites import EpsilonGammaBox, EpsilonPlus
from zennit.core import Composite
from zennit.torchvision import ResNetCanonizer

from zennit_drsa import NFNetGamma, TimmCanonizer, VGGGamma

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Network:
    """What the benchmark needs to know about a network."""

    model: nn.Module
    size: int
    preprocessing: Preprocessing
    layer: str
    composite: Callable[[], Composite]
    n_outputs: int = 1000


def load_network(name: str, weights: Path | None) -> Network:
    """A network by name: efficientnet_lite0, vgg16, resnet18, dm_nfnet_f0 or any other model of timm.

    Parameters
    ----------
    name : str
    weights : path, optional
        State dict, as a .pt or .safetensors file. Default: the published weights, which torchvision and timm
        download; those of efficientnet_lite0 come with a package.
    """
    if name == "efficientnet_lite0":
        from efficientnet_lite0 import load_model

        model, size, mean, std, layer = load_model(), 224, (127 / 255,) * 3, (128 / 255,) * 3, "blocks.4"
        if weights is not None:
            model.load_state_dict(_read(weights))
    elif name in ("vgg16", "resnet18"):
        import torchvision.models

        model = torchvision.models.get_model(name, weights=None if weights else "IMAGENET1K_V1")
        size, mean, std = 224, IMAGENET_MEAN, IMAGENET_STD
        layer = "features.22" if name == "vgg16" else "layer4"
        if weights is not None:
            model.load_state_dict(_read(weights))
    else:
        import timm

        model = timm.create_model(name, pretrained=weights is None)
        if weights is not None:
            model.load_state_dict(_read(weights))
        config = model.pretrained_cfg
        size, mean, std = config["input_size"][1], config["mean"], config["std"]
        layer = "stages.2" if "nfnet" in name else ""
    model = model.eval().to(memory_format=torch.channels_last)  # a quarter faster on CPUs
    preprocessing = Preprocessing.from_mean_std(mean, std)
    zero = torch.zeros(1, 3, 1, 1)
    low, high = preprocessing.to_inputs(zero), preprocessing.to_inputs(zero + 1)
    return Network(model, size, preprocessing, layer, lambda: _composite(name, low, high))


def _composite(name: str, low: Tensor, high: Tensor) -> Composite:
    """The paper's rules for VGG16 and NFNets (Note D), Zennit's for ResNets, LRP-γ for the rest."""
    if name == "vgg16":
        return VGGGamma()
    if name == "resnet18":
        return EpsilonPlus(canonizers=[ResNetCanonizer()])
    if "nfnet" in name:
        return NFNetGamma(low, high, gamma=0.1)
    canonizers: list[Canonizer] = [TimmCanonizer()]
    return EpsilonGammaBox(low, high, gamma=0.25, canonizers=canonizers)


def _read(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    state = torch.load(file, weights_only=True, map_location="cpu")
    found: dict[str, Tensor] = state.get("state_dict", state)
    return found
