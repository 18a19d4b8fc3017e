"""Figures: what is drawn, not how it looks."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from drsa_core.plot import concept_grid, concept_maps
from matplotlib.text import Text


def panels(figure: Any) -> list[tuple[str, Any]]:
    """(title, image) of every axis that holds one."""
    return [(axis.get_title(), axis.images[-1]) for axis in figure.axes if axis.images]


def values(image) -> torch.Tensor:
    return torch.as_tensor(np.asarray(image.get_array()))


@pytest.fixture
def maps() -> torch.Tensor:
    maps = torch.zeros(2, 3, 4, 4)
    maps[0, 0, 0, 0], maps[1, 1, 2, 2] = 3.0, -1.0
    return maps


def test_panels_carry_maps_relevance_and_shares(maps) -> None:
    figure = concept_maps(torch.rand(3, 4, 4), maps, names=["ball", "field"])
    titles, images = zip(*panels(figure), strict=True)
    assert titles == ("input", "sum of concepts\nR = 2", "ball\nR = 3 (150 %)", "field\nR = -1 (-50 %)")
    torch.testing.assert_close(values(images[1]), maps.sum((0, 1)))
    torch.testing.assert_close(values(images[2]), maps[0].sum(0))
    torch.testing.assert_close(values(images[3]), maps[1].sum(0))


def test_one_symmetric_scale_for_all_panels_unless_asked_otherwise(maps) -> None:
    def limits(scale: Any) -> list[tuple[float, float]]:
        # A quantile between order statistics would not be a number one can write down: fill the panels.
        full = torch.stack([torch.full((4, 4), 3.0), torch.full((4, 4), -1.0)])
        return [
            image.get_clim() for _, image in panels(concept_maps(torch.rand(1, 4, 4), full, scale=scale))[1:]
        ]

    assert limits("one") == [(-3.0, 3.0)] * 3
    assert limits("concepts") == [(-2.0, 2.0), (-3.0, 3.0), (-3.0, 3.0)]
    assert limits("each") == [(-2.0, 2.0), (-3.0, 3.0), (-1.0, 1.0)]
    with pytest.raises(ValueError, match="'one', 'concepts' or 'each', got 'log'"):
        concept_maps(torch.rand(3, 4, 4), maps, scale="log")  # type: ignore[arg-type]


def test_the_residual_gets_a_panel_when_there_is_one(maps) -> None:
    image, whole = torch.rand(3, 4, 4), maps.sum(0)
    whole[2, 3, 3] += 2
    figure = concept_maps(image, maps, whole=whole)
    titles, images = zip(*panels(figure), strict=True)
    assert titles[1:] == (
        "standard map\nR = 4",
        "S1\nR = 3 (75 %)",
        "S2\nR = -1 (-25 %)",
        "residual\nR = 2 (50 %)",
    )
    torch.testing.assert_close(values(images[-1]), (whole - maps.sum(0)).sum(0))
    assert "Σ R_k = 2, standard map 4; largest difference at a pixel 0.67" in figure.get_supxlabel()
    # Rounding is no residual; but who wants to see it may.
    rounded = maps.sum(0) * (1 + 1e-6)
    assert len(panels(concept_maps(image, maps, whole=rounded))) == 4
    assert len(panels(concept_maps(image, maps, whole=rounded, residual=True))) == 5
    assert len(panels(concept_maps(image, maps, whole=whole, residual=False))) == 4
    # A standard map of zeros does not agree with anything.
    nothing = concept_maps(image, maps, whole=torch.zeros(3, 4, 4))
    assert panels(nothing)[-1][0].startswith("residual")
    assert "largest difference at a pixel inf of" in nothing.get_supxlabel()


def test_shares_are_left_out_where_the_parts_cancel() -> None:
    maps = torch.stack([torch.ones(4, 4), -torch.ones(4, 4)])
    assert [title for title, _ in panels(concept_maps(torch.rand(1, 4, 4), maps))][2] == "S1\nR = 16"
    figure = concept_maps(torch.rand(1, 8, 8), torch.zeros(2, 1, 8, 8), pool=4)  # nothing is relevant: no NaN
    assert [title for title, _ in panels(figure)][1:] == ["sum of concepts\nR = 0", "S1\nR = 0", "S2\nR = 0"]


def test_pooling_averages_and_overlay_lets_the_photograph_through(maps) -> None:
    image = torch.rand(3, 4, 4)
    figure = concept_maps(image, maps, pool=2, overlay=True)
    photograph, heatmap = figure.axes[2].images
    torch.testing.assert_close(values(photograph), image.mean(0), check_dtype=False)
    torch.testing.assert_close(values(heatmap), torch.tensor([[0.75, 0.0], [0.0, 0.0]]))
    opacity = np.asarray(heatmap.get_alpha())
    assert opacity[0, 0] > 0.9
    assert opacity[1, 1] == 0
    # 5 pixels in squares of 2: the last square averages what is there.
    odd = concept_maps(torch.rand(1, 5, 5), torch.ones(1, 5, 5), pool=2)
    torch.testing.assert_close(values(panels(odd)[1][1]), torch.ones(3, 3))


def test_squares_lie_where_their_pixels_are() -> None:
    """20 pixels in squares of 8: the last square is cut off at the edge, the others do not shrink for it."""
    relevance = torch.zeros(1, 20, 20)
    relevance[0, 17, 9] = 1
    for figure in (
        concept_maps(torch.rand(1, 20, 20), relevance, pool=8),
        concept_grid(torch.rand(1, 1, 20, 20), relevance[None], pool=8),
    ):
        (axis,) = [axis for axis in figure.axes if axis.get_title().startswith("S1")]
        left, right, bottom, top = axis.images[-1].get_extent()
        side = (right - left) / 3
        assert left + side * 1 <= 9 - 0.5 <= 9 + 0.5 <= left + side * 2
        assert top + side * 2 <= 17 - 0.5 <= 17 + 0.5 <= top + side * 3
        assert bottom > top
        assert side == 8
        assert (axis.get_xlim(), axis.get_ylim()) == ((-0.5, 19.5), (19.5, -0.5))


def test_grid_has_a_row_for_each_image(maps) -> None:
    both = torch.stack([maps, -2 * maps])
    figure = concept_grid(torch.rand(2, 3, 4, 4), both, labels=["first", "second"])
    drawn = panels(figure)
    assert [title for title, _ in drawn[:4]] == ["input", "sum of concepts", "S1", "S2"]
    torch.testing.assert_close(values(drawn[6][1]), both[1, 0].sum(0))
    assert drawn[1][1].get_clim() == drawn[2][1].get_clim()  # one scale along a row
    assert drawn[5][1].get_clim()[1] == pytest.approx(2 * drawn[1][1].get_clim()[1])  # each row its own
    labels = [axis.get_ylabel() for axis in figure.axes]
    assert (labels[0], labels[4]) == ("first", "second")
    assert figure.axes[6].get_xlabel() == "R = -6"  # no shares of a negative whole


def test_dollars_in_names_and_titles_are_no_formulas(maps) -> None:
    names, title = ["5 $ or 6 $", "$\\frac$"], "$\\oops$.jpg"
    row = concept_maps(torch.rand(3, 4, 4), maps, names, title=title)
    grid = concept_grid(torch.rand(1, 3, 4, 4), maps[None], names, labels=[title], title=title)
    for figure in (row, grid):
        figure.savefig(io.BytesIO())  # formulas are read when they are drawn
        texts = [text for text in figure.findobj(Text) if "$" in text.get_text()]
        assert len(texts) >= 3
        assert not any(text.get_parse_math() for text in texts)


def test_figures_are_written_and_inputs_left_alone(maps, tmp_path) -> None:
    image, before = torch.rand(3, 4, 4), maps.clone()
    concept_maps(image, maps.requires_grad_(), overlay=True).savefig(tmp_path / "maps.png")
    concept_grid(image[None], maps[None], overlay=True).savefig(tmp_path / "grid.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 1000 for name in ("maps", "grid"))
    torch.testing.assert_close(maps.detach(), before)


IMAGE, MAPS = torch.rand(3, 4, 4), torch.rand(2, 3, 4, 4)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (
            r"maps must have shape \(K, C, 4, 4\) or \(K, 4, 4\).* got \(4, 4\)",
            lambda: concept_maps(IMAGE, MAPS[0, 0]),
        ),
        (r"whole must have shape \(C, 4, 4\)", lambda: concept_maps(IMAGE, MAPS, whole=MAPS)),
        ("2 strings, one for each map, got 'ab'", lambda: concept_maps(IMAGE, MAPS, names="ab")),
        ("NaN", lambda: concept_maps(IMAGE, MAPS * torch.nan)),
        ("undo the normalisation", lambda: concept_maps(IMAGE * 4 - 2, MAPS)),
        (r"shape \(C, H, W\) with C = 1 or 3", lambda: concept_maps(IMAGE[:2], MAPS)),
        ("pool must be an integer", lambda: concept_maps(IMAGE, MAPS, pool=0)),
        (r"maps must have shape \(2, K, C, 4, 4\)", lambda: concept_grid(MAPS, MAPS[None])),
        ("labels must be 1 strings", lambda: concept_grid(IMAGE[None], MAPS[None], labels=["a", "b"])),
    ],
)
def test_bad_input_is_named(message: str, call) -> None:
    with pytest.raises(ValueError, match=message):
        call()
