"""Curves of the paper's experiments: flipping, training, scores against d, K and layers, ΔAUPC, ablation."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from drsa_core.checks import as_float_tensor, check_finite
from drsa_core.evaluation import ConceptAblation, Summary, class_means
from drsa_core.plot.style import strip
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator
from torch import Tensor

#: Lines must be told apart without colour, too.
MARKERS = "osD^vP*X"


def flipping_curves(
    share: Tensor | Sequence[float],
    scores: Mapping[str, Tensor],
    classes: Sequence[Hashable] | None = None,
    ylabel: str = "rectified logit",
) -> Figure:
    """Patch-flipping curves of several methods, with their AUPC in the legend (Figure of Note D).

    Parameters
    ----------
    share : tensor or sequence, shape (T + 1,)
        Share of patches removed, from `FlippingCurves.share`.
    scores : mapping of str to tensor, shape (N, T + 1)
        `FlippingCurves.scores` of each method.
    classes : sequence, length N, optional
        Class of each image: curves are averaged over images and then classes, with a band of one standard
        error over classes. Without it every image counts as a class.
    ylabel : str
    """
    if not scores:
        raise ValueError("scores must hold at least one method, got none")
    share = torch.as_tensor(share, dtype=torch.float64)
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    for marker, (name, values) in enumerate(scores.items()):
        values = torch.as_tensor(values, dtype=torch.float64)
        if values.ndim != 2 or values.shape[1] != len(share):
            raise ValueError(
                f"scores of {name!r} must have shape (n_images, {len(share)}), got {tuple(values.shape)}"
            )
        check_finite(values, f"scores of {name!r}")
        labels = list(range(len(values))) if classes is None else list(classes)
        by_class = torch.tensor([list(class_means(column, labels).values()) for column in values.T]).T
        mean = by_class.mean(0)
        area = float(torch.trapezoid(mean.double(), share))
        axis.plot(share, mean, marker=MARKERS[marker % 8], markersize=4, label=f"{name} ({area:.2f})")
        if len(by_class) > 1:
            error = by_class.std(0) / len(by_class) ** 0.5
            axis.fill_between(share, mean - error, mean + error, alpha=0.15)
    axis.set(xlabel="share of patches removed", ylabel=ylabel, xlim=(0, 1))
    axis.set_ylim(bottom=0)
    axis.legend(title="method (AUPC, lower is better)", fontsize=8, title_fontsize=8)
    strip(axis)
    return figure


def training_curves(histories: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Objective against iterations, a panel for each method and a line for each class (Note E).

    Parameters
    ----------
    histories : mapping of str to mapping of str to sequence of float
        Method → class → `history_` of the fitted solver.
    """
    if not histories or not all(histories.values()):
        raise ValueError("histories must hold at least one method with at least one class, got none")
    # A class has one colour in all panels, of which the last one has the legend of all.
    names = dict.fromkeys(name for by_class in histories.values() for name in by_class)
    colours = {name: f"C{number}" for number, name in enumerate(names)}
    figure = Figure(figsize=(4.2 * len(histories), 3.4), layout="constrained")
    axes = figure.subplots(1, len(histories), squeeze=False)[0]
    for axis, (method, by_class) in zip(axes, histories.items(), strict=True):
        for name, history in by_class.items():
            check_finite(
                torch.as_tensor(history, dtype=torch.float64), f"the history of {method!r}, {name!r}"
            )
            axis.plot(range(len(history)), history, color=colours[name], label=name)
        axis.set_title(method)
        axis.set_xlabel("iteration")
        axis.set_xscale("symlog", linthresh=10)  # most of the gain is made at the beginning
        axis.set_xlim(left=0)
        strip(axis)
    axes[0].set_ylabel("objective")
    if len(names) <= 8:
        _legend_of_all(axes[-1], axes)
    return figure


def scores_against(
    x: Sequence[float] | Sequence[str],
    panels: Mapping[str, Mapping[str, Sequence[Summary]]],
    xlabel: str,
    references: Mapping[str, float] | None = None,
) -> Figure:
    """Scores against d, K or layers: a panel for each score, a line with error bars for each method (Note F).

    Parameters
    ----------
    x : sequence of numbers or str
        Values of d or K, drawn on a logarithmic axis, or names of layers.
    panels : mapping of str to mapping of str to sequence of Summary
        Score → method → a summary for each x. The bars are one standard error over classes.
    xlabel : str
    references : mapping of str to float, optional
        Score → a value for a dashed line, e.g. that of no subspace projection.
    """
    if not panels:
        raise ValueError("panels must hold at least one score, got none")
    figure = Figure(figsize=(3.9 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    are_names = isinstance(x[0], str)
    # A method has one colour and one marker in all panels, of which the first one has the legend of all.
    methods = list(dict.fromkeys(method for lines in panels.values() for method in lines))
    places: Sequence[Any] = range(len(x)) if are_names else x
    for axis, (score, lines) in zip(axes, panels.items(), strict=True):
        for method, summaries in lines.items():
            if len(summaries) != len(x):
                raise ValueError(
                    f"{method!r} must have a summary of {score!r} for each of the {len(x)} x, got "
                    f"{len(summaries)}"
                )
            means = [s.mean for s in summaries]
            check_finite(torch.tensor(means), f"{score!r} of {method!r}")
            errors = [s.standard_error if s.n_classes > 1 else 0.0 for s in summaries]
            number = methods.index(method)
            axis.errorbar(
                places,
                means,
                errors,
                color=f"C{number}",
                marker=MARKERS[number % 8],
                markersize=5,
                capsize=3,
                label=method,
            )
        if references is not None and score in references:
            axis.axhline(references[score], color="grey", linestyle="--", label="no projection")
        if not are_names:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xticks(list(places), [str(value) for value in x])
        axis.set_xlabel(xlabel)
        axis.set_title(score)
        strip(axis)
    _legend_of_all(axes[0], axes)
    return figure


def delta_aupc_bars(gains: Mapping[str, Mapping[str, float]]) -> Figure:
    """ΔAUPC of each class, a bar for each method, the most disentangled class on top (Note G).

    Parameters
    ----------
    gains : mapping of str to mapping of str to float
        Method → class → ΔAUPC, from `delta_aupc`. The classes are sorted by the last method.
    """
    if not gains or not all(gains.values()):
        raise ValueError("gains must hold at least one method with at least one class, got none")
    order = sorted(list(gains.values())[-1].items(), key=lambda item: item[1])
    classes = [name for name, _ in order]
    for method, by_class in gains.items():
        if set(by_class) != set(classes):
            raise ValueError(f"all methods must have the same classes; {method!r} differs")
        check_finite(torch.tensor(list(by_class.values())), f"the gains of {method!r}")
    height = 0.8 / len(gains)
    figure = Figure(figsize=(6.4, 0.9 + 0.42 * len(classes)), layout="constrained")
    axis = figure.subplots()
    for number, (method, by_class) in enumerate(gains.items()):
        places = [row + height * (number - (len(gains) - 1) / 2) for row in range(len(classes))]
        axis.barh(places, [by_class[name] for name in classes], height, label=method)
    axis.set_yticks(range(len(classes)), classes)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_xlabel("ΔAUPC (higher: more disentangled)")
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], labels[::-1], fontsize=8)  # as the bars lie
    strip(axis)
    return figure


def ablation_scatter(results: Mapping[str, ConceptAblation]) -> Figure:
    """Drop of the score against R_k: a panel for each method, a dot for each image and concept.

    Parameters
    ----------
    results : mapping of str to ConceptAblation
        Method → result of `drsa_core.evaluation.concept_ablation` on the same images.
    """
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
        strip(axis)
    axes[0].set_ylabel("drop of the score without the concept")
    if max(len(result.names) for result in results.values()) <= 8:
        axes[0].legend(fontsize=7)
    return figure


def _legend_of_all(axis: Axes, axes: Iterable[Axes]) -> None:
    """A legend of what any of the panels holds, in one of them."""
    handles: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    axis.legend(list(handles.values()), list(handles), fontsize=8)
