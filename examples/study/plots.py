"""Figures of the showcases and of known concepts (section 6, Note J)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from drsa_core.checks import as_float_tensor, as_int, check_finite
from drsa_core.plot.maps import colour_limits, draw_map, pooled
from drsa_core.plot.style import concept_names as names_of_concepts
from drsa_core.plot.style import number
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from .clever_hans import RocCurve
from .matching import ClassConceptTable, check_labelled, names_of


def roc_curves(curves: Mapping[str, RocCurve], title: str | None = None) -> Figure:
    """ROC curves in one panel, each named with its AUROC; the first one is drawn thick (Note J.1).

    Parameters
    ----------
    curves : mapping from str to RocCurve
        E.g. `{"DRSA S4": roc_curve(scores[:, 3], labels), "SpRAy 1": …}`.
    """
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
        Counts as from `clever_hans.confusion_matrix`: true classes in rows, predicted ones in columns.
    names : sequence of str, optional
        Names of the classes. Default: their numbers.
    """
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
    relevance, labels = check_labelled(relevance, labels)
    class_names = names_of(names, table.classes)
    n_concepts = relevance.shape[1]
    if n_concepts != len(table.overall_quantiles):
        raise ValueError(
            f"the table is of {len(table.overall_quantiles)} concepts, relevance of {n_concepts}"
        )
    titles = names_of_concepts(concept_names, n_concepts)
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
    relevance, labels = check_labelled(relevance, labels)
    n_concepts = relevance.shape[1]
    concepts = tuple(as_int(k, "every entry of concepts") for k in concepts)  # type: ignore[assignment]
    if len(concepts) != 3 or not all(0 <= k < n_concepts for k in concepts):
        raise ValueError(f"concepts must be three numbers below K = {n_concepts}, got {concepts}")
    titles = names_of_concepts(concept_names, n_concepts)
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


def known_concepts(image: Tensor, masks: Tensor, maps: Mapping[str, Tensor], names: Sequence[str]) -> Figure:
    """One image: its planted concepts in the first row, and below, for each method, the maps matched to them.

    Each map has its own symmetric scale (red for, blue against the class), the outline of the mask that it
    should fill, and above it the share of its positive relevance that lies inside.

    Parameters
    ----------
    image : tensor, shape (1, H, W)
    masks : tensor of bool, shape (M, H, W)
    maps : mapping of str to tensor, shape (M, H, W)
        For each method the map assigned to each concept, see `synthetic.match_masks`; zeros for a
        concept to which no map was assigned.
    names : sequence of str
        Names of the M concepts.
    """
    if image.ndim != 3 or len(image) != 1 or masks.shape[1:] != image.shape[1:] or not maps:
        raise ValueError(
            "image must have shape (1, H, W), masks (M, H, W), and there must be maps; "
            f"got {tuple(image.shape)}, {tuple(masks.shape)} and maps of {list(maps)}"
        )
    if len(names) != len(masks):
        raise ValueError(f"names must be {len(masks)} strings, one for each mask, got {len(names)}")
    check_finite(image, "image")
    for method, parts in maps.items():
        if parts.shape != masks.shape:
            raise ValueError(
                f"maps of {method} must have shape {tuple(masks.shape)}, got {tuple(parts.shape)}"
            )
        check_finite(parts, f"maps of {method}")

    n_rows, n_columns = 1 + len(maps), 1 + len(masks)
    figure = Figure(figsize=(1.55 * n_columns, 1.75 * n_rows), layout="constrained")
    axes = figure.subplots(n_rows, n_columns, squeeze=False)
    picture = image[0].detach().cpu().float().numpy()
    for column, axis in enumerate(axes[0]):
        axis.imshow(picture, cmap="gray")
        axis.set_title("image" if column == 0 else names[column - 1], fontsize=10)
        if column:
            _outline(axis, masks[column - 1], "gold")
    for row, (method, parts) in zip(axes[1:], maps.items(), strict=True):
        row[0].text(0.5, 0.5, method, ha="center", va="center", fontsize=11, transform=row[0].transAxes)
        parts = as_float_tensor(parts, f"maps of {method}").cpu()
        for axis, part, mask in zip(row[1:], parts, masks.cpu(), strict=True):
            (limit,) = colour_limits(part[None], "each")
            axis.imshow(part.numpy(), cmap="seismic", vmin=-limit, vmax=limit)
            _outline(axis, mask, "black")
            positive = part.clamp(min=0)
            total = float(positive.sum())
            axis.set_title(f"{float(positive[mask].sum()) / total:.2f}" if total > 0 else "none", fontsize=9)
    for axis in axes.flat:
        axis.set_axis_off()
    return figure


def _outline(axis: Axes, mask: Tensor, colour: str) -> None:
    """The edge of a mask, along the borders of pixels."""
    padded = torch.nn.functional.pad(mask.cpu().float(), (1, 1, 1, 1))
    fine = padded.repeat_interleave(8, 0).repeat_interleave(8, 1)
    n_rows, n_columns = padded.shape
    extent = (-1.5, n_columns - 1.5, -1.5, n_rows - 1.5)
    axis.contour(fine.numpy(), levels=[0.5], colors=[colour], linewidths=1.2, extent=extent)


def manipulated_map(
    images: tuple[Tensor, Tensor, Tensor],
    target_map: Tensor,
    original: Tensor,
    manipulated: Tensor,
    pool: int = 1,
) -> Figure:
    """Original and manipulated image, each with its map, PRCA-1 and the residual; below, what was aimed at.

    Parameters
    ----------
    images : tuple of tensors, shape (C, H, W)
        Original, manipulated and target image, values in [0, 1].
    target_map : tensor, shape (H, W)
        Map of the target image that the manipulation aimed at.
    original, manipulated : tensor, shape (2, H, W)
        Maps of the first PRCA component and of the residual.
    pool : int
        Average over squares of so many pixels.
    """
    for maps, name in ((original, "original"), (manipulated, "manipulated")):
        if maps.shape != (2, *target_map.shape):
            raise ValueError(
                f"{name} must have shape (2, H, W) = {(2, *target_map.shape)}, got {tuple(maps.shape)}"
            )
        check_finite(maps, name)
    check_finite(target_map, "target_map")
    # Half precision as float32: torch has no quantiles of it, and NumPy no bfloat16.
    original = as_float_tensor(original, "original").cpu()
    manipulated = as_float_tensor(manipulated, "manipulated").cpu()
    target_map = as_float_tensor(target_map, "target_map").cpu()
    if len(images) != 3:
        raise ValueError(f"images must be three: original, manipulated and target, got {len(images)}")
    pictures = []
    for image, name in zip(images, ("original", "manipulated", "target"), strict=True):
        check_finite(image, f"the {name} image")
        pictures.append(as_float_tensor(image, f"the {name} image").cpu())
    pool = as_int(pool, "pool", 1)

    figure = Figure(figsize=(9.2, 7.2), layout="constrained")
    axes = figure.subplots(3, 4)
    shown = [[maps.sum(0), maps[0], maps[1]] for maps in (original, manipulated)]
    parts = [[pooled(part, pool) for part in row] for row in (*shown, [target_map])]
    # One scale for all: a part can be compared with the whole.
    limit = colour_limits(torch.stack([part for row in parts for part in row]), "one")[0]
    titles = ("original", "manipulated", "target image")
    for row, (image, title) in enumerate(zip(pictures, titles, strict=True)):
        picture = image.clamp(0, 1).movedim(0, -1).squeeze(-1).numpy()
        axes[row, 0].imshow(picture, cmap="gray", vmin=0, vmax=1)
        axes[row, 0].set_title(title)
        for column, part in enumerate(parts[row], start=1):
            size = (int(target_map.shape[0]), int(target_map.shape[1]))
            draw_map(axes[row, column], part, limit, None, size, pool)
    for row, name in enumerate(("of the original", "of the manipulated")):
        for column, what in enumerate(("map", "PRCA-1", "residual"), start=1):
            axes[row, column].set_title(f"{what} {name}" if column == 1 else what)
    axes[2, 1].set_title("target map")
    difference = (pictures[1] - pictures[0]).abs().amax(0)
    axes[2, 2].imshow(difference.numpy(), cmap="gray_r", vmin=0, vmax=max(float(difference.max()), 1e-30))
    axes[2, 2].set_title(f"|change|, at most {number(float(difference.max()))}")
    for axis in axes.flat:
        axis.set_axis_off()
    return figure
