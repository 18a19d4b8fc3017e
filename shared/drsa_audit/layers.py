"""The layers of a model with the shapes of their outputs, and which of them suits concepts."""

from __future__ import annotations

import difflib
import math
import warnings
from dataclasses import dataclass, replace

import torch
from drsa_core import Request, restored
from torch import Tensor, nn

from .networks import Network
from .progress import BadInput

#: Layers that are tried for paths around them; each costs a forward pass of one example, and a backward pass
#: if there is such a path.
MAX_TRIED = 20


@dataclass(frozen=True)
class LayerInfo:
    """One module of a model."""

    name: str
    kind: str
    shape: tuple[int, ...] | None  # of the output for one example; None if that is no tensor
    n_runs: int  # in a forward pass
    n_parameters: int  # in it and in all modules inside
    is_cut: bool | None = None  # whether the layers above see nothing else; None if it was not tried
    is_suggested: bool = False
    given_dim: int | None = None  # axis of the features where it is known

    @property
    def depth(self) -> int:
        """How many modules are around it, the model itself included."""
        return self.name.count(".") + 1 if self.name else 0

    @property
    def channel_dim(self) -> int:
        """Axis of the features in the output: −1 for tokens (T, D) and for (H, W, D), else 1.

        Inputs are squares, so that maps are squares as well: H = W tells their axes from that of the
        features.
        """
        if self.given_dim is not None:
            return self.given_dim
        shape = self.shape or ()
        is_channels_last = len(shape) == 3 and shape[0] == shape[1] != shape[2]
        return -1 if len(shape) == 2 or is_channels_last else 1

    @property
    def is_ambiguous(self) -> bool:
        """Whether `channel_dim` is a guess: D = H = W, or H and W that differ."""
        shape = self.shape or ()
        if self.given_dim is not None or len(shape) != 3:
            return False
        return (shape[0] == shape[1]) == (shape[1] == shape[2])

    @property
    def n_features(self) -> int:
        """Number D of features."""
        return (self.shape or (0,))[-1 if self.channel_dim == -1 else 0]

    @property
    def n_positions(self) -> int:
        """Number of positions that share the features."""
        return math.prod(self.shape or (0,)) // max(1, self.n_features)

    @property
    def n_prefix(self) -> int:
        """Class and register tokens: they stand for no place, and concepts are of places.

        Inputs are squares, so that the other tokens are as many as the largest square that fits.
        """
        if len(self.shape or ()) != 2:
            return 0
        n_prefix = self.n_positions - math.isqrt(self.n_positions) ** 2
        return n_prefix if n_prefix <= 16 else 0


def inspect_layers(model: nn.Module, example: Tensor, taken: str | None = None) -> list[LayerInfo]:
    """All modules in the order of their definition, with a suggestion.

    A layer suits concepts if it runs once, has at least eight features and four positions, if nothing goes
    around it, and if its positions are about 16 pixels apart: fine enough to point at a part of an object,
    high enough to know what it is. Of those, it is the last one that lies least deep in other modules. Among
    blocks of tokens, which all have the same positions, it lies at three quarters of the height.
    A layer that is taken in any case is the suggestion; to look for one takes a few passes.
    """
    found = _shapes(model, example)
    if taken:
        return [replace(info, is_suggested=info.name == taken) for info in found]
    tried: dict[str, bool] = {}
    for info in _by_preference([info for info in found if _suits(info)], example)[:MAX_TRIED]:
        tried[info.name] = is_cut(model, info.name, example)
        if tried[info.name]:
            break
    return [replace(i, is_cut=tried.get(i.name), is_suggested=tried.get(i.name) is True) for i in found]


def suggested_layer(layers: list[LayerInfo]) -> LayerInfo | None:
    """The layer to take if the user names none."""
    return next((info for info in layers if info.is_suggested), None)


def find_concept_layer(
    network: Network, layer: str | None, example: Tensor, channel_dim: int | None = None
) -> LayerInfo:
    """The named layer, the network's default one, or the suggested one; `channel_dim` if the user says it."""
    if channel_dim not in (None, 1, -1):
        raise BadInput(f"--channel-dim must be 1 or -1, got {channel_dim}")
    model, name = network.model, layer or network.layer
    layers = {info.name: info for info in inspect_layers(model, example, name) if info.name}
    if not name:
        found = suggested_layer(list(layers.values()))
        if found is None:
            raise BadInput("no layer of this model suits concepts by itself: name one with --layer")
        name = found.name
    if name not in layers:
        close = difflib.get_close_matches(name, layers, n=3, cutoff=0.5)
        near = f"did you mean {', '.join(map(repr, close))}?" if close else "see `drsa layers`"
        raise BadInput(f"the model has no layer {name!r}; {near}")
    info = replace(layers[name], given_dim=channel_dim)
    if info.n_runs != 1 or info.shape is None:
        why = "does not run" if not info.n_runs else f"runs {info.n_runs} times"
        why = "gives no single tensor" if info.n_runs == 1 else why
        raise BadInput(f"layer {name!r} {why} in a forward pass; choose another, see `drsa layers`")
    info = _with_axis(model, info, example)
    if info.is_ambiguous:
        shape = "×".join(map(str, info.shape or ()))
        raise BadInput(
            f"the output of layer {name!r}, {shape}, does not say which axis holds the features; give "
            "--channel-dim 1 if it is the first one, --channel-dim -1 if it is the last"
        )
    return replace(info, is_cut=is_cut(model, name, example)) if info.is_cut is None else info


def _with_axis(model: nn.Module, info: LayerInfo, example: Tensor) -> LayerInfo:
    """The layer with the axis of its features, if larger inputs tell it: those of positions grow."""
    if not info.is_ambiguous or info.shape is None:
        return info
    larger = nn.functional.interpolate(example, scale_factor=2)
    request = Request(model, model.get_submodule(info.name), info.name, (larger,), None)
    try:
        with warnings.catch_warnings(action="ignore"), restored(model), torch.no_grad():
            shape = request.activation().shape[1:]
    except Exception:  # of whatever kind: the layers below may take inputs of one size only
        return info
    grows = tuple(after > before for after, before in zip(shape, info.shape, strict=False))
    dims: dict[tuple[bool, ...], int] = {(False, True, True): 1, (True, True, False): -1}
    return replace(info, given_dim=dims.get(grows))


def as_tree(layers: list[LayerInfo], max_depth: int | None = 2) -> str:
    """The layers as indented lines, deeper ones left out; suggested ones are marked and always shown."""
    lines = []
    width = max((2 * i.depth + len(i.name.rpartition(".")[2]) for i in layers if i.name), default=0)
    for info in layers:
        if not info.name or (max_depth is not None and info.depth > max_depth and not info.is_suggested):
            continue
        label = "  " * (info.depth - 1) + (info.name if info.is_suggested else info.name.rpartition(".")[2])
        shape = "×".join(map(str, info.shape)) if info.shape else "–"
        mark = "   ← suggested" if info.is_suggested else ""
        around = "   (a path goes around it)" if info.is_cut is False else ""
        lines.append(f"{label:<{width}}  {info.kind:<22} {shape:<14}{mark}{around}".rstrip())
    return "\n".join(lines)


def is_cut(model: nn.Module, name: str, example: Tensor) -> bool:
    """Whether nothing of the input reaches the output if the layer's output is held constant."""
    layer, x = model.get_submodule(name), example.clone().requires_grad_()
    handle = layer.register_forward_hook(lambda module, args, output: output.detach())
    try:
        with torch.enable_grad():
            output = model(x.clone())
            if not output.requires_grad:
                return True
            (gradient,) = torch.autograd.grad(output.sum(), x, allow_unused=True)
            return gradient is None
    finally:
        handle.remove()


def _shapes(model: nn.Module, example: Tensor) -> list[LayerInfo]:
    outputs: dict[str, list[object]] = {name: [] for name, _ in model.named_modules()}
    handles = [
        module.register_forward_hook(lambda m, args, output, own=outputs[name]: own.append(output))
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            model(example.clone())
    finally:
        for handle in handles:
            handle.remove()
    return [
        LayerInfo(
            name,
            type(module).__name__,
            _shape(outputs[name], len(example)),
            len(outputs[name]),
            sum(p.numel() for p in module.parameters()),
        )
        for name, module in model.named_modules()
    ]


def _shape(outputs: list[object], n_examples: int) -> tuple[int, ...] | None:
    """The shape for one example; tokens or windows on the first axis are no activation of an example."""
    last = outputs[-1] if outputs else None
    fits = isinstance(last, Tensor) and last.ndim > 1 and len(last) == n_examples
    return tuple(last.shape[1:]) if fits else None  # type: ignore[attr-defined]


def _suits(info: LayerInfo) -> bool:
    shape = info.shape or ()
    has_axes = len(shape) in (2, 3) and bool(info.name)
    return has_axes and info.n_runs == 1 and info.n_features >= 8 and info.n_positions >= 4


def _by_preference(layers: list[LayerInfo], example: Tensor) -> list[LayerInfo]:
    """Layers that suit concepts, the best first, as `inspect_layers` says it."""
    maps = [info for info in layers if len(info.shape or ()) == 3]
    if layers and layers[-1] not in maps:  # what follows the patch embedding are tokens
        return _blocks(layers)
    n_pixels = example.shape[-1] * example.shape[-2]
    # Small pictures have small objects: no fewer than 8 × 8 positions.
    wanted = min(256.0, n_pixels / 64)

    def distance(info: LayerInfo) -> float:
        """How far the spacing of the positions is from 16 pixels, in powers of two, to a quarter."""
        return round(2 * abs(math.log2(n_pixels / info.n_positions / wanted))) / 4

    return sorted(maps, key=lambda info: (distance(info), info.depth, -layers.index(info)))


def _blocks(layers: list[LayerInfo]) -> list[LayerInfo]:
    """The longest row of numbered modules, from three quarters of its height outwards; if none, all."""
    rows: dict[str, list[LayerInfo]] = {}
    for info in layers:
        parent, _, number = info.name.rpartition(".")
        if number.isdigit():
            rows.setdefault(parent, []).append(info)
    if not rows:
        return layers[::-1]
    longest = max(rows.values(), key=len)
    best = round(0.75 * (len(longest) - 1))
    return sorted(longest, key=lambda info: abs(longest.index(info) - best))
