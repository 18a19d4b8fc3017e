"""What all heatmaps share: one diverging colour map, one symmetric scale, labels with R and its share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from ..checks import ArrayLike, as_float_tensor, as_int, check_finite
from ..token_maps import covers, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

#: Red counts for the prediction, blue against it, white is zero.
COLOURS = "seismic"
#: The same two colours for bars and lines.
FOR, AGAINST = "#c8102e", "#1f4ea1"

Scale: TypeAlias = Literal["one", "concepts", "each"]


def as_pictures(images: ArrayLike, name: str, n_dims: int) -> Tensor:
    """Images with values in [0, 1], shape (…, C, H, W), as (…, H, W, C) with three channels."""
    pictures = as_float_tensor(images, name).cpu()
    if pictures.ndim != n_dims or pictures.shape[-3] not in (1, 3):
        shape = "(C, H, W)" if n_dims == 3 else "(N, C, H, W)"
        raise ValueError(f"{name} must have shape {shape} with C = 1 or 3, got {tuple(pictures.shape)}")
    check_finite(pictures, name)
    low, high = float(pictures.min()), float(pictures.max())
    if low < -0.01 or high > 1.01:
        raise ValueError(
            f"{name} must have values between 0 and 1 to be shown, got {low:.3g} … {high:.3g}; undo the "
            "normalisation of the model's input first, e.g. images * std + mean"
        )
    return pictures.clamp(0, 1).expand(*pictures.shape[:-3], 3, -1, -1).movedim(-3, -1)


def over_channels(maps: ArrayLike, name: str, leading: tuple[int, ...], size: tuple[int, int]) -> Tensor:
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


def pooled(relevance: Tensor, pool: int) -> Tensor:
    """Means over squares of `pool` × `pool` pixels of (…, H, W); squares at the edge may be smaller."""
    pool = as_int(pool, "pool", 1)
    if pool == 1:
        return relevance
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
        return [float(strength) for strength in strengths]
    raise ValueError(f"scale must be 'one', 'concepts' or 'each', got {scale!r}")


def share_label(total: float, whole: float, magnitude: float) -> str:
    """R of a panel and its share of the whole; no share where it would mislead.

    That is, where the whole is negative or the parts cancel: below a tenth of `magnitude`, Σ|R_k|.
    """
    share = f" ({100 * total / whole:.0f} %)" if whole > 0.1 * magnitude else ""
    return f"R = {total:.3g}{share}"


def draw_map(
    axis: Axes,
    relevance: Tensor,
    limit: float,
    picture: Tensor | None,
    size: tuple[int, int],
    pool: int = 1,
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
    drawn: AxesImage = axis.imshow(
        relevance.numpy(),
        cmap=COLOURS,
        vmin=-limit,
        vmax=limit,
        alpha=alpha,
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
    )
    axis.set(xlim=extent[:2], ylim=extent[2:])
    return drawn


def number(value: float) -> str:
    """A small number for people: 0.12, 3.1e-07, 0."""
    return "0" if value == 0 else f"{value:.2g}"
