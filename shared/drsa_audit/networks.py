"""Networks by name, with their weights, preprocessing, LRP rules and default layer."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import timm
import torch
import torchvision.models
from drsa_core.evaluation import Preprocessing
from PIL import Image
from torch import Tensor, nn
from zennit.composites import EpsilonGammaBox, EpsilonPlus
from zennit.core import Composite

from zennit_drsa import (
    ConvNetGamma,
    NFNetGamma,
    TimmCanonizer,
    TorchvisionCanonizer,
    TransformerGamma,
    VGGGamma,
)

from .images import load_images, to_pixels
from .models import (
    Transform,
    described_model,
    efficientnet_lite0,
    find_factory,
    published_transform,
    read_classes,
    read_state,
    torchvision_names,
)
from .progress import BadInput, one_line
from .settings import ModelSettings

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
    interpolation : {"bicubic", "bilinear"}
        Of the resizing.
    """

    model: nn.Module
    size: int
    preprocessing: Preprocessing
    layer: str
    composite: Rules
    classes: tuple[int, ...] | None = None
    resize: int | None = None
    interpolation: str = "bicubic"

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

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
        """Photographs as the network expects them, shape (N, 3, H, W), without those that cannot be read."""
        pixels, _, _ = load_images(files, size or self.size, self.resize, self.interpolation)
        return self.preprocessing.to_inputs(pixels)

    def layer_or(self, layer: str | None) -> str:
        """The layer that is named, or the default one."""
        if layer or self.layer:
            return layer or self.layer
        names = ", ".join(name for name, _ in self.model.named_children())
        raise ValueError(f"this network has no default layer: name one, e.g. one of {names}, or one in them")

    def with_input(self, transform: Transform) -> Network:
        """The network with other preprocessing; LRP rules that know the range of the inputs follow it."""
        composite = self.composite
        if isinstance(composite, SuitableRules):
            composite = replace(composite, mean=tuple(transform.mean), std=tuple(transform.std))
        return replace(
            self,
            size=transform.size,
            resize=transform.resize,
            interpolation=transform.interpolation,
            preprocessing=Preprocessing.from_mean_std(transform.mean, transform.std, transform.channel_order),
            composite=composite,
        )

    def describe_preprocessing(self) -> dict[str, Any]:
        """How photographs become inputs, as JSON; the same for the same inputs, up to rounding."""
        mean, std, colours = self._channels()
        return {
            "size": self.size,
            "resize": self.resize,
            "interpolation": self.interpolation,
            "mean": _rounded(mean),
            "std": _rounded(std),
            "channels": _channel_order(colours) or [_rounded(row) for row in colours.tolist()],
        }

    def _channels(self) -> tuple[list[float], list[float], Tensor]:
        """Mean and std, read from what black and white become, and what each colour adds to each channel."""
        pixels = torch.cat([torch.zeros(3, 1), torch.ones(3, 1), torch.eye(3)], dim=1)[None, :, None, :]
        inputs = self.preprocessing.to_inputs(pixels)[0, :, 0].double().T
        std = 1 / (inputs[1] - inputs[0])
        return (-inputs[0] * std).tolist(), std.tolist(), (inputs[2:] - inputs[0]).T


@dataclass(frozen=True)
class SuitableRules:
    """LRP rules for a model: the paper's for VGG16 and NFNets (Note D), Zennit's for ResNets, or LRP-γ.

    Called with the concept layer, they are a new composite. Above that layer γ is 0, as in the paper's rules
    for VGG16 at Conv4_3: with a large γ there the contexts are close to a multiple of the activations, and
    DRSA finds what DSA finds. VGGs keep the paper's rules whatever the layer.
    """

    model: nn.Module
    mean: tuple[float, ...]  # of the inputs: with std, it gives the bounds of the z^B-rule
    std: tuple[float, ...]
    gamma: float = GAMMA  # below the layer, for networks that have no rules in the paper

    def __call__(self, layer: str | None) -> Composite:
        model, (low, high) = self.model, self.bounds()
        if _is_nfnet(model):
            return NFNetGamma(low=low, high=high, gamma=0.1, layer=layer)
        if layer is not None and self.has_gamma:
            return ConvNetGamma(self.gamma, low=low, high=high, layer=layer)
        if is_torchvision_resnet(model):
            return EpsilonPlus(canonizers=[TorchvisionCanonizer()])
        for canonizer in (TimmCanonizer, TorchvisionCanonizer):
            if canonizer.suits(model):
                return EpsilonGammaBox(low, high, gamma=self.gamma, canonizers=[canonizer()])
        if TransformerGamma.suits(model):
            return TransformerGamma(layer=layer)
        if VGGGamma.suits(model):
            return VGGGamma(mean=self.mean, std=self.std)
        raise ValueError(
            f"no LRP rules are known for {type(model).__name__}: take another backend (ig, gxi, shapley), or "
            "a factory that returns a Network with a composite of its own; zennit_drsa.doctor says what is "
            "missing"
        )

    @property
    def has_gamma(self) -> bool:
        """Whether `gamma` counts at a concept layer."""
        known = TimmCanonizer.suits(self.model) or TorchvisionCanonizer.suits(self.model)
        return known and not _is_nfnet(self.model)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """What black and white are in the inputs, shapes (1, 3, 1, 1)."""
        low, high = (
            torch.tensor([(pixel - m) / s for m, s in zip(self.mean, self.std, strict=True)])
            for pixel in (0.0, 1.0)
        )
        return low.view(1, -1, 1, 1), high.view(1, -1, 1, 1)


def load_network(name: str, weights: str | Path | None = None, crop: bool = False) -> Network:
    """A network by name.

    Parameters
    ----------
    name : str
        * "efficientnet_lite0", or a model of torchvision or timm, e.g. "resnet50" or "dm_nfnet_f0". A name
          that both have is torchvision's; "timm/resnet50" and "torchvision/resnet50" say which one.
        * "FILE.safetensors" that says its architecture in the entry `architecture`, as in
          "timm vit_small_patch14_dinov2, img_size=224, num_classes=4";
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
            raise BadInput(one_line(f"the weights {file} do not fit {name}: {error}", 400)) from error
        network = replace(network, classes=read_classes(file) or network.classes)
    if not crop:
        network = replace(network, resize=None, interpolation="bicubic")
    network.model.eval().to(memory_format=torch.channels_last)  # a quarter faster on CPUs
    return network


def open_network(settings: ModelSettings) -> Network:
    """The network in eval mode on its device, with the preprocessing that was asked for."""
    try:
        device = torch.device(settings.device)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadInput(f"the device {settings.device!r} cannot be used: {one_line(error, 160)}") from error
    model = settings.model
    if isinstance(model, str):
        network = _loaded(model, None if settings.weights == "DEFAULT" else settings.weights)
        network.model.eval().to(device)
    else:
        network = model if isinstance(model, Network) else network_of(model, "", published_transform(model))
        if any(module.training for module in network.model.modules()):
            # A model that the user holds is explained as it is, where it is.
            raise BadInput("the model is in training mode; call model.eval() first")
    return _with_transform(network, settings)


def count_outputs(network: Network, inputs: Tensor | None = None) -> int:
    """Number of the network's outputs, from a forward pass of one input; by default a black one."""
    if inputs is None:
        inputs = torch.zeros(1, 3, network.size, network.size, device=network.device)
    try:
        with torch.no_grad():
            output = network.model(inputs[:1].clone())
    except Exception as error:
        raise BadInput(
            f"the model does not run on an input of shape {tuple(inputs[:1].shape)}: {one_line(error, 240)}"
        ) from error
    if not isinstance(output, Tensor) or output.ndim != 2:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise BadInput(f"the model must return scores of shape (N, classes), got {got}")
    return int(output.shape[1])


def network_of(model: nn.Module, name: str, transform: Transform) -> Network:
    """A bare model with suitable rules and its transform."""
    layer = LAYERS.get(name, "stages.2" if _is_nfnet(model) else "")
    rules = SuitableRules(model, tuple(transform.mean), tuple(transform.std))
    bare = Network(model, transform.size, Preprocessing.from_mean_std(0.0, 1.0), layer, rules)
    return bare.with_input(transform)


def is_torchvision_resnet(model: nn.Module) -> bool:
    """Whether there is a ResNet of torchvision in the model."""
    return any(isinstance(module, torchvision.models.ResNet) for module in model.modules())


def _is_nfnet(model: nn.Module) -> bool:
    return any(type(module).__name__ == "NormFreeNet" for module in model.modules())


def _build(name: str, published: bool) -> Network:
    """The network of a name, with its published weights or with random ones."""
    if name == "efficientnet_lite0":
        model = efficientnet_lite0(published)
        own = published_transform(model)
        # (255 x − 127) / 128
        return network_of(model, name, replace(own, mean=(127 / 255,) * 3, std=(128 / 255,) * 3))
    if name.endswith(".safetensors"):
        model, keywords = described_model(Path(name))
        own = published_transform(model)
        size = keywords.get("img_size", own.size)
        # With the same share cut off.
        resize = None if own.resize is None else round(size * own.resize / own.size)
        return network_of(model, Path(name).stem, replace(own, size=size, resize=resize))
    if ":" in name:
        made = find_factory(name)()
        if not isinstance(made, Network | nn.Module):
            raise TypeError(f"{name} must return a torch module or a Network, got {type(made).__name__}")
        return made if isinstance(made, Network) else network_of(made, name, published_transform(made))
    library, _, plain = name.rpartition("/")
    if library == "torchvision" or (not library and plain in torchvision_names()):
        # The weights of the paper's networks are torchvision's first ones.
        chosen = "IMAGENET1K_V1" if plain in LAYERS else "DEFAULT"
        model = torchvision.models.get_model(plain, weights=chosen if published else None)
        return network_of(model, plain, published_transform(model, plain))
    plain = plain if library == "timm" else name
    model = timm.create_model(plain, pretrained=published)
    return network_of(model, plain, published_transform(model))


def _loaded(name: str, weights: str | None) -> Network:
    """`load_network` with its errors in one sentence."""
    if weights is not None and not Path(weights).is_file():
        raise BadInput(f"there is no file {weights} with weights; DEFAULT takes the published ones")
    if name.endswith(".safetensors"):
        if not Path(name).is_file():
            raise BadInput(f"there is no file {name}")
    elif ":" not in name:
        library, _, plain = name.rpartition("/")
        known = {"efficientnet_lite0", *torchvision_names()}
        if plain not in known if library == "torchvision" else name not in known and not timm.is_model(plain):
            close = difflib.get_close_matches(plain, known | set(timm.list_models()), n=3, cutoff=0.6)
            near = f"did you mean {' or '.join(close)}?" if close else "see timm.list_models()"
            raise BadInput(
                f"neither torchvision nor timm has a model {name!r}; {near} A model of your own is "
                "module:factory"
            )
    try:
        return load_network(name, weights, crop=True)
    except BadInput:
        raise
    except Exception as error:
        text = one_line(f"{type(error).__name__}: {error}", 300)
        if ":" in name:
            raise BadInput(f"the model {name} could not be made: {text}") from error
        raise BadInput(
            f"the model {name} could not be loaded: {text}; its weights may be given with --weights FILE"
        ) from error


def _with_transform(network: Network, settings: ModelSettings) -> Network:
    """The network with what the user says about the preprocessing; what is not said stays."""
    if (settings.mean is None) != (settings.std is None):
        raise BadInput("give --mean and --std together: inputs are (pixels − mean) / std")
    size, resize = settings.size or network.size, settings.resize
    # A network that squeezes the whole photograph into the square goes on to do so.
    if resize is None and network.resize is not None:
        resize = network.resize * size // network.size
    resize = None if resize is None else max(size, resize)
    if settings.mean is None and settings.channel_order is None:
        return replace(network, size=size, resize=resize)
    mean, std, colours = network._channels()
    order = settings.channel_order or _channel_order(colours) or "RGB"
    chosen = tuple(settings.mean or mean), tuple(settings.std or std)
    return network.with_input(Transform(size, resize, *chosen, network.interpolation, order))


def _channel_order(colours: Tensor) -> str | None:
    """ "RGB" or "BGR", read from what red, green and blue add; None if a channel mixes them."""
    changed = colours.abs() > 1e-9
    for order, expected in (("RGB", torch.eye(3)), ("BGR", torch.eye(3).flip(1))):
        if torch.equal(changed, expected.bool()):
            return order
    return None


def _rounded(values: Sequence[float]) -> list[float]:
    """To six digits, which other machines agree on."""
    return [float(f"{value:.6g}") + 0.0 for value in values]  # + 0.0: no −0
