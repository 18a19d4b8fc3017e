"""Pictures as text that a page can hold: photographs, crops around a concept, maps over photographs."""

from __future__ import annotations

import base64
import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .charts import Colour

#: Side of the crops around a concept, as a part of the picture's side.
CROP = 0.4
#: Maps are shown at this many pixels a side, at most: finer ones are grain.
MAP_SIDE = 56


def jpeg(pixels: Tensor, side: int | None = None, quality: int = 85) -> str:
    """Pixels (3, H, W) in [0, 1] as a data URI, scaled to a side if one is given."""
    array = (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    image = Image.fromarray(array)
    if side is not None and image.size != (side, side):
        enlarges = side > image.width
        how = Image.Resampling.NEAREST if enlarges and image.width < 48 else Image.Resampling.LANCZOS
        image = image.resize((side, side), how)
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=quality, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def peak(relevance: Tensor) -> tuple[int, int]:
    """Row and column around which most of the positive relevance (H, W) lies."""
    height, width = relevance.shape
    window = max(1, round(CROP * min(height, width) / 2) | 1)
    positive = relevance.clamp(min=0)[None, None]
    sums = torch.nn.functional.avg_pool2d(positive, window, 1, window // 2, count_include_pad=True)[0, 0]
    place = int(sums.argmax())
    return place // width, place % width


def crop_box(relevance: Tensor) -> tuple[int, int, int]:
    """Top, left and side of the square around a map's peak, inside of the picture."""
    height, width = relevance.shape
    side = max(4, round(CROP * min(height, width)))
    row, column = peak(relevance)
    top = min(max(0, row - side // 2), height - side)
    left = min(max(0, column - side // 2), width - side)
    return top, left, side


def cropped(pixels: Tensor, relevance: Tensor) -> Tensor:
    """The square of a picture (3, H, W) around the peak of a map (H, W)."""
    top, left, side = crop_box(relevance)
    return pixels[:, top : top + side, left : left + side]


def over_photograph(pixels: Tensor, relevance: Tensor, limit: float, colour: Colour) -> Tensor:
    """A map (H, W) in a concept's colour over the photograph in grey; what counts against it is left out."""
    strength = (smooth(relevance).clamp(min=0) / limit).clamp(0, 1).sqrt()
    grey = 0.25 + 0.65 * pixels.mean(0, keepdim=True).expand(3, -1, -1)
    tint = torch.tensor(colour.rgb)[:, None, None] / 255
    return grey * (1 - 0.85 * strength) + tint * 0.85 * strength


def smooth(relevance: Tensor) -> Tensor:
    """A map at `MAP_SIDE` pixels a side at most, brought back to its size."""
    small = shrunk(relevance)
    return torch.nn.functional.interpolate(
        small[None, None], tuple(relevance.shape), mode="bilinear", align_corners=False
    )[0, 0]


def shrunk(relevance: Tensor) -> Tensor:
    """Means of (…, H, W) over squares, so that no side is longer than `MAP_SIDE`."""
    pool = max(1, -(-relevance.shape[-1] // MAP_SIDE))
    flat = relevance.reshape(-1, 1, *relevance.shape[-2:])
    small = torch.nn.functional.avg_pool2d(flat, pool, ceil_mode=True)
    return small.reshape(*relevance.shape[:-2], *small.shape[-2:])


def strength(maps: Tensor) -> float:
    """What counts as full colour: the 99.5 % quantile of |R| of the shrunk maps, or the largest."""
    values = shrunk(maps).abs().flatten()
    limit = float(np.quantile(values.numpy(), 0.995)) or float(values.max())
    return limit or 1.0


def packed(maps: Tensor, limit: float) -> str:
    """Maps (K, H, W) as signed bytes in base64: ±127 is ±limit."""
    values = (shrunk(maps) / limit * 127).clamp(-127, 127).round().to(torch.int8)
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()
