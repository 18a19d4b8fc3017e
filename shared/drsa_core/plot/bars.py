"""`relevance_bars`: how much each concept counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..checks import ArrayLike, as_float_tensor, check_finite
from .maps import concept_names
from .style import AGAINST, FOR, share_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def relevance_bars(
    relevance: ArrayLike, names: Sequence[str] | None = None, *, title: str | None = None
) -> Figure:
    """Bars of the relevance R_k of each concept, red for the prediction and blue against it.

    Parameters
    ----------
    relevance : array or tensor, shape (K,) or (N, K)
        R_k of one image, or of N images, e.g. from `concept_relevance`. Of several images the bars are the
        means, and every image is a dot.
    names : sequence of str, length K, optional
        Default "S1" … "SK".
    title : str, optional

    Returns
    -------
    matplotlib.figure.Figure
    """
    from matplotlib.figure import Figure

    values = as_float_tensor(relevance, "relevance").cpu().double()
    if values.ndim not in (1, 2) or 0 in values.shape:
        raise ValueError(f"relevance must have shape (K,) or (N, K), got {tuple(values.shape)}")
    check_finite(values, "relevance")
    rows = values.reshape(-1, values.shape[-1])
    n_images, n_concepts = rows.shape
    labels = concept_names(names, n_concepts)
    means = rows.mean(0).tolist()
    whole, magnitude = sum(means), sum(abs(mean) for mean in means)

    figure = Figure(figsize=(5.2, 0.42 * n_concepts + (1.1 if title else 0.8)), layout="constrained")
    axis = figure.subplots()
    places = list(range(n_concepts))
    axis.barh(places, means, color=[FOR if mean >= 0 else AGAINST for mean in means], height=0.6)
    if n_images > 1:
        for k in places:
            axis.plot(rows[:, k].tolist(), [k] * n_images, "o", color="0.15", markersize=2.5, alpha=0.5)
    axis.axvline(0, color="0.3", linewidth=0.8)
    axis.set_yticks(places, labels=labels)
    axis.invert_yaxis()  # the first concept on top
    texts = axis.secondary_yaxis("right")
    texts.set_yticks(places, labels=[share_label(mean, whole, magnitude) for mean in means])
    texts.tick_params(length=0)
    texts.spines["right"].set_visible(False)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel(
        "relevance" if n_images == 1 else f"relevance: mean of {n_images} images, one dot for each"
    )
    if title:
        axis.set_title(title, fontsize=11)
    return figure
