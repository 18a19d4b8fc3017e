"""Figures. Functions return matplotlib figures and never show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..validation import check_finite

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def concept_maps(image: Tensor, maps: Tensor, names: Sequence[str] | None = None, pool: int = 1) -> Figure:
    """An image, its standard map Σ_k R_pk and the K concept maps R_pk, side by side.

    Red speaks for the prediction, blue against it. All concepts share one symmetric scale, so that strong and
    weak ones can be compared; each panel is headed by its total relevance and its share of the whole.

    Parameters
    ----------
    image : tensor, shape (C, H, W)
        Values in [0, 1], C = 1 or 3.
    maps : tensor, shape (K, C, H, W)
        Maps of one image, e.g. `attribute(x)[0]`.
    names : sequence of str, optional
        Titles of the concepts. Default "S1" … "SK".
    pool : int
        Average over squares of so many pixels, which calms the grain of pixel-wise maps.

    Returns
    -------
    matplotlib.figure.Figure
    """
    from matplotlib.figure import Figure

    if maps.ndim != 4 or maps.shape[1:] != image.shape:
        raise ValueError(
            f"maps must have shape (K, C, H, W) with the image's (C, H, W) = {tuple(image.shape)}, "
            f"got {tuple(maps.shape)}"
        )
    if names is not None and len(names) != len(maps):
        raise ValueError(f"names must be {len(maps)} strings, one for each map, got {len(names)}")
    check_finite(maps, "maps")
    maps = maps.detach().cpu().sum(1)
    totals = maps.sum((1, 2))
    whole = maps.sum(0, keepdim=True)
    shown = torch.nn.functional.avg_pool2d(torch.cat([whole, maps])[:, None], pool)[:, 0]
    # A few extreme pixels would wash out all others.
    limits = [float(m.abs().flatten().quantile(0.995)) for m in shown]
    concept_limit = max(max(limits[1:]), 1e-30)

    n_panels = 2 + len(maps)
    figure = Figure(figsize=(2.4 * n_panels, 2.9), layout="constrained")
    axes = figure.subplots(1, n_panels)
    axes[0].imshow(image.detach().cpu().clamp(0, 1).movedim(0, -1).squeeze(-1).numpy(), cmap="gray")
    axes[0].set_title("input")
    titles = [f"all\nR = {float(totals.sum()):.3g}"]
    for k, total in enumerate(totals.tolist()):
        share = f" ({100 * total / float(totals.sum()):.0f} %)" if float(totals.sum()) != 0 else ""
        titles.append(f"{names[k] if names else f'S{k + 1}'}\nR = {total:.3g}{share}")
    for panel, (axis, title) in enumerate(zip(axes[1:], titles, strict=True)):
        limit = concept_limit if panel else max(limits[0], 1e-30)
        axis.imshow(shown[panel].numpy(), cmap="seismic", vmin=-limit, vmax=limit)
        axis.set_title(title)
    for axis in axes:
        axis.set_axis_off()
    return figure
