"""Networks with their weights, preprocessing, LRP rules and default layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from drsa_core.evaluation import Preprocessing
from torch import Tensor, nn
from zennit.canonizers import Canonizer
from zennit.composites import EpsilonGammaBox, EpsilonPlus, MixedComposite, NameMapComposite
from zennit.core import Composite
from zennit.rules import Epsilon, Gamma
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


def with_upper_gamma(network: Network, layer: str, gamma: float) -> Network:
    """The network with LRP-γ of another γ in the convolutions above a layer, LRP-ε if it is 0.

    The paper's rules for VGG16 have γ = 0 there (Note D); a large γ hides what speaks against the class.
    """
    names = [name for name, _ in network.model.named_modules()]
    last = max(i for i, name in enumerate(names) if name == layer or name.startswith(f"{layer}."))
    above = [n for n in names[last + 1 :] if isinstance(network.model.get_submodule(n), nn.Conv2d)]

    def composite() -> Composite:
        rule = Gamma(gamma) if gamma else Epsilon(1e-6)
        # The first composite that knows a module decides.
        return MixedComposite([NameMapComposite([(above, rule)]), network.composite()])

    return replace(network, composite=composite)


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
