"""Coarse to fine, and few pairs in many dimensions: against slow transcriptions and the full problem."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from drsa_core import DRSA
from drsa_core.objective import Objective
from drsa_core.optimizers import (
    Climb,
    Quadratic,
    climb,
    finish,
    leading_samples,
    quasi_newton,
    random_orthogonal,
    reduce_problem,
    reduce_to_span,
    reduced_dims,
    share_out,
)
from drsa_core.pairs import normalise
from hypothesis import given, settings
from hypothesis import strategies as st


def pairs_of(n: int, d: int, seed: int = 0, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse activations with a falling spectrum and heavy tails, contexts that agree in part."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.arange(1, d + 1, dtype=torch.float64) ** -0.5
    strength = torch.rand(n, 1, generator=generator, dtype=torch.float64) ** 4
    a = (torch.randn(n, d, generator=generator, dtype=torch.float64) * spectrum * strength).clamp(min=0)
    c = a * torch.rand(n, d, generator=generator, dtype=torch.float64)
    c += 0.1 * strength * spectrum * torch.randn(n, d, generator=generator, dtype=torch.float64)
    return a.to(dtype), c.to(dtype)


def objective_of(n: int, d: int, dims, dtype=torch.float64) -> Objective:
    a, c = pairs_of(n, d, dtype=dtype)
    return Objective(normalise(a), normalise(c), dims, 0.5)


def test_samples_left_out_count_as_zero() -> None:
    objective = objective_of(30, 6, (2, 3))
    rows = torch.tensor([1, 4, 5, 20])
    kept = torch.zeros(30, 1, dtype=torch.float64)
    kept[rows] = 1
    zeroed = Objective(objective.a * kept, objective.c * kept, (2, 3), 0.5)
    basis, some = random_orthogonal(6, 0), objective.of_samples(rows)
    at, there = some.evaluate(basis), zeroed.evaluate(basis)
    assert at.value == pytest.approx(there.value, rel=1e-12)
    torch.testing.assert_close(some.tangent_gradient(at), zeroed.tangent_gradient(there))
    torch.testing.assert_close(some.gradient(at), zeroed.gradient(there))
    torch.testing.assert_close(some.curvature(at).diagonal, zeroed.curvature(there).diagonal)
    assert float(some.shares(at).sum()) == pytest.approx(at.value, rel=1e-12)  # Euler's identity


def test_directions_left_out_count_as_zero() -> None:
    """In r directions J is that of blocks which hold nothing else."""
    objective = objective_of(30, 6, (3, 3))
    directions = random_orthogonal(6, 1)
    small = objective.in_directions(directions[:, :4], (2, 2))
    basis = random_orthogonal(4, 2)
    lifted = directions[:, :4] @ basis
    relevance = [
        ((objective.a @ lifted[:, k]) * (objective.c @ lifted[:, k])).sum(1).clamp(min=0)
        for k in (slice(0, 2), slice(2, 4))
    ]
    means = [float(r.square().mean().sqrt()) for r in relevance]
    expected = (sum(math.sqrt(m) for m in means) / 2) ** 2
    assert small.evaluate(basis).value == pytest.approx(expected, rel=1e-12)


def test_linearised_is_what_a_block_gains() -> None:
    """Σ_n W_kn x_nᵀQ_kQ_kᵀy_n, sample by sample."""
    objective = objective_of(25, 7, (2, 3))  # two columns are residual
    at = objective.evaluate(random_orthogonal(7, 0))
    directions = random_orthogonal(7, 1)[:, :4]
    matrices = objective.linearised(at, directions)
    assert matrices.shape == (3, 4, 4)
    assert not matrices[2].any()  # the residual is not scored
    columns = random_orthogonal(4, 2)[:, :2]
    for k in range(2):
        gain = 0.0
        for n in range(25):
            x, y = directions.T @ objective.a[n], directions.T @ objective.c[n]
            gain += float(at.weights[n, k] * ((columns.T @ x) @ (columns.T @ y)))
        found = float(torch.trace(columns.T @ matrices[k] @ columns)) / 2
        assert found == pytest.approx(gain, rel=1e-10, abs=1e-14)


def test_quadratic_problem_and_its_derivatives() -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 6, 6, generator=generator, dtype=torch.float64)
    matrices = matrices + matrices.mT
    sizes = (1, 3, 2)
    problem, basis = Quadratic(matrices, sizes), random_orthogonal(6, 0)

    def literal(q: torch.Tensor) -> torch.Tensor:
        parts = zip(matrices, q.split(sizes, dim=1), strict=True)
        return torch.stack([torch.trace(part.T @ matrix @ part) for matrix, part in parts]).sum() / 2

    at = problem.evaluate(basis)
    assert at.value == pytest.approx(float(literal(basis)), rel=1e-12)
    lower = torch.zeros(6, 6, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(literal(basis @ torch.matrix_exp(lower - lower.T)), lower)
    gradient, curvature = problem.tangent_gradient(at), problem.curvature(at)
    frame = basis @ torch.block_diag(*curvature.rotations)
    for here in problem.columns:
        torch.testing.assert_close(gradient[here.stop :, here], slope[here.stop :, here])
        assert not gradient[: here.stop, here].any()
        for i, j in itertools.product(range(here.start, here.stop), range(here.stop, 6)):
            turn = torch.zeros(6, 6, dtype=torch.float64)
            turn[j, i] = 1e-4
            values = [float(literal(frame @ torch.matrix_exp(s * (turn - turn.T)))) for s in (-1.0, 1.0, 0.0)]
            second = -(values[0] + values[1] - 2 * values[2]) / 1e-8
            # The quotient rounds at 1e-16 · |J| / 1e-8.
            assert curvature.diagonal[j, i].item() == pytest.approx(second, rel=1e-5, abs=1e-6)


def test_directions_go_to_the_blocks_that_want_them() -> None:
    """Each S_k is a projection on directions of its own: the blocks must become these."""
    rotation = random_orthogonal(6, 0)
    wanted = [rotation[:, :2], rotation[:, 2:3], rotation[:, 3:]]
    matrices = torch.stack([x @ x.T for x in wanted] + [torch.zeros(6, 6, dtype=torch.float64)])
    shared = share_out(matrices, [2, 1, 3, 0])
    identity = torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(shared.T @ shared, identity, rtol=0, atol=1e-12)
    problem = Quadratic(matrices[:3], [2, 1, 3])
    # ½ (2 + 1 + 3) is the most that there is; `share_out` stops on the way, since its result is but a start.
    assert problem.evaluate(shared).value >= 2 * problem.evaluate(identity).value
    result = quasi_newton(problem, identity, 100, 1e-6, lambda _: None, warm_up=0)
    assert result.objective == pytest.approx(3, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(0, 200))
def test_reduced_blocks_fit(dims: list[int], extra: int) -> None:
    n_directions = len(dims) + extra
    sizes = reduced_dims(dims, n_directions)
    assert all(1 <= size <= d for size, d in zip(sizes, dims, strict=True))
    assert sum(sizes) == min(n_directions, sum(dims))


def test_leading_samples() -> None:
    weights = torch.tensor([0.0, 5.0, 1.0, 4.0])
    assert leading_samples(weights, 0.5, 1).tolist() == [1]
    assert leading_samples(weights, 0.6, 1).tolist() == [1, 3]
    assert leading_samples(weights, 0.5, 3).tolist() == [1, 2, 3]
    assert leading_samples(weights, 1.0, 99).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dims", [(40, 40, 40, 40), (90, 30, 20), (3, 2)])
def test_a_lifted_basis_is_orthogonal_holds_the_reduced_one_and_is_never_left_for_worse(dims, dtype) -> None:
    full = objective_of(1500, 160, dims, dtype)
    reduction = reduce_problem(full)
    assert reduction is not None
    r = reduction.objective.n_features
    assert r <= 80
    reduced = random_orthogonal(r, 0).to(dtype)
    lifted = reduction.lift(reduced, full)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(lifted.T @ lifted, torch.eye(160, dtype=dtype), rtol=0, atol=100 * eps)
    leading = reduction.directions[:, :r] @ reduced
    for here, inside in zip(full.columns, reduction.objective.columns, strict=False):
        block = lifted[:, here]
        outside = leading[:, inside] - block @ (block.T @ leading[:, inside])
        assert float(outside.abs().max()) < 100 * eps
    there = climb(full, lifted, 0.0)
    assert there.at.value == pytest.approx(full.evaluate(there.basis).value)
    assert there.at.value >= full.evaluate(lifted).value
    result = finish(full, there, 5, 0.0, lambda _: None)
    assert result.objective >= there.at.value
    assert all(later >= earlier for earlier, later in itertools.pairwise(result.history))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fit_in_the_reduced_problem(dtype) -> None:
    a, c = (x.numpy().astype(dtype) for x in pairs_of(1500, 160))
    model, again = (DRSA(4, random_state=0, n_init=4).fit(a, c) for _ in range(2))
    assert len(model.reduced_results_) == 4
    assert len(model.results_) == 1
    assert model.converged_
    assert torch.equal(model.subspaces_.basis, again.subspaces_.basis)
    assert model.subspaces_.dims == (40, 40, 40, 40)
    assert model.subspaces_.orthogonality_error < 100 * np.finfo(dtype).eps
    plain = DRSA(4, random_state=0, n_init=2, solver="quasi-newton").fit(a, c)
    assert plain.reduced_results_ == []
    # Not a worse basin than those of starts in full; they end within a per cent of each other.
    assert model.objective_ >= 0.995 * plain.objective_
    x, y = normalise(a), normalise(c)
    assert Objective(x, y, (40,) * 4, 0.5).evaluate(model.subspaces_.basis).value == pytest.approx(
        model.objective_, rel=1e-5
    )


def test_the_higher_of_two_climbs_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    climbs = []

    def watched(*args: Any) -> Climb:
        climbs.append(climb(*args))
        return climbs[-1]

    monkeypatch.setattr("drsa_core.optimizers.climb", watched)
    a, c = pairs_of(1500, 160)
    for seed in range(3):
        climbs.clear()
        model = DRSA(4, n_init=4, tol=1e-3, random_state=seed).fit(a, c)
        assert len(climbs) == 2
        # The run in full begins where the higher one ended, or higher up after further levels.
        assert model.history_[0] >= (1 - 1e-9) * max(done.at.value for done in climbs)


def test_a_start_of_ones_own_is_run_in_full() -> None:
    a, c = pairs_of(600, 160)
    start = random_orthogonal(160, 0)
    models = [DRSA(4, solver=solver, tol=1e-3) for solver in ("coarse-to-fine", "quasi-newton")]
    first, second = (model.fit(a, c, init=start) for model in models)
    assert first.reduced_results_ == []
    assert first.history_ == second.history_


def test_no_reduction_where_nothing_is_saved_or_nothing_is_known() -> None:
    assert reduce_problem(objective_of(300, 64, (16,) * 4)) is None
    assert reduce_problem(objective_of(300, 200, (10,) * 20)) is None  # 160 directions are more than half
    full = objective_of(300, 160, (40,) * 4)
    assert reduce_problem(Objective(full.a, -full.a, full.dims, 0.5)) is None  # no positive relevance


@pytest.mark.parametrize("dims", [(30, 30, 30), (40, 25, 5), (50, 5)])
def test_few_pairs_in_fewer_dimensions(dims: tuple[int, ...]) -> None:
    """The same start in the small and in the full problem: the same objective and the same relevances."""
    full = objective_of(10, 90, dims)
    span = reduce_to_span(full)
    assert span is not None
    sizes = [min(size, 20) for size in (*dims, 90 - sum(dims)) if size]
    assert span.objective.n_features == sum(sizes)
    start = random_orthogonal(sum(sizes), 0)
    expanded = span.expand(start)
    torch.testing.assert_close(expanded.T @ expanded, torch.eye(90, dtype=torch.float64), rtol=0, atol=1e-13)
    here, there = span.objective.evaluate(start), full.evaluate(expanded)
    assert here.value == pytest.approx(there.value, rel=1e-12)
    torch.testing.assert_close(here.relevance, there.relevance)
    # The paper's iterations, which no choice of basis in a degenerate block can tell apart.
    small = quasi_newton(span.objective, start, 30, 0.0, lambda _: None)
    large = quasi_newton(full, expanded, 30, 0.0, lambda _: None)
    np.testing.assert_allclose(small.history, large.history, rtol=1e-9)
    found, expected = span.expand(small.basis), large.basis
    columns = full.columns
    pairs = torch.cat([full.a, full.c])
    for block in columns:
        # What the blocks do to the pairs; on what no pair sees they may differ.
        first = pairs @ found[:, block] @ found[:, block].T @ pairs.T
        second = pairs @ expected[:, block] @ expected[:, block].T @ pairs.T
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-8)


def test_the_span_alone_would_not_be_enough() -> None:
    """Three directions at 120° in a plane: three blocks with room beside the plane do better than without."""
    angles = torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64) * math.pi / 3
    a = torch.stack([angles.cos(), angles.sin()], 1)
    wide = torch.nn.functional.pad(a, (0, 1))
    full = Objective(wide, wide, (1, 1, 1), 0.5)
    best = max(
        quasi_newton(full, random_orthogonal(3, seed), 200, 1e-9, lambda _: None).objective
        for seed in range(5)
    )
    # With room, u_k has length √(2/3) in the plane, along direction k: R_kk = 2/3, R_kn = 1/6 for the others.
    assert best >= math.sqrt(((2 / 3) ** 2 + 2 * (1 / 6) ** 2) / 3) * (1 - 1e-6)
    # In the plane, two blocks are orthogonal directions, Σ_n cos⁴ = 9/8 at any angle; the third is empty.
    planar = (2 * math.sqrt(math.sqrt(3 / 8)) / 3) ** 2
    assert best > 1.4 * planar


def test_few_pairs_in_many_dimensions_are_fitted() -> None:
    a, c = pairs_of(24, 512, dtype=torch.float32)
    model = DRSA(4, random_state=0, n_init=2).fit(a, c)
    assert model.subspaces_.dims == (128,) * 4
    assert model.subspaces_.orthogonality_error < 1e-5
    value = Objective(normalise(a), normalise(c), (128,) * 4, 0.5).evaluate(model.results_[0].basis).value
    assert value == pytest.approx(model.objective_, rel=1e-5)
