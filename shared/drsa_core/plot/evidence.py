"""What supports a set of concepts: why this K was chosen, and whether taking a concept out matters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..checks import as_float_tensor
from ..evaluation.ablation import ConceptAblation
from ..stability import OVERLAP, ChoiceOfK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GOOD, _BAD, _GREY = "#1b7f4b", "#c8102e", "#8a8a8a"


def choice_of_k(choice: ChoiceOfK) -> Figure:
    """Why this number of concepts: stability, distinctness, the objective and the splits against K.

    Parameters
    ----------
    choice : ChoiceOfK
        From `drsa_core.choose_k`.

    Notes
    -----
    Above: the stability of each concept, a dot each, filled where it is stable, with the threshold (line) and
    shuffled contexts (crosses), which may be as stable. Second: the largest correlation of two concepts;
    above the line, two of them are parts of one. Third: the objective on the images of a fit, on images left
    out, and with shuffled contexts, which it must exceed. Below: a dot for each concept, with a line to the
    concept of the smaller K that it correlates with most, the thicker the more; where two lines begin, a
    concept splits. The chosen K is shaded.
    """
    from matplotlib.figure import Figure

    candidates = choice.candidates
    ks = [c.n_subspaces for c in candidates]
    figure = Figure(figsize=(max(5.5, 1.5 + 0.5 * len(ks)), 9.4), layout="constrained")
    stable, distinct, objective, tree = figure.subplots(
        4, 1, sharex=True, gridspec_kw={"height_ratios": [2.2, 1.2, 1.2, 1.8]}
    )
    for axis in (stable, distinct, objective, tree):
        if choice.n_subspaces is not None:
            axis.axvspan(choice.n_subspaces - 0.4, choice.n_subspaces + 0.4, color=_GOOD, alpha=0.12)
        axis.spines[["top", "right"]].set_visible(False)

    for c in candidates:
        for value, is_stable in zip(c.index.tolist(), c.is_stable, strict=True):
            face = _GOOD if is_stable else "white"
            stable.plot(c.n_subspaces, value, "o", color=_GOOD if is_stable else _BAD, markerfacecolor=face)
    nulls = [(c.n_subspaces + 0.25, value) for c in candidates for value in c.null[:, 0].tolist()]
    stable.plot(*zip(*nulls, strict=True), "x", color=_GREY, label="shuffled contexts, least stable")
    for c in candidates:
        ends = (c.n_subspaces - 0.3, c.n_subspaces + 0.3)
        label = "needed" if c is candidates[0] else None
        stable.plot(ends, (c.threshold, c.threshold), color="black", linewidth=1, label=label)
    stable.plot([], [], "o", color=_GOOD, label="concept, stable")
    stable.plot([], [], "o", color=_BAD, markerfacecolor="white", label="concept, not stable")
    stable.set_ylabel("stability")
    stable.set_ylim(top=1.02)
    stable.legend(fontsize=8, loc="lower left")
    chosen = choice.n_subspaces
    title = "no K has stable, distinct concepts" if chosen is None else f"{chosen} concepts"
    stable.set_title(title)

    overlaps = [c.overlap for c in candidates]
    distinct.axhline(OVERLAP, color="black", linewidth=1)
    colours = [_GOOD if c.are_distinct else _BAD for c in candidates]
    distinct.bar(ks, overlaps, 0.5, color=colours)
    distinct.set_ylabel("largest correlation\nof two concepts")
    if any(not c.are_distinct for c in candidates):
        distinct.text(
            1,
            0.04,
            "above 0: parts of one concept",
            transform=distinct.transAxes,
            ha="right",
            va="bottom",
            fontsize=8,
        )

    objective.plot(ks, [c.objective for c in candidates], "o-", color=_GREY, label="images of the fit")
    objective.plot(
        ks, [c.held_out_objective for c in candidates], "s--", color="black", label="images left out"
    )
    objective.plot(ks, [c.null_objective for c in candidates], "x:", color=_BAD, label="shuffled contexts")
    objective.set_ylabel("objective J")
    objective.set_ylim(bottom=0)
    objective.legend(fontsize=8)
    _draw_splits(tree, choice)
    tree.set_xlabel("number of concepts K")
    tree.set_xticks(ks)
    return figure


def _draw_splits(axis: Any, choice: ChoiceOfK) -> None:
    """Concepts of each K above each other, in the order of their parents, with a line to each parent."""
    heights = [list(range(choice.candidates[0].n_subspaces))]
    for split in choice.splits:
        above = heights[-1]
        order = sorted(range(len(split.parent)), key=lambda child: (above[split.parent[child]], child))
        heights.append([order.index(child) for child in range(len(order))])
    places = [
        [height - (len(column) - 1) / 2 for height in column] for column in heights
    ]  # each column in the middle
    for i, split in enumerate(choice.splits):
        ends = [choice.candidates[i].n_subspaces, choice.candidates[i + 1].n_subspaces]
        for child, parent in enumerate(split.parent):
            width = 0.3 + 2.5 * max(0.0, float(split.correlation[child, parent]))
            colour = _BAD if parent in split.divided else _GREY
            axis.plot(
                ends, [places[i][parent], places[i + 1][child]], color=colour, linewidth=width, zorder=1
            )
    for candidate, column in zip(choice.candidates, places, strict=True):
        for is_stable, place in zip(candidate.is_stable, column, strict=True):
            face = _GOOD if is_stable else "white"
            edge = _GOOD if is_stable else _BAD
            axis.plot(candidate.n_subspaces, place, "o", color=edge, markerfacecolor=face, zorder=2)
    axis.plot([], [], color=_BAD, label="a concept that splits")
    axis.plot([], [], color=_GREY, label="a concept that stays")
    axis.legend(fontsize=8, loc="upper left")
    axis.set_ylabel("splits")
    axis.set_yticks([])


def ablation_scatter(results: Mapping[str, ConceptAblation]) -> Figure:
    """Drop of the score against R_k: a panel for each method, a dot for each image and concept.

    Parameters
    ----------
    results : mapping of str to ConceptAblation
        Method → result of `drsa_core.evaluation.concept_ablation` on the same images.
    """
    from matplotlib.figure import Figure

    if not results:
        raise ValueError("results must hold at least one method, got none")
    figure = Figure(figsize=(3.2 * len(results), 3.3), layout="constrained")
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    for axis, (name, result) in zip(axes, results.items(), strict=True):
        relevance = as_float_tensor(result.relevance, f"relevance of {name}").cpu()
        drop = as_float_tensor(result.drop, f"drop of {name}").cpu()  # in the model's precision
        for k, concept in enumerate(result.names):
            axis.plot(relevance[:, k], drop[:, k], ".", label=concept, alpha=0.7)
        both = torch.cat([relevance.flatten(), drop.flatten()])
        ends = (float(both.min()), float(both.max()))
        axis.plot(ends, ends, color="black", linewidth=0.8, linestyle="--")
        axis.set_title(f"{name}: r = {result.correlation:.2f}")
        axis.set_xlabel("relevance R_k")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("drop of the score without the concept")
    if max(len(result.names) for result in results.values()) <= 8:
        axes[0].legend(fontsize=7)
    return figure
