"""`concept_grid`: several images (prototypes) × concepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..checks import ArrayLike
from .maps import concept_names
from .style import Scale, as_pictures, colour_limits, draw_map, over_channels, pooled, share_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def concept_grid(
    images: ArrayLike,
    maps: ArrayLike,
    names: Sequence[str] | None = None,
    *,
    labels: Sequence[str] | None = None,
    whole: ArrayLike | None = None,
    title: str | None = None,
    pool: int = 1,
    scale: Scale = "one",
    overlay: bool = False,
) -> Figure:
    """Images × concepts, as in the paper's Fig. 1: one row for each image, one column for each concept.

    Meant for prototypes (Note E.2): a concept is what the red areas of its column have in common. Colours are
    comparable along a row, as in `concept_maps`; each image has a scale of its own.

    Parameters
    ----------
    images : array or tensor, shape (N, C, H, W)
        Values in [0, 1], C = 1 or 3.
    maps : array or tensor, shape (N, K, C, H, W) or (N, K, H, W)
        Their maps, as the adapters return them, or `Explanation.token_maps` (N, K, h, w).
    names : sequence of str, length K, optional
        Headings of the columns. Default "S1" … "SK".
    labels : sequence of str, length N, optional
        Labels of the rows, e.g. the predicted classes.
    whole : array or tensor, shape (N, C, H, W) or (N, H, W), optional
        Standard maps. Default: the sum of the maps.
    title, pool, scale, overlay
        As in `concept_maps`.

    Returns
    -------
    matplotlib.figure.Figure
    """
    from matplotlib.figure import Figure

    pictures = as_pictures(images, "images", 4)
    n_images, size = len(pictures), (int(pictures.shape[1]), int(pictures.shape[2]))
    concepts = over_channels(maps, "maps", (n_images, -1), size)
    headings = concept_names(names, concepts.shape[1])
    if labels is not None and len(labels) != n_images:
        raise ValueError(f"labels must be {n_images} strings, one for each image, got {len(labels)}")
    standard = (
        concepts.sum(1) if whole is None else over_channels(whole, "whole", (n_images,), size).to(concepts)
    )
    panels = torch.cat([standard[:, None], concepts], dim=1)
    shown = pooled(panels, pool)
    headings = ["standard map" if whole is not None else "sum of concepts", *headings]

    n_columns = panels.shape[1] + 1
    height = 1.75 * size[0] / size[1] + 0.22
    figure = Figure(
        figsize=(1.75 * n_columns + (0.25 if labels else 0), height * n_images + (0.6 if title else 0.25)),
        layout="constrained",
    )
    axes = figure.subplots(n_images, n_columns, squeeze=False)
    for n in range(n_images):
        totals = panels[n].double().sum((1, 2)).tolist()
        magnitude = sum(abs(total) for total in totals[1:])
        limits = colour_limits(shown[n], scale)
        axes[n, 0].imshow(pictures[n].numpy())
        if labels is not None:
            # Names of files are shown as they are: between two dollars, matplotlib would read formulas.
            axes[n, 0].set_ylabel(labels[n], fontsize=9, parse_math=False)
        for index, axis in enumerate(axes[n, 1:]):
            draw_map(axis, shown[n, index], limits[index], pictures[n] if overlay else None, size, pool)
            value = share_label(totals[index], totals[0], magnitude) if index else f"R = {totals[0]:.3g}"
            axis.set_xlabel(value, fontsize=8, labelpad=2)
    for axis, heading in zip(axes[0], ["input", *headings], strict=True):
        axis.set_title(heading, fontsize=10, parse_math=False)
    for axis in axes.ravel():
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set_color("0.85")
    if title:
        figure.suptitle(title, fontsize=11, parse_math=False)
    return figure
