"""The test bed with planted concepts: its ground truth is right, and the matching is what it says."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from study.synthetic import PATTERN_NAMES, PATTERN_SIZE, PlantedConcepts, match_masks, patterns


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_classes_are_the_overlapping_sets() -> None:
    task = PlantedConcepts()
    assert len(task.classes) == 15
    assert {len(set(c)) for c in task.classes} == {4}


def test_masks_hold_the_patterns_of_the_class() -> None:
    """Without noise, the image is the pattern times one contrast inside each mask, and zero outside."""
    task = PlantedConcepts(noise=0.0)
    scenes = task.sample(20, generator())
    for image, label, masks in zip(scenes.images[:, 0], scenes.labels, scenes.masks, strict=True):
        shown = task.classes[int(label)]
        assert masks.flatten(1).any(1).nonzero().flatten().tolist() == list(shown)
        assert masks.sum(0).max() == 1  # no two overlap
        assert not image[~masks.any(0)].any()
        for m in shown:
            ratio = image[masks[m]].view(PATTERN_SIZE, PATTERN_SIZE) / patterns()[m]
            assert 0.7 <= float(ratio.min()) <= 1
            torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio))


def test_patterns_differ_and_use_both_signs() -> None:
    shapes = patterns()
    assert shapes.shape == (len(PATTERN_NAMES), PATTERN_SIZE, PATTERN_SIZE)
    assert set(shapes.unique().tolist()) == {-1.0, 1.0}
    cosines = (shapes.flatten(1) @ shapes.flatten(1).T) / PATTERN_SIZE**2
    assert float((cosines - torch.eye(len(shapes))).abs().max()) < 0.5


def test_strengths_scale_contrast_and_seeds_repeat() -> None:
    strong, weak = PlantedConcepts(noise=0.0), PlantedConcepts((0.5,) * 6, noise=0.0)
    first, second = strong.sample(5, generator(3)), weak.sample(5, generator(3))
    torch.testing.assert_close(second.images, 0.5 * first.images)
    assert strong.sample(5, generator(3)).images.equal(first.images)
    before = torch.get_rng_state()
    strong.sample(1, generator())
    assert torch.get_rng_state().equal(before)


def test_places_are_spread_over_the_whole_image() -> None:
    scenes = PlantedConcepts().sample(400, generator(), label=2)
    covered = scenes.masks.any(1).float().mean(0)
    assert float(covered.max()) < 0.7
    assert float(covered[1:-1, 1:-1].min()) > 0


def test_matching_by_hand() -> None:
    """Two maps, two masks: negative relevance does not count, the assignment is crossed."""
    masks = torch.zeros(1, 2, 1, 4, dtype=torch.bool)
    masks[0, 0, 0, 0], masks[0, 1, 0, 1] = True, True
    maps = torch.tensor([[[[1.0, 3.0, -9.0, 0.0]], [[1.0, 0.0, 0.0, 1.0]]]])
    result = match_masks(maps, masks)
    torch.testing.assert_close(result.inside, torch.tensor([[0.25, 0.75], [0.5, 0.0]], dtype=torch.float64))
    assert result.subspace_of == (1, 0)
    assert result.score == pytest.approx((0.5 + 0.75) / 2)
    assert result.covered == 2


def test_maps_in_half_precision_are_added_up_in_float32() -> None:
    """Channels of 40 000 and more leave the range of float16 together."""
    maps = (torch.rand(2, 2, 3, 4, 4, generator=generator()) * 60_000).half()
    masks = torch.rand(2, 2, 4, 4, generator=generator(1)) > 0.5
    found, expected = match_masks(maps, masks), match_masks(maps.double(), masks)
    torch.testing.assert_close(found.inside, expected.inside, rtol=1e-6, atol=0)  # float32 has 6e-8


def test_matching_is_the_best_of_all_permutations() -> None:
    maps = torch.randn(6, 4, 3, 8, 8, generator=generator())
    masks = torch.rand(6, 4, 8, 8, generator=generator(1)) > 0.7
    result = match_masks(maps, masks)
    best = max(
        sum(float(result.inside[k, m]) for m, k in enumerate(order)) / 4 for order in permutations(range(4))
    )
    assert result.score == pytest.approx(best, abs=1e-12)


def test_shared_and_missing_concepts() -> None:
    """Two maps on one concept cover it once; a concept without a map counts 0, an empty map as well."""
    masks = torch.eye(3, dtype=torch.bool).view(1, 3, 1, 3)
    shared = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 0, 0]]).view(1, 3, 1, 3)
    assert match_masks(shared, masks).score == pytest.approx(1 / 3)
    single = match_masks(torch.eye(3)[1:2].view(1, 1, 1, 3), masks)
    assert single.subspace_of == (-1, 0, -1)
    assert single.score == pytest.approx(1 / 3)
    assert single.covered == 1
    # The empty maps of the first two concepts cover neither.
    assert match_masks(torch.diag(torch.tensor([0.0, 0, 1])).view(1, 3, 1, 3), masks).covered == 1
    assert match_masks(torch.zeros(1, 3, 1, 3), masks).covered == 0


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="2 to 8 numbers above 0 and up to 1"):
        PlantedConcepts((1.0,) * 9)
    with pytest.raises(ValueError, match="multiple of 12"):
        PlantedConcepts(size=40)
    with pytest.raises(ValueError, match="below 6"):
        PlantedConcepts(n_shown=6)
    with pytest.raises(ValueError, match="integer from 0 to 14, got 15"):
        PlantedConcepts().sample(1, generator(), label=15)
    masks = torch.ones(1, 2, 4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"of the same images; got \(1, 2, 4, 5\)"):
        match_masks(torch.zeros(1, 2, 4, 5), masks)
    with pytest.raises(ValueError, match="no mask of an image may be empty"):
        match_masks(torch.zeros(1, 2, 4, 4), torch.zeros_like(masks))
    with pytest.raises(ValueError, match="NaN"):
        match_masks(torch.full((1, 2, 4, 4), torch.nan), masks)
