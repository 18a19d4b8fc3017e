"""From tokens to pictures: relevance at the positions of a layer, arranged as the image that they cover."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .checks import HALF, as_int

#: More tokens than this before those of the image are no prefix, but a sign that the grid is wrong.
_MAX_PREFIX = 16


@dataclass(frozen=True)
class TokenLayout:
    """Where the tokens of a layer lie in the image.

    Attributes
    ----------
    n_prefix : int
        Tokens before those of the image: class token, registers.
    grid : pair of int
        Rows and columns of the tokens of the image.
    """

    n_prefix: int
    grid: tuple[int, int]


@dataclass(frozen=True)
class TokenMaps:
    """Relevance R_k of each position of a layer, as pictures, and that of tokens which lie nowhere.

    Attributes
    ----------
    maps : tensor, shape (N, K, h, w)
        R_k at each position.
    prefix : tensor, shape (N, K, n_prefix)
        R_k of the tokens that were dropped: class token, registers.
    """

    maps: Tensor
    prefix: Tensor

    @property
    def n_prefix(self) -> int:
        """Number of tokens that were dropped."""
        return int(self.prefix.shape[2])

    @property
    def prefix_share(self) -> float:
        """Share of Σ|R_k| over all positions that sits on the tokens that were dropped."""
        dropped = self.prefix.double().abs().sum()
        total = dropped + self.maps.double().abs().sum()
        return float(dropped / total) if total > 0 else 0.0

    def over(self, size: tuple[int, int]) -> Tensor:
        """The maps over images of `size` (H, W), shape (N, K, H, W): values are shared out among pixels."""
        return spread(self.maps, size)

    def __str__(self) -> str:
        h, w = self.maps.shape[2:]
        return (
            f"{h} × {w} positions; {self.n_prefix} tokens before them dropped, which carry "
            f"{self.prefix_share:.1%} of the absolute relevance"
        )


def find_layout(model: nn.Module | None, inputs: Any, n_positions: int) -> TokenLayout | None:
    """Where `n_positions` tokens lie in the input images; None if that cannot be known.

    A timm or open_clip model says it. Otherwise it is the largest grid of the shape of the images (N, C, H,
    W), the rest being the prefix.
    """
    is_image = isinstance(inputs, Tensor) and inputs.ndim == 4
    size = (int(inputs.shape[2]), int(inputs.shape[3])) if is_image else None
    for module in () if model is None else model.modules():
        for known in _known_layouts(module, size):
            if known.n_prefix + math.prod(known.grid) == n_positions:
                return known
    if size is None:
        return None
    rows, columns = (side // math.gcd(*size) for side in size)
    times = math.isqrt(n_positions // (rows * columns))
    n_prefix = n_positions - rows * columns * times**2
    return (
        TokenLayout(n_prefix, (rows * times, columns * times)) if times and n_prefix <= _MAX_PREFIX else None
    )


def _known_layouts(module: nn.Module, size: tuple[int, int] | None) -> Iterator[TokenLayout]:
    """What a module says for images of `size` (H, W), and what it says for those that it was made for."""
    embed = getattr(module, "patch_embed", None)  # timm
    grids, n_prefix = [getattr(embed, "grid_size", None)], getattr(module, "num_prefix_tokens", None)
    if grids[0] is None and getattr(module, "class_embedding", None) is not None:  # open_clip
        grids, n_prefix = [getattr(module, "grid_size", None)], 1
    if size is not None and getattr(embed, "strict_img_size", True) is False:
        # Images of any size, whose tokens may be as many as those of another shape: 7 · 28 = 14 · 14.
        of_size = getattr(embed, "dynamic_feat_size", None)
        grids.insert(0, None if of_size is None else of_size(size))
    for grid in grids:
        if isinstance(grid, tuple | list) and len(grid) == 2 and isinstance(n_prefix, int):
            yield TokenLayout(n_prefix, (int(grid[0]), int(grid[1])))


def arrange(
    relevance: Tensor,
    layout: TokenLayout | None = None,
    n_prefix: int | None = None,
    grid: tuple[int, int] | None = None,
) -> TokenMaps:
    """Relevance (N, K, T) or (N, K, h, w) of positions as pictures.

    `n_prefix` and `grid` override the layout; one of them is enough if the rest is a square.
    """
    if relevance.ndim == 4 and n_prefix is None and grid is None:  # of a convolution
        return TokenMaps(relevance, relevance.new_zeros(*relevance.shape[:2], 0))
    if relevance.ndim != 3:
        raise ValueError(
            "relevance of positions must have shape (N, K, T), or (N, K, h, w) without n_prefix and grid, "
            f"got {tuple(relevance.shape)}; a layer of vectors (N, D) has no positions"
        )
    n_tokens = int(relevance.shape[2])
    if grid is not None:
        rows, columns = (as_int(side, "grid", 1) for side in grid)
        n_prefix = n_tokens - rows * columns if n_prefix is None else as_int(n_prefix, "n_prefix", 0)
    elif n_prefix is not None:
        n_prefix = as_int(n_prefix, "n_prefix", 0)
        rows = columns = math.isqrt(max(n_tokens - n_prefix, 0))
    elif layout is not None:
        n_prefix, (rows, columns) = layout.n_prefix, layout.grid
    else:
        raise ValueError(
            f"the {n_tokens} positions of the layer form no picture that is known: neither does the model "
            "say so (num_prefix_tokens, patch_embed.grid_size), nor do they cover an input image. Give "
            "n_prefix and grid=(h, w), or use position_relevance as it is, e.g. for text"
        )
    if n_prefix < 0 or rows < 1 or n_prefix + rows * columns != n_tokens:
        raise ValueError(
            f"{n_prefix} tokens and a grid of {rows} × {columns} are not the {n_tokens} positions of the "
            "layer; give n_prefix and grid=(h, w) with n_prefix + h · w of them"
        )
    pictures = relevance[:, :, n_prefix:].reshape(*relevance.shape[:2], rows, columns)
    return TokenMaps(pictures, relevance[:, :, :n_prefix])


def covers(maps: Tensor, size: tuple[int, int]) -> bool:
    """Whether maps (…, h, w) have fewer positions along both axes than an image of `size` has pixels."""
    return all(1 <= cells < pixels for cells, pixels in zip(maps.shape[-2:], size, strict=True))


def spread(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Maps (…, h, w) over an image of `size` (H, W): each value is shared out evenly among its pixels.

    So that totals stay what they are. A pixel belongs to the position that its centre lies in. In float32 for
    half precision: a share of 1e-5 / 256 is zero in float16.
    """
    result = maps.float() if maps.dtype in HALF else maps
    for axis, length in ((-2, int(size[0])), (-1, int(size[1]))):
        n_cells = int(maps.shape[axis])
        if not 1 <= n_cells <= length:
            raise ValueError(f"maps of {tuple(maps.shape[-2:])} positions cannot cover {tuple(size)} pixels")
        cells = ((torch.arange(length) + 0.5) * n_cells / length).long().to(maps.device)
        n_pixels = torch.bincount(cells, minlength=n_cells)[cells].to(result)
        result = result.index_select(axis, cells) / (n_pixels[:, None] if axis == -2 else n_pixels)
    return result
