"""`concept_maps`: one image, its standard map, and one map for each concept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..checks import ArrayLike, as_int
from .style import Scale, as_pictures, colour_limits, draw_map, number, over_channels, pooled, share_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: A residual below this part of the standard map is rounding, and gets no panel.
_ROUNDING = 1e-3


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
        the concepts share one and the standard map has its own; "each" panel its own, which shows where weak
        concepts lie, but not that they are weak.
    overlay : bool
        Draw the maps on the photograph, in grey.
    residual : bool, optional
        Whether to draw the residual. Default: if `whole` is given and the maps do not add up to it.
    columns : int, optional
        Panels in a row. Default: all in one.

    Returns
    -------
    matplotlib.figure.Figure
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = None if columns is None else as_int(columns, "columns", 1)
    picture = as_pictures(image, "image", 3)
    size = (int(picture.shape[0]), int(picture.shape[1]))
    concepts = over_channels(maps, "maps", (-1,), size)
    n_concepts = len(concepts)
    labels = concept_names(names, n_concepts)
    standard = concepts.sum(0) if whole is None else over_channels(whole, "whole", (), size).to(concepts)
    rest = standard - concepts.sum(0)
    largest, off = float(standard.abs().max()), float(rest.abs().max())
    difference = off / largest if largest else (float("inf") if off else 0.0)
    if residual is None:
        residual = whole is not None and difference > _ROUNDING
    panels = torch.stack([standard, *concepts, *([rest] if residual else [])])
    labels = ["standard map" if whole is not None else "sum of concepts", *labels]
    labels += ["residual"] if residual else []
    totals = panels.double().sum((1, 2)).tolist()
    magnitude = sum(abs(total) for total in totals[1:])
    shown = pooled(panels, pool)
    limits = colour_limits(shown, scale)

    n_panels = 1 + len(panels)
    n_columns = n_panels if columns is None else max(2, min(columns, n_panels))
    n_rows = -(-n_panels // n_columns)
    width, height = 2.3, 2.3 * size[0] / size[1] + 0.62
    note = _sum_note(totals, n_concepts, difference, whole is not None)
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
        value = share_label(totals[index], totals[0], magnitude) if index else f"R = {totals[0]:.3g}"
        # Names and titles are shown as they are: between two dollars, matplotlib would read formulas.
        axis.set_title(f"{labels[index]}\n{value}", fontsize=10, parse_math=False)
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


def concept_names(names: Sequence[str] | None, n_concepts: int) -> list[str]:
    """The given names, or S1 … SK."""
    if names is None:
        return [f"S{k + 1}" for k in range(n_concepts)]
    if isinstance(names, str) or len(names) != n_concepts:
        got = repr(names) if isinstance(names, str) else len(names)
        raise ValueError(
            f"names must be {n_concepts} strings, one for each map, got {got}; maps with a residual need a "
            "name for it too"
        )
    return list(names)


def _sum_note(totals: list[float], n_concepts: int, difference: float, has_whole: bool) -> str:
    sum_of_concepts = sum(totals[1 : n_concepts + 1])
    if not has_whole:
        return f"Σ R_k = {sum_of_concepts:.4g}"
    return (
        f"Σ R_k = {sum_of_concepts:.4g}, standard map {totals[0]:.4g}; largest difference at a pixel "
        f"{number(difference)} of the standard map's maximum"
    )
