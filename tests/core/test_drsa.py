"""DRSA: objective and derivatives against the formulas, solvers, coarse to fine, and the estimator."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from drsa_core import DRSA, DSA, ConvergenceWarning, Subspaces
from drsa_core.drsa import SOLVERS
from drsa_core.objective import Objective, generalised_mean, rotate_columns
from drsa_core.optimizers import (
    Memory,
    Result,
    climb,
    finish,
    quasi_newton,
    reduce_problem,
    reduced_dims,
    turn,
)
from drsa_core.pairs import balanced, normalise
from drsa_core.prca import random_orthogonal
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ortho_group
from torch import Tensor

from tests import golden


def pairs_of(n: int, d: int, seed: int = 0, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    """Sparse activations with a falling spectrum and heavy tails, contexts that agree in part."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.arange(1, d + 1, dtype=torch.float64) ** -0.5
    strength = torch.rand(n, 1, generator=generator, dtype=torch.float64) ** 2
    a = (torch.randn(n, d, generator=generator, dtype=torch.float64) * spectrum * strength).clamp(min=0)
    c = a * torch.rand(n, d, generator=generator, dtype=torch.float64)
    c += 0.1 * strength * spectrum * torch.randn(n, d, generator=generator, dtype=torch.float64)
    return a.to(dtype), c.to(dtype)


def objective_of(n: int, d: int, dims, dtype=torch.float64) -> Objective:
    a, c = pairs_of(n, d, dtype=dtype)
    return Objective(normalise(a), normalise(c), dims, 0.5)


def literal_objective(a, c, basis, dims, q: float):
    """Eq. of section 4.2, loop by loop, on torch scalars so that autograd gives the gradient."""
    means, start = [], 0
    for d in dims:
        block = basis[:, start : start + d]
        squares = []
        for x, y in zip(a, c, strict=True):
            relevance = (block.T @ x) @ (block.T @ y)
            squares.append(torch.clamp(relevance, min=0) ** 2)
        means.append((sum(squares) / len(squares)) ** 0.5)
        start += d
    if q == 0:
        return math.e ** (sum(torch.log(m) for m in means) / len(means))
    return (sum(m**q for m in means) / len(means)) ** (1 / q)


# The objective and its derivatives ----------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("q", [0.5, 2.0, 0.0, -1.0])
@pytest.mark.parametrize("dims", [(2, 2, 2), (1, 4, 1), (2, 1), (6,)])
def test_objective_and_gradients_are_the_formula(q: float, dims, whole: bool, monkeypatch) -> None:
    monkeypatch.setattr("drsa_core.objective.WHOLE_DIMENSIONS", 64 if whole else 0)
    a, c = pairs_of(20, 6)
    objective = Objective(a, c, dims, q)
    basis = torch.as_tensor(ortho_group.rvs(6, random_state=3)).requires_grad_()
    literal = literal_objective(a, c, basis, dims, q)
    literal.backward()
    at = objective.evaluate(basis.detach())
    assert at.value == pytest.approx(literal.item(), rel=1e-12)
    assert float(objective.shares(at).sum()) == pytest.approx(at.value, rel=1e-12)  # Euler's identity
    torch.testing.assert_close(objective.gradient(at), basis.grad, rtol=1e-10, atol=1e-12)

    # The tangent gradient: derivative by L of the objective at U·exp(L − Lᵀ), below the blocks.
    lower = torch.zeros(6, 6, dtype=torch.float64, requires_grad=True)
    literal_objective(a, c, basis.detach() @ torch.matrix_exp(lower - lower.T), dims, q).backward()
    below = torch.zeros(6, 6, dtype=torch.float64)
    for here in objective.columns:
        below[here.stop :, here] = 1
    expected = lower.grad * below  # type: ignore[operator]
    torch.testing.assert_close(objective.tangent_gradient(at), expected, rtol=1e-10, atol=1e-12)


def test_curvature_is_the_second_derivative() -> None:
    """With the factors of dJ/dR held fixed, J is Σ_k factors_k/2 Σ_n R⁺_kn²: its difference quotients."""
    objective = objective_of(60, 5, (2, 2))  # one column is residual
    basis = quasi_newton(objective, random_orthogonal(5, 0), 100, 1e-6).basis  # mostly concave there
    at = objective.evaluate(basis)

    def fixed(turned: Tensor) -> float:
        return float((at.factors / 2 * objective.evaluate(turned).relevance.square()).sum())

    curvature = objective.curvature(at)
    frame = rotate_columns(basis, curvature.rotations)
    assert objective.evaluate(frame).value == pytest.approx(at.value, rel=1e-12)
    checked = 0
    for here in objective.columns:
        for i, j in itertools.product(range(here.start, here.stop), range(here.stop, 5)):
            lower = torch.zeros(5, 5, dtype=torch.float64)
            lower[j, i] = 1e-4
            values = [fixed(frame @ torch.matrix_exp(s * (lower - lower.T))) for s in (-1.0, 1.0, 0.0)]
            second = -(values[0] + values[1] - 2 * values[2]) / 1e-8
            # The quotient's own error: it rounds at 1e-16 / 1e-8.
            assert curvature.diagonal[j, i].item() == pytest.approx(second, rel=1e-5, abs=1e-6)
            checked += bool(second > 0)
    assert checked >= 1


def test_division_by_the_curvature_happens_in_its_frame() -> None:
    objective = objective_of(50, 6, (2, 3))
    at = objective.evaluate(random_orthogonal(6, 0))
    curvature, gradient = objective.curvature(at), objective.tangent_gradient(at)
    frame = torch.block_diag(*curvature.rotations)
    positive = curvature.diagonal.clamp(min=1e-3 * float(curvature.diagonal.abs().max()))
    expected = frame @ ((frame.T @ gradient @ frame) / positive) @ frame.T
    torch.testing.assert_close(curvature.divide(gradient), expected)


def test_samples_and_directions_left_out_count_as_zero() -> None:
    objective = objective_of(30, 6, (2, 3))
    rows, kept = torch.tensor([1, 4, 5, 20]), torch.zeros(30, 1, dtype=torch.float64)
    kept[rows] = 1
    basis, some = random_orthogonal(6, 0), objective.of_samples(rows)
    assert some.evaluate(basis).value == pytest.approx(
        float(literal_objective(objective.a * kept, objective.c * kept, basis, (2, 3), 0.5)), rel=1e-12
    )
    directions, inside = random_orthogonal(6, 1)[:, :4], random_orthogonal(4, 2)
    expected = literal_objective(objective.a, objective.c, directions @ inside, (2, 2), 0.5)
    found = objective.in_directions(directions, (2, 2)).evaluate(inside).value
    assert found == pytest.approx(float(expected), rel=1e-12)


def test_leading_samples_hold_their_part() -> None:
    objective, weights = objective_of(4, 3, (1,)), torch.tensor([0.0, 5.0, 1.0, 4.0])
    for part, fewest, expected in [
        (0.5, 1, [1]),
        (0.6, 1, [1, 3]),
        (0.5, 3, [1, 2, 3]),
        (1.0, 99, [0, 1, 2, 3]),
    ]:
        assert objective.leading_samples(weights, part, fewest).tolist() == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6), st.floats(-5, 5))
def test_generalised_mean_lies_between_the_extremes(values: list[float], q: float) -> None:
    mean, slopes = generalised_mean(torch.tensor(values, dtype=torch.float64), q)
    assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)
    # It is homogeneous of degree 1, so Euler's identity holds.
    assert float((slopes * torch.tensor(values, dtype=torch.float64)).sum()) == pytest.approx(mean, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_generalised_mean_of_zeros_and_with_extreme_exponents(dtype: torch.dtype) -> None:
    zeros = torch.tensor([0.0, 4.0], dtype=dtype)
    assert generalised_mean(zeros, 0.5)[0] == pytest.approx(1.0)
    assert generalised_mean(zeros, 0.5)[1][0] == 0
    assert generalised_mean(zeros, -1.0)[0] == generalised_mean(zeros, 0.0)[0] == 0
    values = torch.tensor([1e-3, 1.0, 2.0], dtype=dtype)
    geometric = float(np.exp(np.log(values.double().numpy()).mean()))
    for q, expected in [(-1e3, 1e-3), (1e3, 2.0), (1e-9, geometric), (-1e-9, geometric), (0.0, geometric)]:
        mean, slopes = generalised_mean(values, q)
        # 2e-3: at |q| = 1000, K^(1/q) is 1 + 1.1e-3.
        assert mean == pytest.approx(expected, rel=2e-3 if abs(q) > 1 else 1e-6)
        assert torch.isfinite(slopes).all()


def test_normalisation_and_balance_are_the_formulas() -> None:
    a, c = torch.randn(2, 10, 16, dtype=torch.float64) * 7
    # Note E: root mean square over all entries, and the fourth root of D.
    scale = math.sqrt(sum(float(x) ** 2 for x in a.flatten()) / 160) * 16**0.25
    torch.testing.assert_close(normalise(a), a / scale)
    subspaces = Subspaces(torch.eye(16, dtype=torch.float64), [2, 14])
    lengths = a.norm(dim=1, keepdim=True) * c.norm(dim=1, keepdim=True)
    for exponent in (0.0, 0.3, 1.0):
        even = subspaces.relevance(*balanced(a, c, exponent))
        torch.testing.assert_close(even, subspaces.relevance(a, c) / lengths**exponent)
    zero, one = balanced(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [3.0, 4.0]]), 1.0)
    torch.testing.assert_close((zero * one).sum(1), torch.tensor([0.0, 1.0]))


# Solvers ------------------------------------------------------------------------------------------------


def test_turn_is_the_cayley_transform() -> None:
    basis, identity = random_orthogonal(5, 0), torch.eye(5, dtype=torch.float64)
    lower = 1e-3 * torch.randn(5, 5, dtype=torch.float64).tril(-1)
    turned, half = turn(basis, lower), (lower - lower.T) / 2
    torch.testing.assert_close(turned.T @ turned, identity, atol=1e-14, rtol=0)
    # It agrees with the exponential to second order: the difference is of the order of 1e-9.
    torch.testing.assert_close(turned, basis @ torch.matrix_exp(lower - lower.T), atol=1e-8, rtol=0)
    cayley = torch.linalg.inv(identity - half) @ (identity + half)
    torch.testing.assert_close(turned, basis @ cayley, atol=1e-14, rtol=0)


def test_rounding_errors_of_many_turns_do_not_pile_up() -> None:
    a, c = pairs_of(60, 24, dtype=torch.float32)
    seen: list[float] = []

    class Watched(Objective):
        def evaluate(self, basis):
            gram = basis.double().T @ basis.double()
            seen.append(float((gram - torch.eye(24, dtype=torch.float64)).abs().max()))
            return super().evaluate(basis)

    start = random_orthogonal(24, 0).float()
    quasi_newton(Watched(normalise(a), normalise(c), (12, 12), 0.5), start, 300, 0.0)
    assert len(seen) > 60
    assert max(seen) < 5e-6  # a few units of float32's 6e-8 for each turn since the last correction


@pytest.mark.parametrize("solver", ["quasi-newton", "paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fit(solver: str, dtype: torch.dtype) -> None:
    a, c = pairs_of(200, 8, dtype=dtype)
    model = DRSA(n_subspaces=2, solver=solver, n_init=2, random_state=0, tol=1e-5, max_iter=3000).fit(a, c)
    assert model.converged_
    assert model.n_iter_ == len(model.history_) - 1
    assert model.objective_ == model.history_[-1] == max(result.objective for result in model.results_)
    assert (model.subspaces_.dtype, model.subspaces_.dims) == (dtype, (4, 4))
    assert model.subspaces_.orthogonality_error < 100 * torch.finfo(dtype).eps
    # Blocks are sorted by mean a·c.
    relevance = model.subspaces_.relevance(a, c).mean(0)
    assert relevance[0] >= relevance[1]
    # The objective reported is that of the subspaces returned, in whatever order.
    value = literal_objective(
        normalise(a).double(), normalise(c).double(), model.subspaces_.basis.double(), (4, 4), 0.5
    )
    assert model.objective_ == pytest.approx(float(value), rel=1e-5)
    assert model.subspaces_.metadata["seed"] == 0
    assert model.subspaces_.metadata["solver"]["solver"] == solver


def test_same_seed_same_result_and_best_of_more_starts_is_no_worse() -> None:
    a, c = pairs_of(100, 8)
    first, again, other = (DRSA(2, n_init=1, random_state=s).fit(a, c) for s in (0, 0, 1))
    assert torch.equal(first.subspaces_.basis, again.subspaces_.basis)
    assert not torch.equal(first.subspaces_.basis, other.subspaces_.basis)
    more = DRSA(2, n_init=4, random_state=0).fit(a, c)
    assert more.results_[0].objective == pytest.approx(first.objective_, rel=1e-12)
    assert more.objective_ >= first.objective_


def test_unequal_and_partial_dims() -> None:
    a, c = pairs_of(100, 7)
    assert DRSA(3, n_init=1, random_state=0).fit(a, c).subspaces_.dims == (3, 2, 2)
    subspaces = DRSA(dims=[1, 4], n_init=1, random_state=0).fit(a, c).subspaces_
    assert sorted(subspaces.dims) == [1, 4]
    assert not subspaces.is_complete


@pytest.mark.parametrize("solver", [DRSA, DSA])
@pytest.mark.parametrize("seed", range(3))
def test_one_direction_in_two_dimensions_is_a_summit(solver, seed: int) -> None:
    """The figure of section 4.2: no direction within 5° of the one found may be higher."""
    generator = np.random.default_rng(seed)
    radians = np.deg2rad(np.where(generator.random(400) < 0.5, 110, 25) + generator.normal(size=400) * 5)
    arms = np.stack([np.cos(radians), np.sin(radians)], 1) * generator.exponential(size=(400, 1))
    a = torch.as_tensor(arms)
    c = torch.as_tensor((arms @ np.array([[1.0, 0.0]]).T > 0) * np.array([[1.0, 0.1]]))
    (found,) = solver(dims=[1], n_init=1, random_state=seed).fit(a, c).subspaces_.blocks
    turns = torch.linspace(-5, 5, 201, dtype=torch.float64).deg2rad()
    nearby = torch.stack(
        [turns.cos() * found[0] - turns.sin() * found[1], turns.sin() * found[0] + turns.cos() * found[1]]
    )
    values = ((a @ nearby) * ((a if solver is DSA else c) @ nearby)).clamp(min=0).square().mean(0).sqrt()
    # The solver stops when ten iterations gain less than 3e-5.
    assert values[100] >= values.max() * (1 - 3e-5)


def test_reduction_to_ica() -> None:
    """Proposition 2: whitened data, d_k = 1, q = 2, c = a recover independent heavy-tailed sources."""
    generator = np.random.default_rng(0)
    sources = generator.laplace(size=(20_000, 4))
    mixed = sources @ generator.normal(size=(4, 4))
    mixed -= mixed.mean(0)
    values, vectors = np.linalg.eigh(mixed.T @ mixed / len(mixed))
    white = mixed @ vectors / np.sqrt(values)
    model = DSA(dims=[1, 1, 1, 1], q=2.0, n_init=3, random_state=0, tol=1e-9).fit(white)
    correlation = np.abs(np.corrcoef((white @ model.subspaces_.basis.numpy()).T, sources.T)[:4, 4:])
    # Every source is found once. 0.99: kurtosis estimated from 20 000 samples is not exact.
    assert sorted(correlation.argmax(1).tolist()) == [0, 1, 2, 3]
    assert correlation.max(1).min() > 0.99


def test_dsa_is_drsa_without_the_model() -> None:
    a, c = pairs_of(100, 6)
    dsa, drsa = DSA(2, n_init=1, random_state=0), DRSA(2, n_init=1, random_state=0)
    assert torch.equal(dsa.fit(a, c).subspaces_.basis, drsa.fit(a, a).subspaces_.basis)


def test_planted_subspaces_are_found() -> None:
    """Samples that live in one of three random orthogonal planes each: DRSA finds the planes."""
    generator = np.random.default_rng(0)
    planes = ortho_group.rvs(6, random_state=0).reshape(6, 3, 2)
    which, inside = generator.integers(3, size=600), generator.normal(size=(600, 2))
    a = np.einsum("dnk,nk->nd", planes[:, which], inside) + 0.01 * generator.normal(size=(600, 6))
    model = DRSA(3, n_init=3, random_state=0).fit(a, a)
    for block in model.subspaces_.blocks:
        overlaps = [np.linalg.norm(planes[:, k].T @ block.numpy()) ** 2 / 2 for k in range(3)]
        assert max(overlaps) > 0.99


def test_balance_finds_a_weak_concept() -> None:
    """Two concepts of two directions, the second with a hundredth of the relevance.

    The paper's objective prefers to halve the strong concept; levelled pairs give a subspace to each.
    """
    generator = torch.Generator().manual_seed(0)
    rows = []
    for m, strength in enumerate([1.0, 0.1]):
        part = torch.eye(8)[[2 * m, 2 * m + 1]][torch.randint(2, (400,), generator=generator)]
        rows.append(strength * (part + 0.05 * torch.randn(400, 8, generator=generator)))
    a, weak = torch.cat(rows), Subspaces(torch.eye(8)[:, 2:4], [2])

    def weak_share(balance: float) -> float:
        found = DRSA(dims=[2, 2], random_state=0, balance=balance).fit(a, a).subspaces_
        return max(float(found.principal_angles(weak, k=k).cos().square().mean()) for k in range(2))

    assert weak_share(0.0) < 0.6
    assert weak_share(1.0) > 0.95


# Dead subspaces -----------------------------------------------------------------------------------------


def half_relevant() -> tuple[Tensor, Tensor]:
    """Only the first two coordinates carry positive relevance: eye(4) leaves them to one block."""
    a = torch.rand(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    return a, a * torch.tensor([1.0, 1.0, -0.1, -0.1], dtype=torch.float64)


def test_a_subspace_without_positive_relevance_is_restarted() -> None:
    a, c = half_relevant()
    objective, start = Objective(normalise(a), normalise(c), (2, 2), 0.5), torch.eye(4, dtype=torch.float64)
    assert objective.evaluate(start).block_means[1] == 0  # dead at the start
    model = DRSA(2, random_state=0).fit(a, c, init=start)
    assert (objective.evaluate(model.results_[0].basis).block_means > 0).all()


def test_a_subspace_that_dies_on_the_way_is_restarted(monkeypatch) -> None:
    a, c = half_relevant()
    starts = []

    def solver(objective, start, max_iter, tol, callback) -> Result:
        starts.append(start)
        dead = torch.eye(4, dtype=torch.float64)
        return Result(dead if len(starts) == 1 else start, [0.0, 1.0], True, "test")

    monkeypatch.setitem(SOLVERS, "paper", (solver, 1, 0.0))
    DRSA(2, solver="paper", n_init=1, random_state=0).fit(a, c)
    assert len(starts) == 2
    objective = Objective(normalise(a), normalise(c), (2, 2), 0.5)
    assert (objective.evaluate(starts[1]).block_means > 0).all()


@pytest.mark.parametrize("n_subspaces", [1, 2])
def test_relevance_that_is_negative_everywhere_is_an_error(n_subspaces: int) -> None:
    a, _ = pairs_of(50, 6)
    with pytest.raises(ValueError, match="without positive relevance remain"):
        DRSA(n_subspaces, random_state=0).fit(a, -a)


# Coarse to fine -----------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(0, 200))
def test_reduced_blocks_fit(dims: list[int], extra: int) -> None:
    n_directions = len(dims) + extra
    sizes = reduced_dims(dims, n_directions)
    assert all(1 <= size <= d for size, d in zip(sizes, dims, strict=True))
    assert sum(sizes) == min(n_directions, sum(dims))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dims", [(40, 40, 40, 40), (90, 30, 20), (3, 2)])
def test_a_lifted_basis_is_orthogonal_holds_the_reduced_one_and_is_never_left_for_worse(dims, dtype) -> None:
    full = objective_of(1500, 160, dims, dtype)
    reduction = reduce_problem(full)
    assert reduction is not None
    r = reduction.objective.n_features
    assert r <= 80
    reduced = random_orthogonal(r, 0).to(dtype)
    lifted, eps = reduction.lift(reduced, full), torch.finfo(dtype).eps
    torch.testing.assert_close(lifted.T @ lifted, torch.eye(160, dtype=dtype), rtol=0, atol=100 * eps)
    leading = reduction.directions[:, :r] @ reduced
    for here, inside in zip(full.columns, reduction.objective.columns, strict=False):
        block = lifted[:, here]
        outside = leading[:, inside] - block @ (block.T @ leading[:, inside])
        assert float(outside.abs().max()) < 100 * eps
    memory = Memory(full.below)
    value, basis = climb(full, lifted, memory, ((0.95, 2e-3),), 0.0)
    assert value == pytest.approx(full.evaluate(basis).value)
    assert value >= full.evaluate(lifted).value
    result = finish(memory, full, basis, 5, 0.0)
    assert result.objective >= value
    assert all(later >= earlier for earlier, later in itertools.pairwise(result.history))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fit_in_the_reduced_problem(dtype) -> None:
    a, c = (x.numpy().astype(dtype) for x in pairs_of(1500, 160))
    model, again = (DRSA(4, random_state=0, n_init=4).fit(a, c) for _ in range(2))
    assert (len(model.reduced_results_), len(model.results_)) == (4, 1)
    assert model.converged_
    assert torch.equal(model.subspaces_.basis, again.subspaces_.basis)
    assert model.subspaces_.dims == (40, 40, 40, 40)
    assert model.subspaces_.orthogonality_error < 100 * np.finfo(dtype).eps
    plain = DRSA(4, random_state=0, n_init=2, solver="quasi-newton").fit(a, c)
    assert plain.reduced_results_ == []
    # Not a worse basin than those of starts in full; they end within a per cent of each other.
    assert model.objective_ >= 0.995 * plain.objective_


@pytest.mark.parametrize("n_threads", [1, 3])
def test_a_fit_does_not_depend_on_how_many_starts_run_at_once(n_threads: int) -> None:
    a, c = pairs_of(600, 160, dtype=torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(n_threads)
        found = DRSA(4, n_init=5, tol=1e-2, random_state=0).fit(a, c)
        assert torch.get_num_threads() == n_threads
        torch.set_num_threads(2)
        expected = DRSA(4, n_init=5, tol=1e-2, random_state=0).fit(a, c)
    finally:
        torch.set_num_threads(before)
    for one, two in zip(found.reduced_results_, expected.reduced_results_, strict=True):
        assert torch.equal(one.basis, two.basis)
        assert one.history == two.history


def test_a_given_start_is_run_in_full() -> None:
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


def test_few_pairs_in_many_dimensions_are_fitted() -> None:
    a, c = pairs_of(24, 512, dtype=torch.float32)
    model = DRSA(4, random_state=0, n_init=2).fit(a, c)
    assert model.subspaces_.dims == (128,) * 4
    assert model.subspaces_.orthogonality_error < 1e-5
    value = Objective(normalise(a), normalise(c), (128,) * 4, 0.5).evaluate(model.results_[0].basis).value
    assert value == pytest.approx(model.objective_, rel=1e-5)


# The estimator ------------------------------------------------------------------------------------------


def test_budget_that_ends_first_is_a_warning() -> None:
    a, c = pairs_of(100, 6)
    with pytest.warns(ConvergenceWarning, match="max_iter = 3 was reached") as caught:
        model = DRSA(2, max_iter=3, n_init=1, random_state=0).fit(a, c)
    assert caught[0].filename == __file__  # the line that called, not one of ours
    assert not model.converged_
    assert model.results_[0].reason == "max_iter = 3 was reached"
    assert model.n_iter_ == 3


def test_progress_is_shown_on_request(capsys) -> None:
    a, c = pairs_of(100, 6)
    DRSA(2, n_init=1, random_state=0).fit(a, c)
    assert capsys.readouterr().err == ""
    DRSA(2, n_init=2, random_state=0, progress=True).fit(a, c)
    shown = capsys.readouterr().err
    assert "DRSA" in shown
    assert "objective" in shown


def test_global_random_state_is_left_alone() -> None:
    a, c = pairs_of(50, 6)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    expected = np.random.rand(), torch.rand(1)  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    DRSA(2, n_init=1).fit(a, c)
    assert (np.random.rand(), torch.rand(1)) == expected  # noqa: NPY002


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"n_subspaces": 7}, "n_subspaces must be at most D = 6, got 7"),
        ({"n_subspaces": 0}, "n_subspaces must be an integer of at least 1, got 0"),
        ({"dims": [3, 4]}, r"at most D = 6, got \(3, 4\) with sum 7"),
        ({"dims": []}, "dims must add up"),
        ({"dims": 4}, "dims must be a sequence of block sizes"),
        ({"solver": "adam"}, "one of coarse-to-fine, quasi-newton, paper, got 'adam'"),
        ({"q": float("nan")}, "q must be a finite number"),
        ({"n_init": 0}, "n_init must be"),
        ({"max_iter": 0}, "max_iter must be"),
        ({"tol": -1.0}, "tol must be"),
        ({"balance": 1.5}, "balance must be"),
        ({"random_state": -1}, "random_state"),
    ],
)
def test_bad_parameters_are_named(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DRSA(**parameters).fit(*pairs_of(10, 6))


def test_bad_starts_and_samples_are_named() -> None:
    a, c = pairs_of(10, 6)
    with pytest.raises(ValueError, match=r"init must have shape \(D, D\) = \(6, 6\), got \(5, 5\)"):
        DRSA(2).fit(a, c, init=torch.eye(5))
    with pytest.raises(ValueError, match="identity up to"):
        DRSA(2).fit(a, c, init=torch.ones(6, 6))
    with pytest.raises(ValueError, match="4 subspaces need at least as many samples, got 3"):
        DRSA(4).fit(a[:3], c[:3])
    with pytest.raises(ValueError, match="all contexts c are zero"):
        DRSA(2).fit(a, torch.zeros_like(a))


# The authors' data --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_golden_trajectory_of_the_paper_solver(seed: int) -> None:
    arrays, _ = golden.load("drsa_syn")
    model = DRSA(4, solver="paper", max_iter=300)
    model.fit(arrays["A"], arrays["C"], init=arrays[f"U0_seed{seed}"])
    # float32 against the stored float64 trajectory; the sidecar reports up to 2e-5 for the authors' program.
    difference = np.abs(np.array(model.history_[:300]) - arrays[f"traj64_seed{seed}"][:300])
    assert difference.max() < 3e-5


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_golden_objective_is_reached_from_the_same_start(seed: int, dtype) -> None:
    arrays, sidecar = golden.load("drsa_syn")
    start = torch.as_tensor(arrays[f"U0_seed{seed}"].astype(dtype))
    start = torch.linalg.qr(start).Q * torch.linalg.qr(start).R.diagonal().sign()  # exact in float64 too
    model = DRSA(4).fit(arrays["A"].astype(dtype), arrays["C"].astype(dtype), init=start)
    assert model.objective_ >= sidecar["info"]["seeds"][str(seed)]["final_objective"]


def test_golden_dsa_and_order_of_blocks() -> None:
    arrays, sidecar = golden.load("drsa_syn")
    model = DSA(4, solver="paper", max_iter=299).fit(arrays["A"], init=arrays["U0_seed1"])
    np.testing.assert_allclose(model.history_, arrays["traj_dsa_seed1"], atol=3e-5)
    # One paper iteration with step 1 from the stored solution keeps it, so that the order can be compared.
    fitted = DRSA(4, solver="paper", max_iter=1).fit(arrays["A"], arrays["C"], init=arrays["U_seed1"])
    order = sidecar["info"]["seeds"]["1"]["order_paper"]
    stored = torch.as_tensor(arrays["U_seed1"]).split(16, dim=1)
    for block, k in zip(fitted.subspaces_.blocks, order, strict=True):
        assert torch.linalg.svdvals(block.T @ stored[k]).min() > 1 - 1e-4
