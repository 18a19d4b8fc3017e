"""How photographs become inputs: as a model's publishers did it, where the model or its library says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Transform:
    """From a photograph to an input.

    Attributes
    ----------
    size : int
        Height and width of the input.
    resize : int or None
        Length of the shorter side before the central square of that size is cut out. None: the whole
        photograph is squeezed into the square.
    mean, std : sequence of float
        Inputs are (pixels − mean) / std, in the order of the network's channels.
    interpolation : str
        "bicubic" or "bilinear".
    channel_order : str
        "RGB" or "BGR".
    is_published : bool
        Whether the model or its library says so; otherwise it is ImageNet's usual normalisation, assumed.
    """

    size: int = 224
    resize: int | None = 224
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    interpolation: str = "bicubic"
    channel_order: str = "RGB"
    is_published: bool = False

    def resize_for(self, size: int) -> int | None:
        """The shorter side for inputs of another size, with the same share cut off."""
        return None if self.resize is None else round(size * self.resize / self.size)


def is_torchvision_name(name: str) -> bool:
    """Whether torchvision has a classifier of that name."""
    try:
        import torchvision.models
    except ImportError:
        return False
    return name in torchvision.models.list_models(module=torchvision.models)


def published_transform(model: nn.Module, torchvision_name: str | None = None) -> Transform:
    """The transform of torchvision's weights of that name, or the one that a model of timm carries."""
    if torchvision_name is not None:
        import torchvision.models

        own = torchvision.models.get_model_weights(torchvision_name).DEFAULT.transforms()
        how = own.interpolation.value
        return Transform(
            own.crop_size[0], own.resize_size[0], tuple(own.mean), tuple(own.std), how, is_published=True
        )
    config = getattr(model, "pretrained_cfg", None) or {}
    if not config:
        return Transform()
    size = config.get("input_size", (3, 224, 224))[1]
    how = config.get("interpolation", "bicubic")
    crop = config.get("crop_pct", 1.0)
    is_squeezed = config.get("crop_mode") == "squash" and crop == 1
    return Transform(
        size,
        None if is_squeezed else int(size / crop),
        tuple(config.get("mean", IMAGENET_MEAN)),
        tuple(config.get("std", IMAGENET_STD)),
        how if how in ("bicubic", "bilinear") else "bicubic",
        is_published=True,
    )
