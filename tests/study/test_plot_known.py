"""Figures of known concepts and of manipulated maps: what is drawn, not how it looks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from study.plots import known_concepts, manipulated_map


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_drawn(dtype: torch.dtype) -> None:
    masks = torch.ones(1, 4, 4, dtype=torch.bool)
    maps, image = torch.rand(2, 4, 4).to(dtype), torch.rand(1, 4, 4).to(dtype)
    figure = known_concepts(image, masks, {"DRSA": maps[:1]}, ["ring"])
    assert figure.axes[-1].get_title() == "1.00"
    figure = manipulated_map((image, image, image), maps[0], maps, maps)
    shown = [np.asarray(figure.axes[i].images[0].get_array()) for i in (1, 2, 3)]
    np.testing.assert_allclose(shown[0], shown[1] + shown[2], rtol=1e-6)


def test_few_pixels_of_a_known_concept_differ_in_colour() -> None:
    """The quantile of a map that is zero nearly everywhere is 0; its largest pixel has the full colour."""
    maps = torch.zeros(1, 36, 36)
    maps[0, 0, :2] = torch.tensor([1.0, 4.0])
    figure = known_concepts(torch.rand(1, 36, 36), maps > 0, {"DRSA": maps}, ["ring"])
    assert figure.axes[-1].images[0].get_clim() == (-4, 4)
    bytes_ = torch.randint(256, (1, 36, 36), dtype=torch.uint8)
    shown = known_concepts(bytes_, maps > 0, {"DRSA": maps}, ["ring"]).axes[0].images[0]
    np.testing.assert_array_equal(np.asarray(shown.get_array()), bytes_[0])
