"""Where a model and its weights come from: files, what they say of themselves, and factories."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


def read_state(file: Path) -> dict[str, Tensor]:
    """A state dict from a .safetensors or .pt file; half precision becomes float32."""
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        state = load_file(file)
    else:
        loaded = torch.load(file, weights_only=True, map_location="cpu")
        state = loaded.get("state_dict", loaded)
    return {name: value.float() if value.is_floating_point() else value for name, value in state.items()}


def read_about(file: Path) -> dict[str, str]:
    """What a .safetensors file says of itself; nothing for files of other kinds."""
    if file.suffix != ".safetensors":
        return {}
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return dict(opened.metadata() or {})


def read_classes(file: Path) -> tuple[int, ...] | None:
    """The class of each output, from the entry `classes` of a .safetensors file; None if it has none."""
    text = read_about(file).get("classes")
    if text is None:
        return None
    try:
        return tuple(int(index) for index in json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`classes` of {file} must be a JSON list of integers, got {text!r}") from error


def described_model(file: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model that a .safetensors file names in its entry `architecture`, and the keywords there.

    The entry reads "timm NAME" or "torchvision NAME", and may go on with keywords:
    "timm vit_small_patch14_dinov2, img_size=224, num_classes=4".
    """
    text = read_about(file).get("architecture", "")
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
        import timm

        return timm.create_model(name, pretrained=False, **keywords), keywords
    import torchvision.models

    return torchvision.models.get_model(name, weights=None, **keywords), keywords


def find_factory(name: str) -> Callable[[], Any]:
    """The function of "package.module:function", also of the current folder, or "folder/file.py:function".

    A file is run as Python runs a script, with its neighbours at hand: name only files that you trust.
    """
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None or not Path(place).is_file():
            raise ValueError(f"there is no Python file {place}, in which {function} should be")
        module = importlib.util.module_from_spec(spec)
        with _importable(Path(place)), _registered(module):
            spec.loader.exec_module(module)
    else:
        try:
            with _importable(Path(place)):  # in the current folder, as `python -m` finds it
                module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ValueError(f"cannot import {place!r} of the network {name!r}: {error}") from error
    found: Any = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"{place} has no function {function!r}; {name!r} must name one without arguments")
    if not place.endswith(".py"):
        return found

    def made() -> Any:
        with _importable(Path(place)):  # factories may import their neighbours late
            return found()

    return made


class _Neighbours:
    """Finds modules in one folder, for Python's list of finders: the search path stays as it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """A module or package of that name; a mere folder, which may hold anything, is none."""
        found = None if path is not None else PathFinder.find_spec(name, [self.folder], target)
        return found if found is not None and found.loader is not None else None


@contextmanager
def _importable(file: Path) -> Iterator[None]:
    """Modules beside a file can be imported, as for a script."""
    finder = _Neighbours(file.resolve().parent)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextmanager
def _registered(module: ModuleType) -> Iterator[None]:
    """The module among those that are known, which dataclasses ask for; it stays there unless it fails.

    One of the same name that comes from elsewhere keeps its place: others rely on it.
    """
    known = sys.modules.get(module.__name__)
    if known is not None and getattr(known, "__file__", None) != module.__file__:
        yield
        return
    sys.modules[module.__name__] = module
    try:
        yield
    except BaseException:
        del sys.modules[module.__name__]
        if known is not None:
            sys.modules[module.__name__] = known
        raise


def _value(text: str) -> Any:
    """A JSON value, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
