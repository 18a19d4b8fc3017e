"""Figures of showcases and of known concepts: what is drawn, not how it looks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from study.clever_hans import roc_curve
from study.matching import match_concepts
from study.plots import (
    confusion_matrices,
    known_concepts,
    manipulated_map,
    relevance_boxes,
    relevance_scatter,
    roc_curves,
)

LABELS = torch.tensor([0, 1, 2]).repeat(10)
RELEVANCE = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))


def test_roc_curves_are_drawn_with_their_area() -> None:
    curve = roc_curve(torch.tensor([3.0, 1.0, 2.0, 2.0]), torch.tensor([1, 0, 1, 0]))
    (axis,) = roc_curves({"S1": curve, "SpRAy": curve}).axes
    legend = axis.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "chance (0.500)",
        "S1 (0.875)",
        "SpRAy (0.875)",
    ]
    np.testing.assert_array_equal(axis.lines[1].get_xdata(), curve.false_positive_rate)
    with pytest.raises(ValueError, match="at least one RocCurve"):
        roc_curves({})


def test_confusion_matrices_show_counts_and_accuracy() -> None:
    matrix = torch.tensor([[3, 1], [0, 4]])
    figure = confusion_matrices({"original": matrix, "refined": matrix.T}, ["box", "disc"])
    assert [axis.get_title() for axis in figure.axes] == [
        "original\naccuracy 0.875",
        "refined\naccuracy 0.875",
    ]
    assert [text.get_text() for text in figure.axes[0].texts] == ["3", "1", "0", "4"]
    with pytest.raises(ValueError, match="square and of one size"):
        confusion_matrices({"a": matrix, "b": torch.zeros(3, 3)})
    # Of rows of 4 and 1 images the mean of the diagonal is not the accuracy, and 0.75 was written as 0.
    with pytest.raises(ValueError, match="'a' must hold counts"):
        confusion_matrices({"a": matrix / matrix.sum(1, keepdim=True)})
    with pytest.raises(TypeError, match="must be a torch tensor, got ndarray"):
        confusion_matrices({"a": matrix.numpy()})  # type: ignore[dict-item]


def test_boxes_mark_specific_concepts() -> None:
    relevance = RELEVANCE.clone()
    relevance[LABELS == 1, 2] += 10
    table = match_concepts(relevance, LABELS, 0.75, 0.85)
    figure = relevance_boxes(relevance, LABELS, table, ["a", "b", "c"], ["one", "(2)", "three", "four"])
    assert [axis.get_title() for axis in figure.axes] == ["one", "(2)", "three", "four"]
    with pytest.raises(ValueError, match="names must be 4 strings"):
        relevance_boxes(relevance, LABELS, table, concept_names=["one"])
    assert len(figure.axes) == 4
    for k, axis in enumerate(figure.axes):
        red = [patch.get_facecolor()[0] > patch.get_facecolor()[1] for patch in axis.patches]
        assert red == table.specific[:, k].tolist()
        assert np.asarray(axis.lines[-1].get_xdata())[0] == pytest.approx(float(table.overall_quantiles[k]))
        right = [np.asarray(patch.get_path().vertices)[:, 0].max() for patch in axis.patches]
        np.testing.assert_allclose(right, table.class_quantiles[:, k], rtol=1e-6)
    with pytest.raises(ValueError, match=r"no image of the table's classes \[2\]"):
        relevance_boxes(relevance[LABELS < 2], LABELS[LABELS < 2], table)


def test_scatter_has_one_cloud_for_each_class() -> None:
    figure = relevance_scatter(RELEVANCE, LABELS, (3, 0, 1), {0: "tabby"})
    (axis,) = figure.axes
    assert [cloud.get_label() for cloud in axis.collections] == ["tabby", "1", "2"]
    labels = [getattr(axis, f"get_{d}label")() for d in "xyz"]
    assert labels == ["R of S4", "R of S1", "R of S2"]
    with pytest.raises(ValueError, match="three numbers below K = 4"):
        relevance_scatter(RELEVANCE, LABELS, (0, 1, 4))


def test_squares_of_a_manipulated_map_reach_the_edge() -> None:
    maps = torch.arange(50.0).reshape(2, 5, 5)
    figure = manipulated_map((torch.rand(3, 5, 5),) * 3, maps[0], maps, maps, pool=2)
    shown = np.asarray(figure.axes[2].images[0].get_array())  # the first component of the original
    assert shown.shape == (3, 3)
    assert shown[2, 2] == 24  # the corner by itself
    assert shown[2, 0] == (20 + 21) / 2


def test_known_concepts_shows_shares() -> None:
    masks = torch.zeros(2, 4, 4, dtype=torch.bool)
    masks[0, 0, 0], masks[1, 2, 2] = True, True
    maps = torch.zeros(2, 4, 4)
    maps[0, 0, 0], maps[0, 1, 1], maps[0, 3, 3] = 3.0, 1.0, -5.0
    figure = known_concepts(torch.rand(1, 4, 4), masks, {"DRSA": maps}, ["ring", "cross"])
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["image", "ring", "cross", "", "0.75", "none"]
    with pytest.raises(ValueError, match=r"maps of DRSA must have shape \(2, 4, 4\)"):
        known_concepts(torch.rand(1, 4, 4), masks, {"DRSA": maps[:1]}, ["ring", "cross"])
    with pytest.raises(ValueError, match="2 strings"):
        known_concepts(torch.rand(1, 4, 4), masks, {"DRSA": maps}, ["ring"])


def test_manipulated_map_adds_up_and_shares_a_scale() -> None:
    images = tuple(torch.rand(3, 3, 8, 8))
    original, manipulated, target = torch.randn(2, 8, 8), torch.randn(2, 8, 8), torch.randn(8, 8)
    figure = manipulated_map((images[0], images[1], images[2]), target, original, manipulated)
    panels = [axis.images[0] if axis.images else None for axis in figure.axes]
    whole, parts = panels[5], panels[6:8]
    assert whole is not None
    assert parts[0] is not None
    assert parts[1] is not None
    shown = [np.asarray(panel.get_array()) for panel in (whole, *parts)]  # type: ignore[union-attr]
    np.testing.assert_allclose(shown[0], shown[1] + shown[2], rtol=1e-6, atol=1e-6)
    assert whole.get_clim() == parts[0].get_clim() == panels[9].get_clim()  # type: ignore[union-attr]
    slight = manipulated_map((images[0], images[0] + 4e-4, images[2]), target, original, manipulated)
    assert slight.axes[10].get_title() == "|change|, at most 0.0004"
    with pytest.raises(ValueError, match=r"original must have shape \(2, H, W\)"):
        manipulated_map((images[0], images[1], images[2]), target, original[:1], manipulated)
