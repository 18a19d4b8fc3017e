"""Figures: what is drawn, not how it looks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drsa_core.plot import concept_maps


def test_panels_carry_maps_and_shares() -> None:
    maps = torch.zeros(2, 3, 4, 4)
    maps[0, 0, 0, 0], maps[1, 1, 2, 2] = 3.0, -1.0
    figure = concept_maps(torch.rand(3, 4, 4), maps, names=["ball", "field"])
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["input", "all\nR = 2", "ball\nR = 3 (150 %)", "field\nR = -1 (-50 %)"]
    panels = [axis.images[0] for axis in figure.axes[1:]]
    torch.testing.assert_close(torch.as_tensor(np.asarray(panels[1].get_array())), maps[0].sum(0))
    assert panels[1].get_clim() == panels[2].get_clim()  # one scale for all concepts
    assert panels[1].get_clim()[0] == -panels[1].get_clim()[1]


def test_grey_images_pooling_and_empty_maps() -> None:
    figure = concept_maps(torch.rand(1, 8, 8), torch.zeros(2, 1, 8, 8), pool=4)
    assert np.asarray(figure.axes[1].images[0].get_array()).shape == (2, 2)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"\(K, C, H, W\) with the image's .* \(3, 4, 4\), got \(2, 4, 4\)"):
        concept_maps(torch.rand(3, 4, 4), torch.zeros(2, 4, 4))
    with pytest.raises(ValueError, match="2 strings, one for each map, got 1"):
        concept_maps(torch.rand(3, 4, 4), torch.zeros(2, 3, 4, 4), names=["x"])
    with pytest.raises(ValueError, match="NaN"):
        concept_maps(torch.rand(1, 1, 1), torch.full((1, 1, 1, 1), torch.nan))
