"""`choice_of_k`: why a number of concepts was chosen."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..stability import OVERLAP, ChoiceOfK
from .style import strip

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
    candidates, chosen = choice.candidates, choice.n_subspaces
    ks = [c.n_subspaces for c in candidates]
    figure = Figure(figsize=(max(5.5, 1.5 + 0.5 * len(ks)), 9.4), layout="constrained")
    ratios = {"height_ratios": [2.2, 1.2, 1.2, 1.8]}
    axes = figure.subplots(4, 1, sharex=True, gridspec_kw=ratios)
    stable, distinct, objective, tree = axes
    for axis in axes:
        if chosen is not None:
            axis.axvspan(chosen - 0.4, chosen + 0.4, color=_GOOD, alpha=0.12)
        strip(axis)
    stable.set_title("no K has stable, distinct concepts" if chosen is None else f"{chosen} concepts")

    for i, c in enumerate(candidates):
        k = c.n_subspaces
        for value, is_stable in zip(c.index.tolist(), c.is_stable, strict=True):
            _dot(stable, k, value, is_stable)
        nulls = c.null[:, 0].tolist()
        null_label, label = ("shuffled contexts, least stable", "needed") if i == 0 else (None, None)
        stable.plot([k + 0.25] * len(nulls), nulls, "x", color=_GREY, label=null_label)
        stable.plot((k - 0.3, k + 0.3), [c.threshold] * 2, color="black", linewidth=1, label=label)
    stable.plot([], [], "o", color=_GOOD, label="concept, stable")
    stable.plot([], [], "o", color=_BAD, markerfacecolor="white", label="concept, not stable")
    stable.set_ylabel("stability")
    stable.set_ylim(top=1.02)
    stable.legend(fontsize=8, loc="lower left")

    distinct.axhline(OVERLAP, color="black", linewidth=1)
    colours = [_GOOD if c.are_distinct else _BAD for c in candidates]
    distinct.bar(ks, [c.overlap for c in candidates], 0.5, color=colours)
    distinct.set_ylabel("largest correlation\nof two concepts")
    if _BAD in colours:
        note = "above 0: parts of one concept"
        distinct.text(1, 0.04, note, transform=distinct.transAxes, ha="right", va="bottom", fontsize=8)

    for values, style, colour, label in (
        ([c.objective for c in candidates], "o-", _GREY, "images of the fit"),
        ([c.held_out_objective for c in candidates], "s--", "black", "images left out"),
        ([c.null_objective for c in candidates], "x:", _BAD, "shuffled contexts"),
    ):
        objective.plot(ks, values, style, color=colour, label=label)
    objective.set_ylabel("objective J")
    objective.set_ylim(bottom=0)
    objective.legend(fontsize=8)

    _draw_splits(tree, choice)
    tree.set(xlabel="number of concepts K", ylabel="splits", xticks=ks, yticks=[])
    return figure


def _dot(axis: Axes, x: float, y: float, is_stable: bool) -> None:
    colour = _GOOD if is_stable else _BAD
    axis.plot(x, y, "o", color=colour, markerfacecolor=colour if is_stable else "white", zorder=2)


def _draw_splits(axis: Axes, choice: ChoiceOfK) -> None:
    """Concepts of each K above each other, in the order of their parents, with a line to each parent."""
    heights = [list(range(choice.candidates[0].n_subspaces))]
    for split in choice.splits:
        above = heights[-1]
        order = sorted(range(len(split.parent)), key=lambda child: (above[split.parent[child]], child))
        heights.append([order.index(child) for child in range(len(order))])
    # Each column in the middle.
    places = [[height - (len(column) - 1) / 2 for height in column] for column in heights]
    for i, split in enumerate(choice.splits):
        ends = [c.n_subspaces for c in choice.candidates[i : i + 2]]
        for child, parent in enumerate(split.parent):
            width = 0.3 + 2.5 * max(0.0, float(split.correlation[child, parent]))
            colour = _BAD if parent in split.divided else _GREY
            line = [places[i][parent], places[i + 1][child]]
            axis.plot(ends, line, color=colour, linewidth=width, zorder=1)
    for candidate, column in zip(choice.candidates, places, strict=True):
        for is_stable, place in zip(candidate.is_stable, column, strict=True):
            _dot(axis, candidate.n_subspaces, place, is_stable)
    axis.plot([], [], color=_BAD, label="a concept that splits")
    axis.plot([], [], color=_GREY, label="a concept that stays")
    axis.legend(fontsize=8, loc="upper left")
