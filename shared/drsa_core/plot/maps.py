"""Heatmaps: `concept_maps` of one image, `concept_grid` of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from ..checks import ArrayLike, as_float_tensor, as_int, check_finite
from ..token_maps import covers, spread
from .style import concept_names, number, share_label

#: Red counts for the prediction, blue against it, white is zero.
COLOURS = "seismic"
#: A residual below this part of the standard map is rounding, and gets no panel.
ROUNDING = 1e-3

Scale: TypeAlias = Literal["one", "concepts", "each"]


def concept_maps(
    image: ArrayLike,
    maps: ArrayLike,
    names: Sequence[str] | None = None,
    *,
    whole: ArrayLike | None = None,
    title: str | None = None,
    pool: int = 1,
    scale: Scale = "one",
    overlay: bool = False,
    residual: bool | None = None,
    columns: int | None = None,
) -> Figure:
    """An image, its standard map R_p, the K concept maps R_pk and the residual R_p − Σ_k R_pk.

    Red counts for the prediction, blue against it. Each panel is headed by its total relevance R_k and its
    share of the whole; the line below says whether the parts add up.

    Parameters
    ----------
    image : array or tensor, shape (C, H, W)
        Values in [0, 1], C = 1 or 3.
    maps : array or tensor, shape (K, C, H, W) or (K, H, W)
        Maps of one image, e.g. `attribute(x)[0]`. Maps (K, h, w) of fewer positions than pixels, e.g.
        `explain(x).token_maps[0]`, are spread over the image.
    names : sequence of str, optional
        Names of the concepts. Default "S1" … "SK".
    whole : array or tensor, shape (C, H, W) or (H, W), optional
        The standard map, from the attributor without concepts. Default: the sum of the maps, which it is for
        LRP and Gradient × Input with complete subspaces.
    title : str, optional
        What a reader must know to judge the figure: model, class, layer, method.
    pool : int
        Average over squares of so many pixels, which calms the grain of pixel-wise maps.
    scale : {"one", "concepts", "each"}
        "one" symmetric colour scale for all panels, so that colours can be compared across them; "concepts":
        the concepts share one and the standard map has another; "each" panel has one, which shows where weak
        concepts lie, but not that they are weak.
    overlay : bool
        Draw the maps on the image, in grey.
    residual : bool, optional
        Whether to draw the residual. Default: if `whole` is given and the maps do not add up to it.
    columns : int, optional
        Panels in a row. Default: all in one.
    """
    picture = _pictures(image, "image", 3)
    size = (int(picture.shape[0]), int(picture.shape[1]))
    concepts = _over_channels(maps, "maps", (-1,), size)
    labels = concept_names(names, len(concepts))
    total = concepts.sum(0)
    standard = total if whole is None else _over_channels(whole, "whole", (), size).to(concepts)
    rest = standard - total
    largest, off = float(standard.abs().max()), float(rest.abs().max())
    difference = off / largest if largest else (float("inf") if off else 0.0)
    if residual is None:
        residual = whole is not None and difference > ROUNDING
    panels = torch.stack([standard, *concepts, *([rest] if residual else [])])
    labels = ["standard map" if whole is not None else "sum of concepts", *labels, "residual"]
    values = _labels(panels)
    shown = pooled(panels, pool)
    limits = colour_limits(shown, scale)
    note = f"Σ R_k = {float(total.double().sum()):.4g}"
    if whole is not None:
        note += (
            f", standard map {float(standard.double().sum()):.4g}; largest difference at a pixel "
            f"{number(difference)} of the standard map's maximum"
        )

    n_panels = 1 + len(panels)
    n_columns = n_panels if columns is None else max(2, min(as_int(columns, "columns", 1), n_panels))
    n_rows = -(-n_panels // n_columns)
    width, height = 2.3, 2.3 * size[0] / size[1] + 0.62
    figure = Figure(
        figsize=(width * n_columns + 0.9, height * n_rows + (0.55 if title else 0.35)),
        layout=ConstrainedLayoutEngine(h_pad=0.05),
    )
    axes = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    axes[0].imshow(picture.numpy())
    axes[0].set_title("input", fontsize=10)
    for index, axis in enumerate(axes[1:n_panels]):
        drawn = draw_map(axis, shown[index], limits[index], picture if overlay else None, size, pool)
        # Names and titles are shown as given: between two dollars, matplotlib would read formulas.
        axis.set_title(f"{labels[index]}\n{values[index]}", fontsize=10, parse_math=False)
    if scale != "each":  # the scale of the last panel is that of the concepts
        bar = figure.colorbar(drawn, ax=axes.tolist(), fraction=0.02, pad=0.01, aspect=25)
        limit = limits[-1]
        bar.set_ticks([-limit, 0, limit], labels=[f"−{number(limit)}\nagainst", "0", f"{number(limit)}\nfor"])
        bar.set_label("relevance per pixel", fontsize=8)
        bar.ax.tick_params(labelsize=8)
    if title:
        figure.suptitle(title, fontsize=11, parse_math=False)
    figure.supxlabel(note, fontsize=8.5, color="0.35")
    return figure


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
    comparable along a row, as in `concept_maps`; each row has a scale.

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
    """
    pictures = _pictures(images, "images", 4)
    n_images, size = len(pictures), (int(pictures.shape[1]), int(pictures.shape[2]))
    concepts = _over_channels(maps, "maps", (n_images, -1), size)
    headings = concept_names(names, concepts.shape[1])
    if labels is not None and len(labels) != n_images:
        raise ValueError(f"labels must be {n_images} strings, one for each image, got {len(labels)}")
    standard = concepts.sum(1)
    if whole is not None:
        standard = _over_channels(whole, "whole", (n_images,), size).to(concepts)
    panels = torch.cat([standard[:, None], concepts], dim=1)
    shown = pooled(panels, pool)
    headings = ["input", "standard map" if whole is not None else "sum of concepts", *headings]

    width = 1.75 * len(headings) + (0.25 if labels else 0)
    height = (1.75 * size[0] / size[1] + 0.22) * n_images + (0.6 if title else 0.25)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(n_images, len(headings), squeeze=False)
    for n, row in enumerate(axes):
        limits, values = colour_limits(shown[n], scale), _labels(panels[n])
        row[0].imshow(pictures[n].numpy())
        if labels is not None:
            row[0].set_ylabel(labels[n], fontsize=9, parse_math=False)
        for index, axis in enumerate(row[1:]):
            draw_map(axis, shown[n, index], limits[index], pictures[n] if overlay else None, size, pool)
            axis.set_xlabel(values[index], fontsize=8, labelpad=2)
    for axis, heading in zip(axes[0], headings, strict=True):
        axis.set_title(heading, fontsize=10, parse_math=False)
    for axis in axes.ravel():
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set_color("0.85")
    if title:
        figure.suptitle(title, fontsize=11, parse_math=False)
    return figure


def pooled(relevance: Tensor, pool: int) -> Tensor:
    """Means over squares of `pool` × `pool` pixels of (…, H, W); squares at the edge may be smaller."""
    pool = as_int(pool, "pool", 1)
    flat = relevance.reshape(-1, 1, *relevance.shape[-2:])
    means = torch.nn.functional.avg_pool2d(flat, pool, ceil_mode=True)
    return means.reshape(*relevance.shape[:-2], *means.shape[-2:])


def colour_limits(shown: Tensor, scale: Scale) -> list[float]:
    """Colour limits ± of panels (P, H, W), of which the first is the standard map.

    The limit is the 99.5 % quantile of |R| of the strongest panel: a few extreme pixels would otherwise wash
    out all others.
    """
    strengths = shown.abs().flatten(1).quantile(0.995, dim=1)
    # A map that is zero almost everywhere still has a largest pixel.
    strengths = torch.where(strengths > 0, strengths, shown.abs().flatten(1).amax(1))
    strengths = torch.where(strengths > 0, strengths, 1)  # all zero: any limit will do
    if scale == "one":
        return [float(strengths.max())] * len(shown)
    if scale == "concepts":
        return [float(strengths[0])] + [float(strengths[1:].max())] * (len(shown) - 1)
    if scale == "each":
        return strengths.tolist()
    raise ValueError(f"scale must be 'one', 'concepts' or 'each', got {scale!r}")


def draw_map(
    axis: Axes, relevance: Tensor, limit: float, picture: Tensor | None, size: tuple[int, int], pool: int = 1
) -> AxesImage:
    """One panel of relevance (h, w) over the picture's area; on the picture itself, in grey, if there is one.

    Every value stands for a square of `pool` × `pool` pixels; those at the edge may reach beyond it, and are
    cut off there. On a picture, weak relevance lets it through: opacity is √(|R| / limit).
    """
    extent = (-0.5, size[1] - 0.5, size[0] - 0.5, -0.5)
    alpha = None
    if picture is not None:
        axis.imshow(picture.mean(-1).numpy(), cmap="gray", vmin=-0.6, vmax=1.2, extent=extent)
        alpha = (relevance.abs() / limit).clamp(0, 1).sqrt().numpy()
    height, width = (pool * n for n in relevance.shape)
    drawn = axis.imshow(
        relevance.numpy(),
        cmap=COLOURS,
        vmin=-limit,
        vmax=limit,
        alpha=alpha,
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
    )
    axis.set(xlim=extent[:2], ylim=extent[2:])
    return drawn


def _labels(panels: Tensor) -> list[str]:
    """R of the standard map, then R of each other panel with its share."""
    whole, *parts = panels.double().sum((1, 2)).tolist()
    magnitude = sum(abs(part) for part in parts)
    return [f"R = {whole:.3g}", *(share_label(part, whole, magnitude) for part in parts)]


def _pictures(images: ArrayLike, name: str, n_dims: int) -> Tensor:
    """Images with values in [0, 1], shape (…, C, H, W), as (…, H, W, C) with three channels."""
    pictures = as_float_tensor(images, name).cpu()
    if pictures.ndim != n_dims or pictures.shape[-3] not in (1, 3):
        shape = "(C, H, W)" if n_dims == 3 else "(N, C, H, W)"
        raise ValueError(f"{name} must have shape {shape} with C = 1 or 3, got {tuple(pictures.shape)}")
    low, high = float(pictures.min()), float(pictures.max())
    if not (low >= -0.01 and high <= 1.01):
        raise ValueError(
            f"{name} must have values between 0 and 1 to be shown, got {low:.3g} … {high:.3g}; undo the "
            "normalisation of the model's input first, e.g. images * std + mean"
        )
    return pictures.clamp(0, 1).expand(*pictures.shape[:-3], 3, -1, -1).movedim(-3, -1)


def _over_channels(maps: ArrayLike, name: str, leading: tuple[int, ...], size: tuple[int, int]) -> Tensor:
    """Relevance summed over colour channels, (*leading, C, H, W) → (*leading, H, W); a −1 fits any length.

    Maps (*leading, h, w) of fewer positions than pixels, such as `Explanation.token_maps`, are spread over
    the image.
    """
    relevance = as_float_tensor(maps, name).cpu()
    n_leading = len(leading)
    if relevance.ndim == n_leading + 2 and covers(relevance, size):
        relevance = spread(relevance, size)
    fits = (
        relevance.ndim in (n_leading + 2, n_leading + 3)
        and tuple(relevance.shape[-2:]) == size
        and all(want in (-1, got) for want, got in zip(leading, relevance.shape, strict=False))
        and relevance.numel() > 0
    )
    if not fits:
        lead = "".join(f"{'K' if n == -1 else n}, " for n in leading)
        raise ValueError(
            f"{name} must have shape ({lead}C, {size[0]}, {size[1]}) or ({lead}{size[0]}, {size[1]}), as the "
            f"image has, or ({lead}h, w) with fewer positions, got {tuple(relevance.shape)}"
        )
    check_finite(relevance, name)
    return relevance.sum(-3) if relevance.ndim == n_leading + 3 else relevance
