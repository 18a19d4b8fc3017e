"""Figures of showcases 1 and 2: ROC curves, confusion matrices, box plots and scatter of R_k (section 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checks import as_int, check_finite
from ..showcases.detection import RocCurve
from ..showcases.matching import ClassConceptTable, check_labelled, names_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def roc_curves(curves: Mapping[str, RocCurve], title: str | None = None) -> Figure:
    """ROC curves in one panel, each named with its AUROC; the first one is drawn thick (Note J.1).

    Parameters
    ----------
    curves : mapping from str to RocCurve
        E.g. `{"DRSA S4": roc_curve(scores[:, 3], labels), "SpRAy 1": …}`.
    """
    from matplotlib.figure import Figure

    if not curves:
        raise ValueError("curves must hold at least one RocCurve")
    figure = Figure(figsize=(4.6, 4.4), layout="constrained")
    axis = figure.subplots()
    axis.plot([0, 1], [0, 1], color="0.7", linestyle=":", label="chance (0.500)")
    for i, (name, curve) in enumerate(curves.items()):
        axis.plot(
            curve.false_positive_rate.numpy(),
            curve.true_positive_rate.numpy(),
            label=f"{name} ({curve.auroc:.3f})",
            linewidth=1.4 if i else 2.8,
            zorder=2 if i else 3,
        )
    axis.set(xlabel="false positive rate", ylabel="true positive rate", aspect="equal", title=title)
    axis.legend(title="AUROC", loc="lower right", fontsize=8, title_fontsize=8)
    return figure


def confusion_matrices(matrices: Mapping[str, Tensor], names: Sequence[str] | None = None) -> Figure:
    """Confusion matrices side by side, each headed by its name and accuracy (Fig. 8, Note J.1).

    Parameters
    ----------
    matrices : mapping from str to tensor of shape (n_classes, n_classes)
        Counts as from `cleverhans.confusion_matrix`: true classes in rows, predicted ones in columns.
    names : sequence of str, optional
        Names of the classes. Default: their numbers.
    """
    from matplotlib.figure import Figure

    if not matrices:
        raise ValueError("matrices must hold at least one confusion matrix")
    for title, matrix in matrices.items():
        if not isinstance(matrix, Tensor):
            raise TypeError(f"the matrix {title!r} must be a torch tensor, got {type(matrix).__name__}")
        check_finite(matrix, f"the matrix {title!r}")
        if bool((matrix != matrix.round()).any()) or bool((matrix < 0).any()):
            raise ValueError(
                f"the matrix {title!r} must hold counts, as from confusion_matrix: shares do not tell the "
                "accuracy"
            )
    shapes = {tuple(matrix.shape) for matrix in matrices.values()}
    n_classes = next(iter(shapes))[0] if len(shapes) == 1 else 0
    if shapes != {(n_classes, n_classes)}:
        raise ValueError(f"matrices must be square and of one size, got {sorted(shapes)}")
    labels = names_of(names, tuple(range(n_classes)))
    size = max(2.2, 0.52 * n_classes)
    figure = Figure(figsize=(size * len(matrices) + 1.0, size + 1.3), layout="constrained")
    axes = figure.subplots(1, len(matrices), squeeze=False, sharey=True)[0]
    for axis, (title, matrix) in zip(axes, matrices.items(), strict=True):
        counts = matrix.cpu()
        share = counts / counts.sum(1, keepdim=True).clamp(min=1)
        axis.imshow(share.numpy(), cmap="Reds", vmin=0, vmax=1)
        for i in range(n_classes):
            for j in range(n_classes):
                colour = "white" if share[i, j] > 0.6 else "black"
                axis.text(j, i, str(int(counts[i, j])), ha="center", va="center", color=colour, fontsize=8)
        accuracy = float(counts.diagonal().sum() / counts.sum().clamp(min=1))
        axis.set_title(f"{title}\naccuracy {accuracy:.3f}", fontsize=9)
        axis.set_xticks(range(n_classes), labels, rotation=45, ha="right")
        axis.set_yticks(range(n_classes), labels)
        axis.set_xlabel("predicted")
    axes[0].set_ylabel("true")
    return figure


def relevance_boxes(
    relevance: Tensor,
    labels: Tensor,
    table: ClassConceptTable,
    names: Sequence[str] | None = None,
    concept_names: Sequence[str] | None = None,
) -> Figure:
    """Box plots of R_k for each class and concept; boxes of specific concepts are red (Fig. 9).

    A box reaches from the 0.25-quantile of a class to its α-quantile, the bar in it is the median, whiskers
    end at the 0.05- and 0.95-quantiles. The dashed line is the β-quantile of all images: a concept is
    specific to a class if the box surpasses it.

    Parameters
    ----------
    relevance : tensor, shape (N, K)
    labels : tensor of int, shape (N,)
    table : ClassConceptTable
        From `match_concepts(relevance, labels)`.
    names : sequence of str, optional
        Names of the classes, in the order of `table.classes`.
    concept_names : sequence of str, optional
        Names of the K concepts. Default: S1, S2, …
    """
    from matplotlib.figure import Figure

    relevance, labels = check_labelled(relevance, labels)
    class_names = names_of(names, table.classes)
    n_concepts = relevance.shape[1]
    if n_concepts != len(table.overall_quantiles):
        raise ValueError(
            f"the table is of {len(table.overall_quantiles)} concepts, relevance of {n_concepts}"
        )
    titles = _concept_names(concept_names, n_concepts)
    missing = set(table.classes) - set(labels.tolist())
    if missing:
        raise ValueError(f"labels hold no image of the table's classes {sorted(missing)}")
    figure = Figure(figsize=(1.6 * n_concepts + 1.5, 0.42 * len(table.classes) + 1.1), layout="constrained")
    axes = figure.subplots(1, n_concepts, squeeze=False, sharey=True)[0]
    for k, axis in enumerate(axes):
        for row, label in enumerate(table.classes):
            values = relevance[labels == label, k]
            low, left, middle, high = values.quantile(values.new_tensor([0.05, 0.25, 0.5, 0.95])).tolist()
            right = float(table.class_quantiles[row, k])
            specific = bool(table.specific[row, k])
            box = {"med": middle, "q1": left, "q3": right, "whislo": low, "whishi": high, "fliers": []}
            artists = axis.bxp(
                [box],
                positions=[row],
                widths=0.6,
                orientation="horizontal",
                showfliers=False,
                patch_artist=True,
            )
            colour = "#c0392b" if specific else "0.55"
            artists["boxes"][0].set(facecolor="#e74c3c" if specific else "0.9", edgecolor=colour)
            for line in (*artists["whiskers"], *artists["caps"], *artists["medians"]):
                line.set(color="black" if line is artists["medians"][0] else colour)
        axis.axvline(float(table.overall_quantiles[k]), color="#1f4e9c", linestyle="--", linewidth=1)
        axis.set_title(titles[k])
        axis.locator_params(axis="x", nbins=3)
        axis.tick_params(axis="x", labelsize=8)
        axis.set_yticks(range(len(class_names)), class_names)
        axis.set_ylim(len(class_names) - 0.4, -0.6)
    figure.supxlabel("relevance of the concept for the image's class", fontsize=9)
    return figure


def relevance_scatter(
    relevance: Tensor,
    labels: Tensor,
    concepts: tuple[int, int, int],
    names: Mapping[int, str] | None = None,
    concept_names: Sequence[str] | None = None,
) -> Figure:
    """Images in the space of three concepts, coloured by class (Fig. 10, left).

    Parameters
    ----------
    relevance : tensor, shape (N, K)
    labels : tensor of int, shape (N,)
    concepts : three ints
        The concepts of the axes.
    names : mapping from int to str, optional
        Names of the classes.
    concept_names : sequence of str, optional
        Names of the K concepts. Default: S1, S2, …
    """
    from matplotlib.figure import Figure

    relevance, labels = check_labelled(relevance, labels)
    n_concepts = relevance.shape[1]
    concepts = tuple(as_int(k, "every entry of concepts") for k in concepts)  # type: ignore[assignment]
    if len(concepts) != 3 or not all(0 <= k < n_concepts for k in concepts):
        raise ValueError(f"concepts must be three numbers below K = {n_concepts}, got {concepts}")
    titles = _concept_names(concept_names, n_concepts)
    figure = Figure(figsize=(5.6, 4.8), layout="constrained")
    axis = figure.add_subplot(projection="3d")
    for label in labels.unique().tolist():
        points = relevance[labels == label][:, torch.tensor(concepts)].numpy()
        name = str(label) if names is None else names.get(label, str(label))
        axis.scatter(*points.T, s=22, label=name, depthshade=False, edgecolors="white", linewidths=0.4)
    axis.set(**{f"{d}label": f"R of {titles[k]}" for d, k in zip("xyz", concepts, strict=True)})
    axis.legend(loc="upper left", fontsize=8)
    axis.view_init(elev=22, azim=35)
    return figure


def _concept_names(names: Sequence[str] | None, n_concepts: int) -> list[str]:
    if names is None:
        return [f"S{k + 1}" for k in range(n_concepts)]
    if len(names) != n_concepts:
        raise ValueError(
            f"concept_names must be {n_concepts} strings, one for each concept, got {len(names)}"
        )
    return [str(name) for name in names]
