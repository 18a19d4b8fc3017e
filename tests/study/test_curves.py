"""Curves: what is drawn, not how it looks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from drsa_core.evaluation import ConceptAblation, Summary
from study.curves import ablation_scatter, delta_aupc_bars, flipping_curves, scores_against, training_curves


def heights(line: Any) -> np.ndarray[Any, Any]:
    return np.array(line.get_ydata(), dtype=float)


def legend(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_flipping_curves_are_means_over_classes_with_their_area() -> None:
    # Classes x (two images) and y (one): the mean over classes is not that over images.
    scores = torch.tensor([[4.0, 0, 0], [2, 2, 0], [7, 3, 0]])
    figure = flipping_curves([0, 0.5, 1], {"LRP": scores, "zero": 0 * scores}, classes=["x", "x", "y"])
    (axis,) = figure.axes
    np.testing.assert_allclose(heights(axis.lines[0]), [5, 2, 0])
    # ½ (5 + 2)/2 + ½ (2 + 0)/2 = 2.25
    assert legend(axis) == ["LRP (2.25)", "zero (0.00)"]
    assert axis.get_xlabel() == "share of patches removed"
    per_image = heights(flipping_curves([0, 0.5, 1], {"LRP": scores}).axes[0].lines[0])
    np.testing.assert_allclose(per_image, scores.mean(0))


def test_a_class_has_one_colour_in_all_training_curves() -> None:
    figure = training_curves({"DSA": {"cat": [1.0], "dog": [2.0]}, "DRSA": {"dog": [3.0], "cat": [4.0]}})
    first, second = ({line.get_label(): line.get_color() for line in axis.lines} for axis in figure.axes)
    assert first == second
    assert len(set(first.values())) == 2
    # The legend also names a class that only the first method has.
    figure = training_curves({"DSA": {"cat": [1.0], "dog": [2.0]}, "DRSA": {"cat": [4.0]}})
    assert legend(figure.axes[-1]) == ["cat", "dog"]
    shown: Any = figure.axes[-1].get_legend()
    entries = shown.get_lines()
    assert entries[1].get_color() == figure.axes[0].lines[1].get_color() != entries[0].get_color()


def test_scores_against_numbers_and_layers() -> None:
    def summary(mean: float) -> Summary:
        return Summary(mean, 0.5, (mean - 1, mean + 1), 4, 40)

    panels = {"AUPC": {"DRSA": [summary(3), summary(2)], "DSA": [summary(4), summary(3)]}}
    figure = scores_against([2, 4], panels, "K", references={"AUPC": 5.0})
    (axis,) = figure.axes
    container: Any = axis.containers[0]
    np.testing.assert_allclose(heights(container.lines[0]), [3, 2])
    assert axis.get_xscale() == "log"
    assert set(legend(axis)) == {"DRSA", "DSA", "no projection"}
    named = scores_against(["blocks.3", "blocks.4"], panels, "layer")
    assert [text.get_text() for text in named.axes[0].get_xticklabels()] == ["blocks.3", "blocks.4"]


def test_a_method_has_one_colour_in_all_panels_of_scores() -> None:
    def summaries(mean: float) -> list[Summary]:
        return [Summary(mean, 0.5, (0.0, 1.0), 4, 40)] * 2

    panels = {
        "AUPC": {"DRSA": summaries(1), "DSA": summaries(2)},
        "peakness": {"DSA": summaries(3), "random": summaries(4), "DRSA": summaries(5)},
    }
    figure = scores_against([2, 4], panels, "K", references={"peakness": 6.0})
    looks: list[dict[str, Any]] = []
    for axis in figure.axes:
        containers: list[Any] = list(axis.containers)
        lines = {line.get_label(): line.lines[0] for line in containers}
        looks.append({name: (line.get_color(), line.get_marker()) for name, line in lines.items()})
    assert looks[0] == {name: looks[1][name] for name in ("DRSA", "DSA")}
    assert len(set(looks[1].values())) == 3
    assert legend(figure.axes[0]) == ["DRSA", "DSA", "no projection", "random"]


def test_delta_aupc_bars_are_sorted_by_the_last_method() -> None:
    figure = delta_aupc_bars({"DSA": {"cat": 1.0, "zebra": 2.0}, "DRSA": {"cat": 1.5, "zebra": 3.0}})
    axis: Any = figure.axes[0]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["cat", "zebra"]  # the last one is on top
    assert [bar.get_width() for bars in axis.containers for bar in bars.patches] == [1, 2, 1.5, 3]


def test_ablation_has_a_panel_for_each_method() -> None:
    relevance = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    result = ConceptAblation(relevance, 2 * relevance.bfloat16(), torch.zeros(2), ("a", "b"))
    figure = ablation_scatter({"DRSA": result, "random": result})
    assert [axis.get_title() for axis in figure.axes] == ["DRSA: r = 1.00", "random: r = 1.00"]
    np.testing.assert_allclose(heights(figure.axes[0].lines[1]), [4, 10])


def test_bad_curves_are_named() -> None:
    with pytest.raises(ValueError, match=r"scores of 'LRP' must have shape \(n_images, 2\), got \(1, 3\)"):
        flipping_curves([0, 1], {"LRP": torch.zeros(1, 3)})
    with pytest.raises(ValueError, match="the same classes; 'DSA' differs"):
        delta_aupc_bars({"DSA": {"cat": 1.0}, "DRSA": {"dog": 1.0}})
