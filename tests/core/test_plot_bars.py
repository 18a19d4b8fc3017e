"""Bars of concepts and of the features of a table: what is drawn, not how it looks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drsa_core.plot import concept_bars, relevance_bars
from drsa_core.plot.style import AGAINST, FOR
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle


def test_bars_are_means_with_a_dot_for_each_example() -> None:
    relevance = torch.tensor([[1.0, -1.0, 2.0], [3.0, -1.0, 4.0]])
    figure = relevance_bars(relevance, ["a", "b", "c"], title="tabby")
    axis: Any = figure.axes[0]
    assert [bar.get_width() for bar in axis.patches] == [2.0, -1.0, 3.0]
    assert (
        axis.patches[0].get_facecolor() == axis.patches[2].get_facecolor() != axis.patches[1].get_facecolor()
    )
    assert [list(line.get_xdata()) for line in axis.lines[:3]] == [[1.0, 3.0], [-1.0, -1.0], [2.0, 4.0]]
    texts = [label.get_text() for label in axis.child_axes[0].get_yticklabels()]
    assert texts == ["R = 2 (50 %)", "R = -1 (-25 %)", "R = 3 (75 %)"]
    assert len(relevance_bars(relevance[0].numpy()).axes[0].lines) == 1  # no dots, only the zero line


def widths(axis: Axes) -> list[float]:
    return [bar.get_width() for bar in axis.patches if isinstance(bar, Rectangle)]


def test_bars_of_features() -> None:
    values = torch.tensor([[3.0, -1.0, 0.0, 0.5], [0.0, 2.0, -4.0, 0.5]])
    figure = concept_bars(
        values, ["a", "b", "c", "d"], ["one", "two"], values=torch.tensor([1, 2, 3, 4.5]), n_features=3
    )
    first, second = figure.axes
    assert [tick.get_text() for tick in first.get_yticklabels()] == ["c = 3", "a = 1", "b = 2", "1 others"]
    assert widths(first) == pytest.approx([0, 3, -1, 0.5])
    assert widths(second) == pytest.approx([-4, 0, 2, 0.5])
    assert to_hex(first.patches[1].get_facecolor()) == FOR
    assert to_hex(second.patches[0].get_facecolor()) == AGAINST
    assert first.get_xlim() == second.get_xlim()
    assert "R = 2.5" in first.get_title()
    assert "R = -1.5" in second.get_title()


def test_bars_of_many_examples_are_means() -> None:
    values = torch.randn(7, 2, 3, generator=torch.Generator().manual_seed(0)).double()
    axes = concept_bars(values, n_features=None).axes
    order = values.mean(0).abs().amax(0).argsort(descending=True)
    for k in range(2):
        expected = values.mean(0)[k, order].tolist()
        assert widths(axes[k]) == pytest.approx(expected)
    with pytest.raises(ValueError, match="features must be 3 strings"):
        concept_bars(values, ["a"])
    with pytest.raises(ValueError, match="values must be 3"):
        concept_bars(values, values=["1"])
    with pytest.raises(ValueError, match=r"\(K, F\) or \(N, K, F\)"):
        concept_bars(values[0, 0])
    with pytest.raises(ValueError, match=r"relevance must have shape \(K,\) or \(N, K\), got \(1, 1, 2\)"):
        relevance_bars(torch.zeros(1, 1, 2))
