"""Stability of concepts and the choice of K: literal parts, planted blocks, shuffled contexts."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from drsa_core import DRSA, DSA, PRCA, ChoiceOfK, Pairs, choose_k, stability
from drsa_core.objective import Objective
from drsa_core.plot import choice_of_k
from drsa_core.stability import (
    OVERLAP,
    bootstrap,
    centrotype,
    correlations,
    match,
    repeated_rows,
    with_shuffled_contexts,
)


def planted(n_concepts: int = 3, n_images: int = 30, seed: int = 0) -> Pairs:
    """Each pair shows one of the concepts, a direction of its own, with noise; four pairs to an image."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(12, 12, generator=generator)).Q[:, :n_concepts]
    image = torch.arange(n_images).repeat_interleave(4)
    shown = torch.randint(n_concepts, (len(image),), generator=generator)
    strength = 1 + torch.rand(len(image), 1, generator=generator)
    a = strength * directions.T[shown] + 0.1 * torch.randn(len(image), 12, generator=generator)
    c = directions.T[shown] + 0.1 * torch.randn(len(image), 12, generator=generator)
    return Pairs(a, c, image)


@pytest.fixture(scope="module")
def choice() -> ChoiceOfK:
    return choose_k(planted(), range(2, 6), n_bootstraps=3, random_state=0, progress=False)


def test_correlations_and_matching_are_the_literal_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(50, 4, generator=generator), torch.randn(50, 4, generator=generator)
    second[:, 3] = -1  # no positive relevance anywhere
    found = correlations(first, second)
    expected = np.corrcoef(first.clamp(min=0).numpy().T, second[:, :3].clamp(min=0).numpy().T)[:4, 4:]
    np.testing.assert_allclose(found[:, :3], expected, atol=1e-6)
    assert not found[:, 3].any()
    best = max(permutations(range(4)), key=lambda order: sum(found[k, j] for k, j in enumerate(order)))
    partners, values = match(first, second)
    assert partners == best
    torch.testing.assert_close(values, torch.stack([found[k, j] for k, j in enumerate(best)]))


def test_relevance_that_is_the_same_everywhere_has_no_correlation() -> None:
    constant = torch.full((60, 2), 0.1, dtype=torch.float64)  # whose mean is another number
    assert not correlations(constant, constant).any()


def test_images_are_drawn_not_pairs() -> None:
    image = torch.tensor([4, 7, 4, 9, 7, 7])
    for seed in range(20):
        times = bootstrap(image, np.random.default_rng(seed))
        per_image = [times[image == number].unique() for number in (4, 7, 9)]
        assert all(len(counts) == 1 for counts in per_image)
        assert sum(int(counts) for counts in per_image) == 3
        assert (times == 0).any()  # one image at least is left to test on


def test_shuffled_contexts_come_from_one_other_image() -> None:
    image = torch.tensor([0, 0, 1, 1, 1, 5, 5, 8])
    pairs = Pairs(torch.rand(8, 2), image[:, None].repeat(1, 2).float(), image)
    for seed in range(20):
        shuffled = with_shuffled_contexts(pairs, np.random.default_rng(seed))
        assert shuffled.a.equal(pairs.a)
        for number in (0, 1, 5, 8):
            (giver,) = shuffled.c[image == number].unique().tolist()
            assert giver != number


def test_a_bootstrap_is_the_objective_of_repeated_rows() -> None:
    pairs, times = planted(), torch.randint(0, 4, (120,), generator=torch.Generator().manual_seed(0))
    full = Objective(pairs.a, pairs.c, (4, 4, 4), 0.5)
    rows = torch.arange(120).repeat_interleave(times)
    literal = Objective(pairs.a[rows], pairs.c[rows], (4, 4, 4), 0.5)
    small, basis = repeated_rows(full, times), torch.linalg.qr(torch.randn(12, 12)).Q
    assert small.evaluate(basis).value == pytest.approx(literal.evaluate(basis).value, rel=1e-5)
    torch.testing.assert_close(
        small.tangent_gradient(small.evaluate(basis)),
        literal.tangent_gradient(literal.evaluate(basis)),
        rtol=1e-4,
        atol=1e-5,
    )


def test_the_centrotype_agrees_best() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(40, 2, generator=generator)
    noise = [0.3 * torch.rand(40, 2, generator=generator) for _ in range(3)]
    # Its concepts in another order are still the same, and three noisy copies agree best with their original.
    runs = [base + noise[0], (base + noise[1]).flip(1), base.flip(1), base + noise[2]]
    assert centrotype(runs)[0] == 2


def test_planted_concepts_are_stable(choice: ChoiceOfK) -> None:
    pairs = planted()
    result = stability(pairs, 3, n_bootstraps=3, random_state=0, progress=False)
    assert result.all_stable
    assert result.is_stable == (True,) * 3
    assert float(result.index.min()) > 0.95
    assert result.agreement.shape == (3, 3)
    torch.testing.assert_close(result.index, result.agreement.mean(0))
    assert result.subspaces.metadata["stability"]["index"] == result.index.tolist()
    chosen = result.subspaces.completed().select([1, 0])
    assert chosen.metadata["stability"]["index"] == result.index[[1, 0]].tolist()
    assert result.held_out_objective > 1.1 * result.null_objective
    assert "3 concepts over 4 fits" in str(result)
    # What is returned is as good as what the solver finds by itself.
    alone = DRSA(3, random_state=0).fit(pairs)
    finished = result.subspaces.metadata["solver"]["objective"]
    assert finished == pytest.approx(alone.objective_, rel=1e-3)


def test_the_same_seed_gives_the_same_result() -> None:
    first, second = (
        stability(planted(), 2, n_bootstraps=2, random_state=3, progress=False) for _ in range(2)
    )
    assert first.index.equal(second.index)
    assert first.null.equal(second.null)
    assert first.subspaces.basis.equal(second.subspaces.basis)


def test_overlap_is_the_largest_correlation_of_two_concepts(choice: ChoiceOfK) -> None:
    for candidate in choice.candidates:
        matrix = np.corrcoef(candidate.relevance.numpy().T)
        largest = max(matrix[i, j] for i in range(len(matrix)) for j in range(i))
        assert candidate.overlap == pytest.approx(largest, abs=1e-6)
        assert candidate.are_distinct == (largest <= OVERLAP)


def test_the_planted_number_is_chosen(choice: ChoiceOfK) -> None:
    assert choice.n_subspaces == 3
    assert choice.stability is not None
    assert choice.subspaces is choice.stability.subspaces
    assert str(choice).startswith("3 concepts")
    # With two blocks, two of the three concepts share one; the third is the child that it had.
    split = choice.splits[0]
    assert len(split.parent) == 3
    assert len(split.divided) == 1
    torch.testing.assert_close(
        split.correlation, correlations(choice.candidates[1].relevance, choice.candidates[0].relevance)
    )


def test_there_is_none_in_shuffled_data() -> None:
    pairs = with_shuffled_contexts(planted(), np.random.default_rng(1))
    found = choose_k(pairs, [2, 3, 4], n_bootstraps=3, progress=False)
    assert found.n_subspaces is None
    assert found.subspaces is None
    assert "there is no K" in str(found)


def test_few_images_with_their_own_contexts_beat_chance() -> None:
    """Many directions, few images: on its own images a fit is good whatever their contexts; others tell."""
    generator = torch.Generator().manual_seed(0)
    image = torch.arange(12).repeat_interleave(5)
    shown = torch.randint(2, (60,), generator=generator)
    directions = torch.linalg.qr(torch.randn(40, 40, generator=generator)).Q[:, :2].T
    a, c = (directions[shown] + 0.15 * torch.randn(60, 40, generator=generator) for _ in range(2))
    pairs = Pairs(a, c, image)
    own = stability(pairs, 2, n_bootstraps=3, progress=False)
    assert own.held_out_objective < 0.9 * own.objective
    assert own.beats_chance
    assert not stability(
        with_shuffled_contexts(pairs, np.random.default_rng(0)), 2, progress=False
    ).beats_chance


def test_contexts_that_meet_no_other_image_leave_nothing_to_chance() -> None:
    """Each image has features of its own: shuffled contexts have no relevance anywhere."""
    generator = torch.Generator().manual_seed(0)
    image = torch.arange(6).repeat_interleave(10)
    a = torch.zeros(60, 12)
    for n in range(6):
        a[image == n, 2 * n : 2 * n + 2] = 0.1 + torch.rand(10, 2, generator=generator)
    found = stability(Pairs(a, a, image), 2, n_bootstraps=2, progress=False)
    assert found.null_objective == 0
    assert not found.null.any()
    assert found.null.shape == (2, 2)


def test_one_image_with_all_evidence_cannot_be_left_out() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(60, 12, generator=generator)
    a[:10] *= 1000
    found = stability(Pairs(a, a, torch.arange(6).repeat_interleave(10)), 2, n_bootstraps=2, progress=False)
    assert math.isnan(found.held_out_objective)
    assert not any(found.is_stable)
    assert "ONE IMAGE HOLDS NEARLY ALL EVIDENCE" in str(found)


def test_patience_ends_the_search() -> None:
    few = choose_k(planted(2), range(2, 99), n_bootstraps=2, patience=1, progress=False)
    assert [c.are_distinct for c in few.candidates[-1:]] == [False] or few.candidates[-1].n_subspaces == 11
    assert all(c.are_distinct for c in few.candidates[:-1])


def test_figure_shows_the_choice(choice: ChoiceOfK) -> None:
    figure = choice_of_k(choice)
    stable, distinct, objective, tree = figure.axes
    assert stable.get_title() == "3 concepts"
    (bars,) = distinct.containers
    assert [bar.get_height() for bar in bars] == pytest.approx([c.overlap for c in choice.candidates])
    held_out = objective.get_lines()[1]
    assert held_out.get_label() == "images left out"
    assert held_out.get_ydata() == pytest.approx([c.held_out_objective for c in choice.candidates])
    # One line for each concept that has a parent, one dot for each concept, and two for the legend.
    concepts = [c.n_subspaces for c in choice.candidates]
    assert len(tree.get_lines()) == sum(concepts[1:]) + sum(concepts) + 2
    of_next = [line for line in tree.get_lines() if np.array_equal(line.get_xdata(), [2, 3])]
    begins = [float(np.asarray(line.get_ydata())[0]) for line in of_next]
    assert sorted(begins.count(place) for place in set(begins)) == [1, 2]


def test_bad_input_is_named() -> None:
    pairs = planted()
    with pytest.raises(ValueError, match=r"at least 5, got 1; give Pairs\(a, c, image\)"):
        stability(Pairs(pairs.a, pairs.c), 2)
    with pytest.raises(TypeError, match="needs Pairs"):
        choose_k((pairs.a, pairs.c))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n_bootstraps must be an integer of at least 1"):
        stability(pairs, 2, n_bootstraps=0)
    with pytest.raises(ValueError, match="at least one K"):
        choose_k(pairs, [])
    with pytest.raises(ValueError, match="at least one K from 1 to D = 12"):
        choose_k(pairs, [13, 14])
    with pytest.raises(ValueError, match="n_subspaces must be at most D = 12, got 13"):
        stability(pairs, 13)
    with pytest.raises(ValueError, match="no pair has positive relevance"):
        stability(Pairs(pairs.a.abs(), -pairs.c.abs(), pairs.image), 2)
    with pytest.raises(ValueError, match="threshold"):
        stability(pairs, 2, threshold=1.5)
    for solver in (DSA(), PRCA(2)):
        with pytest.raises(TypeError, match="must be a DRSA, whose parameters are used"):
            stability(pairs, 2, solver=solver)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="q must be a finite number, got nan"):
        stability(pairs, 2, solver=DRSA(q=math.nan))
