"""`concept_bars`: the features of a table, with a bar for each concept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..checks import ArrayLike, as_float_tensor, as_int, check_finite
from .maps import concept_names
from .style import AGAINST, FOR, share_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def concept_bars(
    maps: ArrayLike,
    features: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    *,
    values: Sequence[str | float] | ArrayLike | None = None,
    n_features: int | None = 12,
    title: str | None = None,
) -> Figure:
    """Bars of the relevance of each feature of a vector, one panel for each concept.

    Red counts for the score, blue against it. All panels have one scale and the features in one order, by the
    largest |R| in any concept.

    Parameters
    ----------
    maps : array or tensor, shape (K, F) or (N, K, F)
        Relevance of the F features of one example, e.g. `attribute(x)[0]`, or of N examples: the bars are
        then the means, and whiskers their standard deviations.
    features : sequence of str, length F, optional
        Names of the features. Default "x1" … "xF".
    names : sequence of str, length K, optional
        Names of the concepts. Default "S1" … "SK".
    values : sequence of str or of numbers, length F, optional
        The example's own values, shown behind the names of the features.
    n_features : int, optional
        How many features to show; the others become one bar, their sum. None for all.
    title : str, optional

    Returns
    -------
    matplotlib.figure.Figure
    """
    from matplotlib.figure import Figure

    relevance = as_float_tensor(maps, "maps").cpu().double()
    if relevance.ndim not in (2, 3) or 0 in relevance.shape:
        raise ValueError(f"maps must have shape (K, F) or (N, K, F), got {tuple(relevance.shape)}")
    check_finite(relevance, "maps")
    rows = relevance.reshape(-1, *relevance.shape[-2:])
    n_examples, n_concepts, n_all = rows.shape
    labels = _labels(features, values, n_all)
    headings = concept_names(names, n_concepts)
    n_shown = n_all if n_features is None else min(as_int(n_features, "n_features", 1), n_all)
    order = rows.mean(0).abs().amax(0).argsort(descending=True, stable=True)
    chosen, others = order[:n_shown], order[n_shown:]
    bars = rows[:, :, chosen]
    shown = [labels[i] for i in chosen.tolist()]
    if len(others):
        bars = torch.cat([bars, rows[:, :, others].sum(2, keepdim=True)], dim=2)
        shown.append(f"{len(others)} others")
    means = bars.mean(0)
    spread = bars.std(0) if n_examples > 1 else None
    totals = rows.mean(0).sum(1).tolist()
    whole, magnitude = sum(totals), sum(abs(total) for total in totals)

    width = 0.085 * max(map(len, shown)) + 1.9 * n_concepts + 0.3
    figure = Figure(
        figsize=(max(width, 5.0), 0.26 * len(shown) + (1.35 if title else 1.05)), layout="constrained"
    )
    axes = figure.subplots(1, n_concepts, sharex=True, sharey=True, squeeze=False)[0]
    places = list(range(len(shown)))
    for k, axis in enumerate(axes):
        colours = [FOR if mean >= 0 else AGAINST for mean in means[k].tolist()]
        axis.barh(places, means[k].tolist(), color=colours, height=0.65)
        if spread is not None:  # not on the sum of the others, which would dwarf all bars
            whiskers = spread[k, :n_shown].tolist()
            middles = means[k, :n_shown].tolist()
            axis.errorbar(middles, places[:n_shown], xerr=whiskers, fmt="none", ecolor="0.35", elinewidth=1)
        axis.axvline(0, color="0.3", linewidth=0.8)
        axis.set_title(f"{headings[k]}\n{share_label(totals[k], whole, magnitude)}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="x", labelsize=8)
    axes[0].set_yticks(places, labels=shown, fontsize=8.5)
    axes[0].invert_yaxis()  # the strongest feature on top
    of_many = f", mean and deviation of {n_examples} examples" if n_examples > 1 else ""
    figure.supxlabel(f"relevance{of_many}", fontsize=9)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _labels(
    features: Sequence[str] | None, values: Sequence[str | float] | ArrayLike | None, n: int
) -> list[str]:
    labels = [f"x{i + 1}" for i in range(n)] if features is None else list(features)
    if isinstance(features, str) or len(labels) != n:
        raise ValueError(f"features must be {n} strings, one for each feature, got {len(labels)}")
    if values is None:
        return labels
    if len(values) != n:
        raise ValueError(f"values must be {n}, one for each feature, got {len(values)}")
    texts = [value if isinstance(value, str) else f"{float(value):.3g}" for value in values]
    return [f"{label} = {text}" for label, text in zip(labels, texts, strict=True)]
