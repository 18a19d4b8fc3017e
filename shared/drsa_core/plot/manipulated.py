"""A manipulated map beside the original, and both through the eyes of PRCA (section 6.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checks import as_float_tensor, as_int, check_finite
from .style import colour_limits, draw_map, number, pooled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def manipulated_map(
    images: tuple[Tensor, Tensor, Tensor],
    target_map: Tensor,
    original: Tensor,
    manipulated: Tensor,
    pool: int = 1,
) -> Figure:
    """Original and manipulated image, each with its map, PRCA-1 and the residual; below, what was aimed at.

    Parameters
    ----------
    images : tuple of tensors, shape (C, H, W)
        Original, manipulated and target image, values in [0, 1].
    target_map : tensor, shape (H, W)
        Map of the target image that the manipulation aimed at.
    original, manipulated : tensor, shape (2, H, W)
        Maps of the first PRCA component and of the residual.
    pool : int
        Average over squares of so many pixels.
    """
    from matplotlib.figure import Figure

    for maps, name in ((original, "original"), (manipulated, "manipulated")):
        if maps.shape != (2, *target_map.shape):
            raise ValueError(
                f"{name} must have shape (2, H, W) = {(2, *target_map.shape)}, got {tuple(maps.shape)}"
            )
        check_finite(maps, name)
    check_finite(target_map, "target_map")
    # Half precision as float32: torch has no quantiles of it, and NumPy no bfloat16.
    original = as_float_tensor(original, "original").cpu()
    manipulated = as_float_tensor(manipulated, "manipulated").cpu()
    target_map = as_float_tensor(target_map, "target_map").cpu()
    if len(images) != 3:
        raise ValueError(f"images must be three: original, manipulated and target, got {len(images)}")
    pictures = []
    for image, name in zip(images, ("original", "manipulated", "target"), strict=True):
        check_finite(image, f"the {name} image")
        pictures.append(as_float_tensor(image, f"the {name} image").cpu())
    pool = as_int(pool, "pool", 1)

    figure = Figure(figsize=(9.2, 7.2), layout="constrained")
    axes = figure.subplots(3, 4)
    shown = [[maps.sum(0), maps[0], maps[1]] for maps in (original, manipulated)]
    parts = [[pooled(part, pool) for part in row] for row in (*shown, [target_map])]
    # One scale for all: a part can be compared with the whole.
    limit = colour_limits(torch.stack([part for row in parts for part in row]), "one")[0]
    titles = ("original", "manipulated", "target image")
    for row, (image, title) in enumerate(zip(pictures, titles, strict=True)):
        picture = image.clamp(0, 1).movedim(0, -1).squeeze(-1).numpy()
        axes[row, 0].imshow(picture, cmap="gray", vmin=0, vmax=1)
        axes[row, 0].set_title(title)
        for column, part in enumerate(parts[row], start=1):
            size = (int(target_map.shape[0]), int(target_map.shape[1]))
            draw_map(axes[row, column], part, limit, None, size, pool)
    for row, name in enumerate(("of the original", "of the manipulated")):
        for column, what in enumerate(("map", "PRCA-1", "residual"), start=1):
            axes[row, column].set_title(f"{what} {name}" if column == 1 else what)
    axes[2, 1].set_title("target map")
    difference = (pictures[1] - pictures[0]).abs().amax(0)
    axes[2, 2].imshow(difference.numpy(), cmap="gray_r", vmin=0, vmax=max(float(difference.max()), 1e-30))
    axes[2, 2].set_title(f"|change|, at most {number(float(difference.max()))}")
    for axis in axes.flat:
        axis.set_axis_off()
    return figure
