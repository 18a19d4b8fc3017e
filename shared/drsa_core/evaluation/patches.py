"""Which patches are removed, and when (sections 5.1 and 5.2)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..checks import as_int, check_finite
from ..token_maps import covers, spread

#: Patches flipped at step τ = 1, 2, …, by name of the schedule.
SCHEDULES = {
    "squares": lambda step: step**2,
    "square totals": lambda step: 2 * step - 1,  # τ² = 1 + 3 + … + (2τ − 1)
    "single": lambda step: 1,
}


def check_maps(maps: Tensor, inputs: Tensor | None = None, n_subspaces: int | None = None) -> Tensor:
    """Return maps of shape (N, K, C, H, W), finite; maps (N, C, H, W) become those of K = 1.

    Parameters
    ----------
    maps : tensor, shape (N, K, C, H, W), or (N, C, H, W) or (N, K, h, w) with `inputs`
        Relevance R_pk, or that of one standard explanation, which has the shape of the inputs. C may be 1:
        relevance summed over channels. Maps of fewer positions than pixels (`Explanation.token_maps`) are
        spread over the inputs. Without `inputs`, whether the second of four axes holds concepts or channels
        cannot be known, and is refused unless its length is 1.
    inputs : tensor, shape (N, C, H, W), optional
        The images that the maps explain.
    n_subspaces : int, optional
        The K that is expected.
    """
    if not isinstance(maps, Tensor):
        raise TypeError(f"maps must be a torch tensor, got {type(maps).__name__}")
    if maps.ndim == 4:
        maps = _with_five_axes(maps, inputs)
    if maps.ndim != 5 or 0 in maps.shape:
        raise ValueError(
            "maps must have shape (N, K, C, H, W), or (N, C, H, W) for K = 1, none of them 0, got "
            f"{tuple(maps.shape)}"
        )
    if inputs is not None and (
        (len(maps), *maps.shape[3:]) != (len(inputs), *inputs.shape[2:])
        or maps.shape[2] not in (1, inputs.shape[1])
    ):
        raise ValueError(
            f"maps must have shape (N, K, C, H, W) with the (N, C, H, W) = {tuple(inputs.shape)} of the "
            f"inputs, got {tuple(maps.shape)}"
        )
    if maps.is_complex() or maps.dtype == torch.bool:
        raise TypeError(f"maps must be real numbers, got {maps.dtype}")
    if n_subspaces is not None and maps.shape[1] != n_subspaces:
        raise ValueError(f"expected maps of K = {n_subspaces} concepts, got K = {maps.shape[1]}")
    check_finite(maps, "maps (relevance)")
    return maps.detach()


def _with_five_axes(maps: Tensor, inputs: Tensor | None) -> Tensor:
    """Maps (N, K, h, w) or (N, C, H, W) as (N, K, C, H, W)."""
    if inputs is not None:
        size = (int(inputs.shape[2]), int(inputs.shape[3]))
        if covers(maps, size):
            return spread(maps, size)[:, :, None]
    n = int(maps.shape[1])
    # One map of one channel is the same in both readings.
    if n > 1 and (inputs is None or maps.shape[1:] != inputs.shape[1:]):
        raise ValueError(
            f"maps must have shape (N, K, C, H, W), got {tuple(maps.shape)}: give maps[:, None] for one map "
            f"of C = {n} channels, maps[:, :, None] for K = {n} maps without channels (such as token_maps)"
        )
    return maps[:, None]


def patch_grid(height: int, width: int, patch_size: int) -> Tensor:
    """Number of the patch that each pixel belongs to, counted row by row, shape (H, W).

    If the patch size does not divide the image, the patches at the right and lower edge are smaller, and a
    warning says so.
    """
    height, width = as_int(height, "height", 1), as_int(width, "width", 1)
    size = as_int(patch_size, "patch_size", 1)
    if size > min(height, width):
        raise ValueError(f"patch_size must be at most the image's {height} × {width}, got {size}")
    if height % size or width % size:
        warnings.warn(
            f"patches of {size} × {size} do not divide an image of {height} × {width}: those at the right "
            "and lower edge are smaller",
            stacklevel=3,
        )
    rows, columns = torch.arange(height) // size, torch.arange(width) // size
    return rows[:, None] * (int(columns[-1]) + 1) + columns


def patch_relevance(maps: Tensor, grid: Tensor) -> Tensor:
    """Relevance of each patch, summed over its pixels and all channels, shape (N, K, P).

    Parameters
    ----------
    maps : tensor, shape (N, K, C, H, W)
    grid : tensor of int, shape (H, W)
        From `patch_grid`.
    """
    maps = check_maps(maps)
    if grid.shape != maps.shape[3:] or grid.is_floating_point():
        raise ValueError(
            f"grid must be integers of shape (H, W) = {tuple(maps.shape[3:])}, as from patch_grid, got "
            f"{grid.dtype} of shape {tuple(grid.shape)}"
        )
    # In float64, so that ties between patches of equal relevance do not depend on the order of addition.
    pixels = maps.double().sum(2).flatten(2)
    sums = pixels.new_zeros(*pixels.shape[:2], int(grid.max()) + 1)
    return sums.index_add_(2, grid.flatten().to(pixels.device), pixels)


def removal_ranks(relevance: Tensor) -> Tensor:
    """When each patch is removed, counted from 0 for the most relevant, shape (N, P).

    With K concepts, patch flipping runs once for each of them in parallel, and after every step the union of
    what they removed is gone (section 5.2): a patch goes with the first concept that removes it. Patches of
    equal relevance go in the order of their numbers.

    Parameters
    ----------
    relevance : tensor, shape (N, K, P)
    """
    if relevance.ndim != 3 or 0 in relevance.shape:
        raise ValueError(f"relevance must have shape (N, K, P), got {tuple(relevance.shape)}")
    check_finite(relevance, "relevance")  # NaN would be sorted to the front
    order = relevance.argsort(dim=2, descending=True, stable=True)
    ranks = torch.empty_like(order)
    ranks.scatter_(2, order, torch.arange(order.shape[2], device=order.device).expand_as(order))
    return ranks.amin(1)


def removal_counts(n_patches: int, schedule: str | Sequence[int] = "squares") -> list[int]:
    """How many patches each concept has removed after step 0, 1, …, T; the last is all of them.

    Parameters
    ----------
    n_patches : int
    schedule : {"squares", "square totals", "single"} or sequence of int
        "squares": step τ removes τ² patches, 1, 5, 14, 30, … in all. "square totals": after step τ it is τ²,
        1, 4, 9, … in all; the paper's sentence "we flip τ² such patches at each step" can be read either way.
        "single": one patch per step. A sequence gives the totals after each step itself.
    """
    n_patches = as_int(n_patches, "n_patches", 1)
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ValueError(
                f"schedule must be one of {', '.join(SCHEDULES)} or a sequence, got {schedule!r}"
            )
        counts = [0]
        while counts[-1] < n_patches:
            counts.append(min(n_patches, counts[-1] + SCHEDULES[schedule](len(counts))))
        return counts
    counts = [0, *(as_int(count, "every entry of schedule") for count in schedule)]
    if len(counts) < 2 or counts[-1] != n_patches or any(b <= a for a, b in pairwise(counts)):
        raise ValueError(
            f"schedule must be increasing numbers of removed patches that end with all {n_patches}, got "
            f"{list(schedule)}"
        )
    return counts
