"""Maps of several methods beside the planted concepts that they should show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checks import as_float_tensor, check_finite
from .style import colour_limits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def known_concepts(image: Tensor, masks: Tensor, maps: Mapping[str, Tensor], names: Sequence[str]) -> Figure:
    """One image: its planted concepts in the first row, and below, for each method, the maps matched to them.

    Each map has its own symmetric scale (red for, blue against the class), the outline of the mask that it
    should fill, and above it the share of its positive relevance that lies inside.

    Parameters
    ----------
    image : tensor, shape (1, H, W)
    masks : tensor of bool, shape (M, H, W)
    maps : mapping of str to tensor, shape (M, H, W)
        For each method the map assigned to each concept, see `showcases.synthetic.match_masks`; zeros for a
        concept to which no map was assigned.
    names : sequence of str
        Names of the M concepts.
    """
    from matplotlib.figure import Figure

    if image.ndim != 3 or len(image) != 1 or masks.shape[1:] != image.shape[1:] or not maps:
        raise ValueError(
            "image must have shape (1, H, W), masks (M, H, W), and there must be maps; "
            f"got {tuple(image.shape)}, {tuple(masks.shape)} and maps of {list(maps)}"
        )
    if len(names) != len(masks):
        raise ValueError(f"names must be {len(masks)} strings, one for each mask, got {len(names)}")
    check_finite(image, "image")
    for method, parts in maps.items():
        if parts.shape != masks.shape:
            raise ValueError(
                f"maps of {method} must have shape {tuple(masks.shape)}, got {tuple(parts.shape)}"
            )
        check_finite(parts, f"maps of {method}")

    n_rows, n_columns = 1 + len(maps), 1 + len(masks)
    figure = Figure(figsize=(1.55 * n_columns, 1.75 * n_rows), layout="constrained")
    axes = figure.subplots(n_rows, n_columns, squeeze=False)
    picture = image[0].detach().cpu().float().numpy()
    for column, axis in enumerate(axes[0]):
        axis.imshow(picture, cmap="gray")
        axis.set_title("image" if column == 0 else names[column - 1], fontsize=10)
        if column:
            _outline(axis, masks[column - 1], "gold")
    for row, (method, parts) in zip(axes[1:], maps.items(), strict=True):
        row[0].text(0.5, 0.5, method, ha="center", va="center", fontsize=11, transform=row[0].transAxes)
        parts = as_float_tensor(parts, f"maps of {method}").cpu()
        for axis, part, mask in zip(row[1:], parts, masks.cpu(), strict=True):
            (limit,) = colour_limits(part[None], "each")
            axis.imshow(part.numpy(), cmap="seismic", vmin=-limit, vmax=limit)
            _outline(axis, mask, "black")
            positive = part.clamp(min=0)
            total = float(positive.sum())
            axis.set_title(f"{float(positive[mask].sum()) / total:.2f}" if total > 0 else "none", fontsize=9)
    for axis in axes.flat:
        axis.set_axis_off()
    return figure


def _outline(axis: Axes, mask: Tensor, colour: str) -> None:
    """The edge of a mask, along the borders of pixels."""
    padded = torch.nn.functional.pad(mask.cpu().float(), (1, 1, 1, 1))
    fine = padded.repeat_interleave(8, 0).repeat_interleave(8, 1)
    n_rows, n_columns = padded.shape
    extent = (-1.5, n_columns - 1.5, -1.5, n_rows - 1.5)
    axis.contour(fine.numpy(), levels=[0.5], colors=[colour], linewidths=1.2, extent=extent)
