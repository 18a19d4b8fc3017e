"""Bars: `relevance_bars` of concepts, `concept_bars` of the features of a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure

from ..checks import ArrayLike, as_float_tensor, as_int, check_finite
from .style import AGAINST, FOR, concept_names, share_label, strip


def relevance_bars(
    relevance: ArrayLike, names: Sequence[str] | None = None, *, title: str | None = None
) -> Figure:
    """Bars of the relevance R_k of each concept, red for the prediction and blue against it.

    Parameters
    ----------
    relevance : array or tensor, shape (K,) or (N, K)
        R_k of one example, or of N, e.g. from `concept_relevance`. Of several examples the bars are the
        means, and every example is a dot.
    names : sequence of str, length K, optional
        Default "S1" … "SK".
    title : str, optional
    """
    values = as_float_tensor(relevance, "relevance").cpu().double()
    if values.ndim not in (1, 2) or 0 in values.shape:
        raise ValueError(f"relevance must have shape (K,) or (N, K), got {tuple(values.shape)}")
    check_finite(values, "relevance")
    rows = values.reshape(-1, values.shape[-1])
    n_examples, n_concepts = rows.shape
    labels = concept_names(names, n_concepts)
    means = rows.mean(0).tolist()
    whole, magnitude = sum(means), sum(abs(mean) for mean in means)

    figure = Figure(figsize=(5.2, 0.42 * n_concepts + (1.1 if title else 0.8)), layout="constrained")
    axis = figure.subplots()
    places = list(range(n_concepts))
    axis.barh(places, means, color=[FOR if mean >= 0 else AGAINST for mean in means], height=0.6)
    if n_examples > 1:
        for k in places:
            axis.plot(rows[:, k].tolist(), [k] * n_examples, "o", color="0.15", markersize=2.5, alpha=0.5)
    axis.axvline(0, color="0.3", linewidth=0.8)
    axis.set_yticks(places, labels=labels)
    axis.invert_yaxis()  # the first concept on top
    texts = axis.secondary_yaxis("right")
    texts.set_yticks(places, labels=[share_label(mean, whole, magnitude) for mean in means])
    texts.tick_params(length=0)
    texts.spines["right"].set_visible(False)
    strip(axis)
    of_many = f": mean of {n_examples} examples, one dot for each" if n_examples > 1 else ""
    axis.set_xlabel(f"relevance{of_many}")
    if title:
        axis.set_title(title, fontsize=11)
    return figure


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
        The values of the example, shown behind the names of the features.
    n_features : int, optional
        How many features to show; the others become one bar, their sum. None for all.
    title : str, optional
    """
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
    totals = rows.mean(0).sum(1).tolist()
    whole, magnitude = sum(totals), sum(abs(total) for total in totals)

    width = 0.085 * max(map(len, shown)) + 1.9 * n_concepts + 0.3
    height = 0.26 * len(shown) + (1.35 if title else 1.05)
    figure = Figure(figsize=(max(width, 5.0), height), layout="constrained")
    axes = figure.subplots(1, n_concepts, sharex=True, sharey=True, squeeze=False)[0]
    places = list(range(len(shown)))
    for k, axis in enumerate(axes):
        heights = means[k].tolist()
        axis.barh(places, heights, color=[FOR if mean >= 0 else AGAINST for mean in heights], height=0.65)
        if n_examples > 1:  # not on the sum of the others, which would dwarf all bars
            whiskers = bars[:, k, :n_shown].std(0).tolist()
            middles, where = heights[:n_shown], places[:n_shown]
            axis.errorbar(middles, where, xerr=whiskers, fmt="none", ecolor="0.35", elinewidth=1)
        axis.axvline(0, color="0.3", linewidth=0.8)
        axis.set_title(f"{headings[k]}\n{share_label(totals[k], whole, magnitude)}", fontsize=10)
        strip(axis)
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
