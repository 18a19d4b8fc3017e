"""Total relevance, separability, peakness, statistics over classes, prototypes: hand-computed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from drsa_core import Pairs, RandomSubspaces, Subspaces
from drsa_core.evaluation import (
    bootstrap_interval,
    class_means,
    delta_aupc,
    peakness,
    select_prototypes,
    separability,
    summarise,
    top_images,
    total_relevance,
)
from hypothesis import given, settings
from hypothesis import strategies as st

# ---------------------------------------------------------------------- scores


def test_scores_of_three_pixels_and_two_concepts() -> None:
    # R_pk for pixels (rows) and concepts (columns): (4, 1), (−1, 2), (0, 3)
    maps = torch.tensor([[4.0, -1, 0], [1, 2, 3]]).reshape(1, 2, 1, 1, 3)
    assert total_relevance(maps).tolist() == [[3, 6]]
    assert separability(maps).tolist() == [4 + 2 + 3 - 6]
    assert peakness(maps).tolist() == [4 + 3]


def test_one_concept_or_equal_concepts_are_not_separable() -> None:
    whole = torch.randn(3, 1, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(separability(whole), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(separability(whole.sum(2)), torch.zeros(3, dtype=torch.float64))
    same = whole.expand(3, 4, 3, 5, 5)
    torch.testing.assert_close(separability(same), torch.zeros(3, dtype=torch.float64))


def test_concepts_are_not_taken_for_channels() -> None:
    """(N, K, H, W), such as `token_maps`, and (N, C, H, W) look the same."""
    maps = torch.randn(3, 4, 3, 5, 5, generator=torch.Generator().manual_seed(0)).double()
    for score in (total_relevance, separability, peakness):
        with pytest.raises(ValueError, match=r"maps\[:, :, None\] for K = 4 maps without channels"):
            score(maps.sum(2))
        torch.testing.assert_close(score(maps.sum(2)[:, :, None]), score(maps))


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_scores_follow_their_definition(seed: int, n_concepts: int) -> None:
    maps = torch.randn(2, n_concepts, 3, 4, 3, generator=torch.Generator().manual_seed(seed))
    for n in range(2):
        r = maps[n].double().sum(1).flatten(1).T.tolist()  # r[p][k]
        largest_sum = max(sum(row[k] for row in r) for k in range(n_concepts))
        literal = sum(max(row) for row in r) - largest_sum
        assert float(separability(maps)[n]) == pytest.approx(literal, abs=1e-12)
        assert literal >= -1e-12
        peaks = sum(max(row[k] for row in r) for k in range(n_concepts))
        assert float(peakness(maps)[n]) == pytest.approx(peaks, abs=1e-12)


# ---------------------------------------------------------------------- statistics


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_labels_of_every_kind(kind) -> None:
    """Elements of a tensor have different hashes: each would be a class."""
    assert class_means([1.0, 2, 3, 10], kind([4, 4, 4, 7])) == {4: 2.0, 7: 10.0}


def test_instances_are_averaged_before_classes() -> None:
    values, classes = [1.0, 2, 3, 10], ["cat", "cat", "cat", "dog"]
    assert class_means(values, classes) == {"cat": 2, "dog": 10}
    summary = summarise(torch.tensor(values), classes)
    assert summary.mean == 6  # not 4, the mean of all
    # Class means 2 and 10: standard deviation √32, over √2 classes
    assert summary.standard_error == pytest.approx(4)
    assert (summary.n_classes, summary.n_instances) == (2, 4)
    assert str(summary) == "6.000 ± 4.000"
    assert summary.interval[0] < 6 < summary.interval[1]
    assert math.isnan(summarise([1.0, 2], [0, 0]).standard_error)


def test_bootstrap_interval_covers_as_it_says() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        values = generator.normal(size=60)
        low, high = bootstrap_interval(values, [0, 1] * 30, level=0.9, n_resamples=300, random_state=trial)
        covered += low < 0 < high
    # Binomial with p = 0.9 and n = 200 has a standard deviation of 4; percentile intervals are a bit narrow.
    assert 164 <= covered <= 193
    constant = bootstrap_interval([2.0, 2, 2], [0, 0, 1])
    assert constant == (2, 2)


def test_bootstrap_over_classes_sees_their_spread() -> None:
    values, classes = [0.0] * 5 + [10.0] * 5, [0] * 5 + [1] * 5
    assert bootstrap_interval(values, classes) == (5, 5)
    assert bootstrap_interval(values, classes, resample_classes=True) == (0, 10)


def test_a_class_that_is_drawn_twice_has_its_instances_drawn_twice() -> None:
    values, classes = [-1.0, 1.0] * 32, [k for k in range(4) for _ in range(16)]
    # No spread over classes: a resample is the mean of 64 draws of ±1, with a deviation of 1/8, whether the
    # classes are drawn or not. Draws shared by the places of a class would make it √1.75 times as wide, 0.32.
    for resample_classes in (False, True):
        low, high = bootstrap_interval(values, classes, resample_classes=resample_classes)
        assert -low == pytest.approx(1.96 / 8, abs=1 / 32)  # means are multiples of 1/32
        assert high == pytest.approx(1.96 / 8, abs=1 / 32)


def test_delta_aupc_ranks_the_classes() -> None:
    gains = delta_aupc([5.0, 7, 4, 4], [4.0, 6, 1, 2], ["cat", "cat", "zebra", "zebra"])
    assert gains == {"zebra": 2.5, "cat": 1.0}
    assert list(gains) == ["zebra", "cat"]


# ---------------------------------------------------------------------- prototypes


def test_prototypes_express_every_subspace() -> None:
    # Six images of one row each, two subspaces: the first three speak of S1, the others of S2.
    strengths = torch.tensor([3.0, 2, 1, 1, 2, 3])
    a = torch.zeros(6, 4)
    a[:3, 0], a[3:, 2] = strengths[:3], strengths[3:]
    subspaces = Subspaces(torch.eye(4), [2, 2])
    pairs = Pairs(a, a, torch.tensor([7, 3, 2, 11, 5, 9]))
    found = select_prototypes(pairs, subspaces, n_prototypes=2, random_state=0)
    # The loudest of each, though two of S1 alone would have the larger relevance.
    assert found.images == [7, 9]
    # R = 9 in one row of two for both: M² = √(81/2), and M^q of equal numbers is that number
    assert found.objective == pytest.approx(math.sqrt(81 / 2))
    again = select_prototypes(pairs, subspaces, n_prototypes=2, random_state=0)
    assert again == found


def test_prototypes_are_the_best_of_all_subsets_if_all_are_tried() -> None:
    generator = torch.Generator().manual_seed(3)
    a, c = torch.randn(30, 6, generator=generator), torch.randn(30, 6, generator=generator)
    image = torch.randint(0, 7, (30,), generator=generator)
    subspaces = RandomSubspaces(3, random_state=0).fit(a).subspaces_
    relevance = subspaces.relevance(a, c).double().clamp(min=0)

    def objective(images: tuple[int, ...]) -> float:
        rows = relevance[torch.isin(image, torch.tensor(images))]
        return float(rows.square().mean(0).sqrt().sqrt().mean() ** 2)  # M^½ of M²

    best = max(itertools.combinations(sorted(set(image.tolist())), 3), key=objective)
    found = select_prototypes(Pairs(a, c, image), subspaces, 3, n_candidates=2000, random_state=0)
    assert tuple(found.images) == best
    assert found.objective == pytest.approx(objective(best), rel=1e-6)


def test_top_images() -> None:
    relevance = torch.tensor([[1.0, 5], [3, 5], [2, 0]])
    assert top_images(relevance, 2).tolist() == [[1, 2], [0, 1]]


# ---------------------------------------------------------------------- bad input


PAIRS = Pairs(torch.eye(3), torch.eye(3), torch.tensor([0, 0, 1]))
BASIS = Subspaces(torch.eye(3), [1, 2])


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("NaN", lambda: separability(torch.full((1, 1, 1, 2, 2), torch.nan))),
        ("one number for each of the 2 instances", lambda: summarise([1.0], [0, 1])),
        (r"whole .*\(3,\)", lambda: delta_aupc([1.0, 2, 3], [1.0, 2], [0, 1])),
        ("at least 1", lambda: class_means([], [])),
        ("NaN", lambda: class_means([math.nan], [0])),
        ("classes must hold one label for each instance", lambda: class_means([1.0], [math.nan])),
        ("level must be a finite number from 0 to 1", lambda: bootstrap_interval([1.0], [0], level=95)),
        ("n_prototypes must be an integer from 1 to 2", lambda: select_prototypes(PAIRS, BASIS, 3)),
        ("positive relevance", lambda: select_prototypes(Pairs(torch.eye(3), -torch.eye(3)), BASIS, 1)),
        ("n_images must be an integer from 1 to 2", lambda: top_images(torch.zeros(2, 2))),
        ("NaN", lambda: top_images(torch.full((2, 2), torch.nan), 1)),
    ],
)
def test_bad_input_is_named(message: str, call) -> None:
    with pytest.raises(ValueError, match=message):
        call()
