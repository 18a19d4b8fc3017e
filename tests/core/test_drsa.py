"""DRSA: objective, gradients, solvers, and the estimator around them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from drsa_core import DRSA, DSA, ConvergenceWarning
from drsa_core.drsa import SOLVERS
from drsa_core.objective import Objective, generalised_mean, rotate_columns
from drsa_core.optimizers import Preconditioner, Result, corrected, quasi_newton, rotate, turn
from drsa_core.pairs import normalise
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ortho_group

from tests import golden


def sample_pairs_of(n: int, d: int, seed: int = 0, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse positive activations, and contexts that agree with them in part."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(n, d, generator=generator, dtype=torch.float64).clamp(min=0)
    c = a * torch.rand(n, d, generator=generator, dtype=torch.float64)
    c += 0.3 * torch.randn(n, d, generator=generator, dtype=torch.float64)
    return a.to(dtype), c.to(dtype)


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


@pytest.mark.parametrize("q", [0.5, 2.0, 1.0, 0.0, -1.0, 7.0])
@pytest.mark.parametrize("dims", [(2, 2, 2), (1, 4, 1), (2, 1), (6,)])
def test_objective_and_gradients_are_the_formula(q: float, dims: tuple[int, ...]) -> None:
    a, c = sample_pairs_of(20, 6)
    objective = Objective(a, c, dims, q)
    basis = torch.as_tensor(ortho_group.rvs(6, random_state=3)).requires_grad_()
    literal = literal_objective(a, c, basis, dims, q)
    literal.backward()
    at = objective.evaluate(basis.detach())
    assert at.value == pytest.approx(literal.item(), rel=1e-12)
    torch.testing.assert_close(objective.gradient(at), basis.grad, rtol=1e-10, atol=1e-12)

    # The tangent gradient: derivative by L of the objective at U·exp(L − Lᵀ).
    lower = torch.zeros(6, 6, dtype=torch.float64, requires_grad=True)
    literal_objective(a, c, basis.detach() @ torch.matrix_exp(lower - lower.T), dims, q).backward()
    below = torch.zeros(6, 6, dtype=torch.float64)
    for here in objective.columns:
        below[here.stop :, here] = 1
    expected = lower.grad * below  # type: ignore[operator]
    torch.testing.assert_close(objective.tangent_gradient(at), expected, rtol=1e-10, atol=1e-12)


def test_curvature_is_the_second_derivative() -> None:
    """With the factors of dJ/dR held fixed, J is Σ_k factors_k/2 Σ_n R⁺_kn²: its difference quotients."""
    a, c = sample_pairs_of(60, 5)
    objective = Objective(a, c, (2, 2), 0.5)  # one column is residual
    start = torch.as_tensor(ortho_group.rvs(5, random_state=0))
    basis = quasi_newton(objective, start, 100, 1e-6, lambda _: None).basis  # mostly concave there
    at = objective.evaluate(basis)

    def fixed(turned: torch.Tensor) -> float:
        return float((at.factors / 2 * objective.evaluate(turned).relevance.square()).sum())

    curvature = objective.curvature(at)
    frame = rotate_columns(basis, curvature.rotations)
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


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6), st.floats(-5, 5))
def test_generalised_mean_lies_between_the_extremes(values: list[float], q: float) -> None:
    mean, slopes = generalised_mean(torch.tensor(values, dtype=torch.float64), q)
    assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)
    # It is homogeneous of degree 1, so Euler's identity holds.
    assert float((slopes * torch.tensor(values, dtype=torch.float64)).sum()) == pytest.approx(mean, rel=1e-9)


def test_generalised_mean_of_zeros() -> None:
    values = torch.tensor([0.0, 4.0])
    assert generalised_mean(values, 0.5)[0] == pytest.approx(1.0)
    assert generalised_mean(values, 0.5)[1][0] == 0
    assert generalised_mean(values, -1.0)[0] == generalised_mean(values, 0.0)[0] == 0
    assert generalised_mean(torch.zeros(3), 0.5)[0] == 0


def test_inner_rotations_leave_the_objective_and_follow_the_gradient() -> None:
    a, c = sample_pairs_of(50, 6)
    objective = Objective(a, c, (2, 3), 0.5)  # one column is residual
    basis = torch.as_tensor(ortho_group.rvs(6, random_state=0))
    at = objective.evaluate(basis)
    rotations = objective.inner_rotations(at)
    there = objective.evaluate(rotate_columns(basis, rotations))
    assert there.value == pytest.approx(at.value, rel=1e-12)
    gradient = rotate(objective.tangent_gradient(at), rotations)
    torch.testing.assert_close(objective.tangent_gradient(there), gradient)
    frame = torch.block_diag(*rotations)
    torch.testing.assert_close(gradient, frame.T @ objective.tangent_gradient(at) @ frame)


def test_the_preconditioner_divides_in_its_frame() -> None:
    a, c = sample_pairs_of(50, 6)
    objective = Objective(a, c, (2, 3), 0.5)
    at = objective.evaluate(torch.as_tensor(ortho_group.rvs(6, random_state=0)))
    curvature, gradient = objective.curvature(at), objective.tangent_gradient(at)
    precondition = Preconditioner(curvature)
    frame = torch.block_diag(*curvature.rotations)
    expected = frame @ ((frame.T @ gradient @ frame) / precondition.diagonal) @ frame.T
    torch.testing.assert_close(precondition(gradient), expected)
    assert (precondition.diagonal > 0).all()  # also where the objective is not concave
    assert (precondition.diagonal >= curvature.diagonal).all()


@pytest.mark.parametrize("dims", [(1,) * 12, (2,) * 7, (3, 1, 1, 1, 1, 1, 1, 1, 2)])
def test_whole_products_for_many_blocks(dims: tuple[int, ...], monkeypatch) -> None:
    a, c = sample_pairs_of(40, 14)
    objective = Objective(a, c, dims, 0.5)
    at = objective.evaluate(torch.as_tensor(ortho_group.rvs(14, random_state=0)))
    whole = objective.tangent_gradient(at)
    monkeypatch.setattr("drsa_core.objective.WHOLE_PRODUCTS", 100)
    torch.testing.assert_close(whole, objective.tangent_gradient(at), rtol=1e-10, atol=1e-14)


def test_turn_is_orthogonal_and_agrees_with_the_exponential() -> None:
    basis = torch.as_tensor(ortho_group.rvs(5, random_state=0))
    lower = 1e-3 * torch.randn(5, 5, dtype=torch.float64).tril(-1)
    turned = turn(basis, lower)
    identity = torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(turned.T @ turned, identity, atol=1e-14, rtol=0)
    # They agree to second order: the difference is of the order of 1e-9.
    torch.testing.assert_close(turned, basis @ torch.matrix_exp(lower - lower.T), atol=1e-8, rtol=0)
    # And the Cayley transform as it is written.
    half = (lower - lower.T) / 2
    cayley = torch.linalg.inv(identity - half) @ (identity + half)
    torch.testing.assert_close(turned, basis @ cayley, atol=1e-14, rtol=0)


def test_a_correction_squares_the_error() -> None:
    noise = 1e-5 * torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    basis = torch.as_tensor(ortho_group.rvs(6, random_state=0)) + noise

    def error(basis: torch.Tensor) -> float:
        return float((basis.T @ basis - torch.eye(6, dtype=torch.float64)).abs().max())

    assert error(basis) > 1e-6
    assert error(corrected(basis)) < 1e-8


def test_rounding_errors_of_many_turns_do_not_pile_up() -> None:
    torch.manual_seed(0)
    a, c = sample_pairs_of(60, 24, dtype=torch.float32)
    seen: list[float] = []
    scales: list[float] = []

    class Watched(Objective):
        def evaluate(self, basis):
            gram = basis.double().T @ basis.double()
            seen.append(float((gram - torch.eye(24, dtype=torch.float64)).abs().max()))
            scales.append(abs(float(gram.trace()) / 24 - 1))  # by which J would be too large or too small
            return super().evaluate(basis)

    start = torch.as_tensor(ortho_group.rvs(24, random_state=0)).float()
    quasi_newton(Watched(a, c, (12, 12), 0.5), start, 300, 0.0, lambda _: None)
    assert len(seen) > 60
    assert max(seen) < 5e-6  # a few units of float32's 6e-8 for each turn since the last correction
    assert max(scales) < 1e-6  # a third of the default tol


def test_normalisation() -> None:
    vectors = torch.randn(10, 16, dtype=torch.float64) * 7
    normalised = normalise(vectors)
    # Note E: root mean square over all entries, and the fourth root of D.
    scale = math.sqrt(sum(float(x) ** 2 for x in vectors.flatten()) / 160) * 16**0.25
    torch.testing.assert_close(normalised, vectors / scale)
    with pytest.raises(ValueError, match="all zero"):
        normalise(torch.zeros(2, 2))


@pytest.mark.parametrize("solver", ["quasi-newton", "paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fit(solver: str, dtype: torch.dtype) -> None:
    a, c = sample_pairs_of(200, 8, dtype=dtype)
    model = DRSA(n_subspaces=2, solver=solver, n_init=2, random_state=0, tol=1e-5, max_iter=3000).fit(a, c)
    assert model.converged_
    assert model.n_iter_ == len(model.history_) - 1
    assert model.objective_ == model.history_[-1] == max(result.objective for result in model.results_)
    assert model.subspaces_.dtype == dtype
    assert model.subspaces_.dims == (4, 4)
    assert model.subspaces_.orthogonality_error < 100 * torch.finfo(dtype).eps
    assert all(later >= earlier for earlier, later in itertools.pairwise(model.history_[-10:]))
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
    a, c = sample_pairs_of(100, 8)
    first, again, other = (DRSA(2, n_init=1, random_state=s).fit(a, c) for s in (0, 0, 1))
    assert torch.equal(first.subspaces_.basis, again.subspaces_.basis)
    assert not torch.equal(first.subspaces_.basis, other.subspaces_.basis)
    more = DRSA(2, n_init=4, random_state=0).fit(a, c)
    assert more.results_[0].objective == pytest.approx(first.objective_, rel=1e-12)
    assert more.objective_ >= first.objective_


def test_unequal_and_partial_dims() -> None:
    a, c = sample_pairs_of(100, 7)
    assert DRSA(3, n_init=1, random_state=0).fit(a, c).subspaces_.dims == (3, 2, 2)
    subspaces = DRSA(dims=[1, 4], n_init=1, random_state=0).fit(a, c).subspaces_
    assert sorted(subspaces.dims) == [1, 4]
    assert not subspaces.is_complete
    assert subspaces.completed().is_complete


def test_one_direction_in_two_dimensions_is_found_by_a_sweep() -> None:
    """The figure of section 4.2: a single one-dimensional subspace, against all angles."""
    a, c = sample_pairs_of(200, 2)
    model = DRSA(dims=[1], n_init=3, random_state=0, tol=1e-9).fit(a, c)
    angles = torch.linspace(0, math.pi, 10_001, dtype=torch.float64)
    directions = torch.stack([angles.cos(), angles.sin()])
    relevance = ((normalise(a) @ directions) * (normalise(c) @ directions)).clamp(min=0)
    best = relevance.square().mean(0).sqrt().max()
    assert model.objective_ == pytest.approx(float(best), rel=1e-6)


def test_reduction_to_ica() -> None:
    """Proposition 2: whitened data, d_k = 1, q = 2, c = a recover independent heavy-tailed sources."""
    generator = np.random.default_rng(0)
    sources = generator.laplace(size=(20_000, 4))
    mixed = sources @ generator.normal(size=(4, 4))
    mixed -= mixed.mean(0)
    values, vectors = np.linalg.eigh(mixed.T @ mixed / len(mixed))
    white = mixed @ vectors / np.sqrt(values)
    model = DSA(dims=[1, 1, 1, 1], q=2.0, n_init=3, random_state=0, tol=1e-9).fit(white)
    found = white @ model.subspaces_.basis.numpy()
    correlation = np.abs(np.corrcoef(found.T, sources.T)[:4, 4:])
    # Every source is found once. 0.99: kurtosis estimated from 20 000 samples is not exact.
    assert sorted(correlation.argmax(1).tolist()) == [0, 1, 2, 3]
    assert correlation.max(1).min() > 0.99


def test_dsa_is_drsa_without_the_model() -> None:
    a, c = sample_pairs_of(100, 6)
    dsa, drsa = DSA(2, n_init=1, random_state=0), DRSA(2, n_init=1, random_state=0)
    assert torch.equal(dsa.fit(a, c).subspaces_.basis, drsa.fit(a, a).subspaces_.basis)


def test_planted_subspaces_are_found() -> None:
    """Samples that live in one of three random orthogonal planes each: DRSA finds the planes."""
    generator = np.random.default_rng(0)
    planes = ortho_group.rvs(6, random_state=0).reshape(6, 3, 2)
    which = generator.integers(3, size=600)
    inside = generator.normal(size=(600, 2))
    a = np.einsum("dnk,nk->nd", planes[:, which], inside) + 0.01 * generator.normal(size=(600, 6))
    model = DRSA(3, n_init=3, random_state=0).fit(a, a)
    for block in model.subspaces_.blocks:
        overlaps = [np.linalg.norm(planes[:, k].T @ block.numpy()) ** 2 / 2 for k in range(3)]
        assert max(overlaps) > 0.99


def test_a_subspace_without_positive_relevance_is_restarted() -> None:
    """Only the first two coordinates carry positive relevance, and the start leaves them to one block."""
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(50, 4, generator=generator, dtype=torch.float64) + 0.1
    c = a * torch.tensor([1.0, 1.0, -0.1, -0.1], dtype=torch.float64)
    start = torch.eye(4, dtype=torch.float64)
    objective = Objective(normalise(a), normalise(c), (2, 2), 0.5)
    assert objective.evaluate(start).block_means[1] == 0  # dead at the start
    model = DRSA(2, random_state=0).fit(a, c, init=start)
    final = objective.evaluate(model.results_[0].basis)
    assert (final.block_means > 0).all()


def test_a_subspace_that_dies_on_the_way_is_restarted(monkeypatch) -> None:
    """A solver that leaves all positive relevance to one block is started again from there."""
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(50, 4, generator=generator, dtype=torch.float64) + 0.1
    c = a * torch.tensor([1.0, 1.0, -0.1, -0.1], dtype=torch.float64)
    dead = torch.eye(4, dtype=torch.float64)
    starts = []

    def solver(objective, start, max_iter, tol, callback) -> Result:
        starts.append(start)
        at_dead = len(starts) == 1
        return Result(dead if at_dead else start, [0.0, 1.0], True, "test")

    monkeypatch.setitem(SOLVERS, "paper", (solver, 1, 0.0))
    DRSA(2, solver="paper", n_init=1, random_state=0).fit(a, c)
    assert len(starts) == 2
    objective = Objective(normalise(a), normalise(c), (2, 2), 0.5)
    assert (objective.evaluate(starts[1]).block_means > 0).all()


def test_relevance_that_is_negative_everywhere_is_an_error() -> None:
    a, _ = sample_pairs_of(50, 6)
    with pytest.raises(ValueError, match="without positive relevance remain"):
        DRSA(2, random_state=0).fit(a, -a)
    with pytest.raises(ValueError, match="without positive relevance remain"):
        DRSA(1, random_state=0).fit(a, -a)


def test_budget_that_ends_first_is_a_warning() -> None:
    a, c = sample_pairs_of(100, 6)
    with pytest.warns(ConvergenceWarning, match="max_iter = 3 was reached") as caught:
        model = DRSA(2, max_iter=3, n_init=1, random_state=0).fit(a, c)
    assert caught[0].filename == __file__  # the line that called, not one of ours
    assert not model.converged_
    assert model.n_iter_ == 3


def test_progress_is_shown_on_request(capsys) -> None:
    a, c = sample_pairs_of(100, 6)
    DRSA(2, n_init=1, random_state=0).fit(a, c)
    assert capsys.readouterr().err == ""
    DRSA(2, n_init=2, random_state=0, progress=True).fit(a, c)
    shown = capsys.readouterr().err
    assert "DRSA start 2/2" in shown
    assert "objective" in shown


def test_global_random_state_is_left_alone() -> None:
    a, c = sample_pairs_of(50, 6)
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
        ({"solver": "adam"}, "one of coarse-to-fine, quasi-newton, paper, got 'adam'"),
        ({"q": float("inf")}, "finite number, got inf"),
        ({"n_init": 0}, "n_init must be"),
        ({"max_iter": 0}, "max_iter must be"),
        ({"tol": -1.0}, "tol must be a finite number of at least 0, got -1.0"),
    ],
)
def test_bad_parameters_are_named(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DRSA(**parameters).fit(*sample_pairs_of(10, 6))


def test_bad_starts_are_named() -> None:
    a, c = sample_pairs_of(10, 6)
    with pytest.raises(ValueError, match=r"init must have shape \(D, D\) = \(6, 6\), got \(5, 5\)"):
        DRSA(2).fit(a, c, init=torch.eye(5))
    with pytest.raises(ValueError, match="identity up to"):
        DRSA(2).fit(a, c, init=torch.ones(6, 6))
    with pytest.raises(ValueError, match="4 subspaces need at least as many samples, got 3"):
        DRSA(4).fit(a[:3], c[:3])
    with pytest.raises(ValueError, match="all contexts c are zero"):
        DRSA(2).fit(a, torch.zeros_like(a))


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
