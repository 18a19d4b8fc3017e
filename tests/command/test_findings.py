"""What the numbers say: shares, two groups of images, unusual images, areas."""

from __future__ import annotations

from statistics import median

import pytest
import torch
from drsa_audit.findings import (
    half_area,
    mixtures,
    outliers,
    share_against,
    shares,
    steady_shares,
    two_groups,
    two_groups_from,
)


def spread(n_images: int, n_concepts: int, seed: int = 0) -> torch.Tensor:
    """Relevance whose mixtures vary smoothly."""
    generator = torch.Generator().manual_seed(seed)
    return 1 + 0.3 * torch.randn(n_images, n_concepts, generator=generator).clamp(-2, 2)


def test_shares_are_those_of_positive_relevance() -> None:
    relevance = torch.tensor([[3.0, 1.0], [0.0, -2.0]])
    assert shares(relevance).tolist() == [0.75, 0.25]
    assert mixtures(relevance).tolist() == [[0.75, 0.25], [0.0, 0.0]]  # nothing positive: nothing to share
    assert share_against(relevance) == pytest.approx(2 / 6)
    # Of images with little evidence they are those of the mean image: 10, 1 and 1; the mean is 4.
    relevance = torch.tensor([[8.0, 2.0], [1.0, -3.0], [0.0, 1.0]])
    assert steady_shares(relevance).tolist() == [[0.8, 0.2], [0.25, 0.0], [0.0, 0.25]]
    assert not steady_shares(torch.full((3, 2), -1.0)).any()


def test_a_concept_that_is_there_or_not_is_found_with_its_images() -> None:
    relevance = spread(20, 3)
    relevance[:, 2] = 0.05
    relevance[[1, 4, 5, 9, 13], 2] = 4.0
    (found,) = two_groups(relevance)
    assert (found.concepts, found.images) == ((2,), [1, 4, 5, 9, 13])
    expected = steady_shares(relevance)[:, 2]
    assert found.share_there == pytest.approx(float(expected[found.images].mean()))
    rest = [n for n in range(20) if n not in found.images]
    assert found.share_elsewhere == pytest.approx(float(expected[rest].mean()))
    relevance[[1, 4, 5], 2] = 0.05  # two images are too few for a group
    assert two_groups(relevance) == []


def test_concepts_of_the_same_images_are_one_finding() -> None:
    relevance = torch.full((20, 3), 0.02)
    relevance[:, 2] = 1.0
    relevance[:8, 0] = 1.0
    relevance[:8, 1] = 0.9
    (found,) = two_groups(relevance)
    assert set(found.concepts) == {0, 1}
    assert found.images == list(range(8))


def test_a_concept_that_is_left_where_others_are_missing_is_no_finding() -> None:
    relevance = torch.full((20, 2), 0.0)
    relevance[:, 0] = 1.0
    relevance[:10, 1] = 10.0
    (found,) = two_groups(relevance)  # the first one has 9 % and 100 %, but always the same relevance
    assert found.concepts == (1,)
    assert two_groups(torch.full((10, 2), -1.0)) == []
    assert all(two_groups(spread(24, 4, seed)) == [] for seed in range(20))


@pytest.mark.parametrize("n_images", [24, 40, 100])
def test_a_smooth_spread_rarely_has_two_groups(n_images: int) -> None:
    """Explained variance of the best split of a rectified normal spread, all splits one by one."""
    generator = torch.Generator().manual_seed(n_images)
    exceeded = 0
    for _ in range(200):
        values = torch.randn(n_images, generator=generator).clamp(min=0).sort().values
        parts = [(values[:cut], values[cut:]) for cut in range(1, n_images)]
        left = min(sum(float((part - part.mean()).square().sum()) for part in pair) for pair in parts)
        exceeded += 1 - left / float((values - values.mean()).square().sum()) > two_groups_from(n_images)
    assert exceeded <= 8  # two are expected


def test_an_unusual_mixture_is_an_outlier() -> None:
    usual = spread(40, 3)
    images = spread(10, 3, seed=1)
    images[6] = torch.tensor([0.1, 0.1, 6.0])
    (found,) = outliers(images, usual)
    assert (found.image, found.concept) == (6, 2)
    assert found.share == pytest.approx(6 / 6.2, abs=1e-6)  # float32 entries
    assert outliers(spread(10, 3, seed=2), usual) == []
    # An image that no concept speaks for has no shares, not a third of no evidence.
    (found,) = outliers(torch.tensor([[-3.0, -1.0, -2.0]]), torch.tensor([[9.0, 1.0, 0.0]]) + 0.1 * usual)
    assert (found.image, found.concept, found.share) == (0, 0, 0.0)


def test_the_usual_mixture_of_an_even_number_of_images_lies_between_two_of_them() -> None:
    usual = torch.tensor([[1.0, 9], [2, 8], [4, 6], [6, 4]])
    (found,) = outliers(torch.tensor([[10.0, 0]]), usual)
    # By the formulas: shares 0.1, 0.2, 0.4 and 0.6 of the first concept, the rest of the second.
    parts = [0.1, 0.2, 0.4, 0.6]
    middle = [median(parts), median([1 - part for part in parts])]
    distances = [0.5 * (abs(part - middle[0]) + abs(1 - part - middle[1])) for part in parts]
    spread_of_distances = 1.4826 * median([abs(d - median(distances)) for d in distances])
    expected = (0.5 * (abs(1 - middle[0]) + abs(0 - middle[1])) - median(distances)) / spread_of_distances
    assert found.usual_share == pytest.approx(0.3)
    assert found.distance == pytest.approx(expected)


def test_half_of_a_map_lies_on_the_smallest_part_that_holds_it() -> None:
    maps = torch.zeros(2, 10, 10)
    maps[0, 0, :4] = torch.tensor([5.0, 1.0, 1.0, 1.0])
    maps[1] = 1.0
    maps[1, 0, 0] = -50.0  # what counts against is left out
    assert half_area(maps).tolist() == pytest.approx([0.01, 0.5])
    assert half_area(torch.zeros(1, 4, 4)).isnan().all()
