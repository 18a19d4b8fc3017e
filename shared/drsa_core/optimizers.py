"""What solvers of the DRSA objective share, and the paper's own loop, kept as the yardstick."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from scipy.stats import ortho_group
from torch import Tensor
from tqdm import tqdm

from .distributed import one_by_one, parallel_map
from .objective import (
    Curvature,
    Evaluation,
    Objective,
    below_blocks,
    block_columns,
    missing_columns,
    rotate_columns,
)

#: Called with the objective after every iteration.
Callback = Callable[[float], None]


@dataclass(frozen=True)
class Result:
    """What a solver returns.

    Attributes
    ----------
    basis : tensor, shape (D, D)
        The orthogonal matrix reached.
    history : list of float
        J at the start and after each iteration.
    converged : bool
        Whether the stopping criterion was met within the budget.
    reason : str
        Why the solver stopped.
    """

    basis: Tensor = field(repr=False)
    history: list[float] = field(repr=False)
    converged: bool
    reason: str

    @property
    def objective(self) -> float:
        """J at `basis`."""
        return self.history[-1]

    @property
    def n_iter(self) -> int:
        """Iterations made."""
        return len(self.history) - 1


def gradient_ascent(
    objective: Objective, start: Tensor, max_iter: int, tol: float, callback: Callback
) -> Result:
    """The paper's loop: U ← orth(U + ∂J/∂U), with a step of 1 and orth(V) = V (VᵀV)^-½ (section 4.2).

    Four products of N×D×D and one D×D eigenproblem an iteration.
    """
    basis, at = start, objective.evaluate(start)
    history = [at.value]
    while len(history) <= max_iter:
        basis = orthogonalise(basis + objective.gradient(at))
        at = objective.evaluate(basis)
        history.append(at.value)
        callback(at.value)
        if stalled(history, tol):
            return Result(basis, history, True, f"the gain per iteration fell below tol = {tol:g}")
    return Result(basis, history, False, f"max_iter = {max_iter} was reached")


def orthogonalise(matrix: Tensor) -> Tensor:
    """The closest orthogonal matrix, V (VᵀV)^-½."""
    values, vectors = torch.linalg.eigh((matrix.T @ matrix).double())
    root = (vectors * values.rsqrt()) @ vectors.T
    return (matrix.double() @ root).to(matrix.dtype)


def stalled(history: list[float], tol: float, window: int = 10) -> bool:
    """Whether the relative gain per iteration, over the last `window` iterations, is at most `tol`.

    Zero asks for no gain at all in the window, which rounding alone may bring about: it never stalls.
    """
    if tol <= 0 or len(history) <= window:
        return False
    return history[-1] - history[-1 - window] <= tol * window * abs(history[-1])


#: Iterations with the paper's step before the quasi-Newton ones.
#: Chosen, with FLOOR and the default tol, on the reference data of the tests and one VGG16 start: other data
#: may be served better by more, and `n_init` guards against a bad basin.
WARM_UP = 40
#: Where the paper's step overshoots, it is halved down to this part of it.
SMALLEST_FRACTION = 2.0**-10
#: Pairs of steps and gradient changes that L-BFGS remembers.
MEMORY = 20
#: Iterations between corrections of the basis, and between updates of the preconditioner and of the bases
#: inside the blocks.
REFRESH = 5
#: Smallest curvature, relative to the largest one: directions with less count as flat.
FLOOR = 1e-3
#: Largest angle, in radians, by which one step may turn the basis; the first quasi-Newton step is shorter.
#: FIRST_ANGLE and the iterations of `largest_angle` were chosen among nine combinations on the reference data
#: of the tests, where one start lies between two basins and five of the nine reach the better one.
MAX_ANGLE, FIRST_ANGLE = 1.0, 0.1


class Point(Protocol):
    """An objective at one U; what else it holds is the objective's own."""

    @property
    def value(self) -> float:
        """J(U)."""


At = TypeVar("At", bound=Point)


class Problem(Protocol[At]):
    """What the solver asks of an objective. U is (D, D), and L is zero on and above the block diagonal.

    Where the samples are, on one machine or on many, all or some of them, is the objective's business.

    Attributes
    ----------
    columns : list of slice
        Columns of U that belong to each block, the residual included.
    """

    columns: list[slice]

    def evaluate(self, basis: Tensor) -> At:
        """The objective at U."""

    def tangent_gradient(self, at: At) -> Tensor:
        """Gradient of J(U exp(L − Lᵀ)) at L = 0, shape (D, D)."""

    def curvature(self, at: At) -> Curvature:
        """Diagonal of the negative Hessian in L, and the frame in which it is taken."""


def quasi_newton(
    objective: Problem[At],
    start: Tensor,
    max_iter: int,
    tol: float,
    callback: Callback,
    warm_up: int = WARM_UP,
    memory: Memory | None = None,
    window: int = 10,
) -> Result:
    """Maximise the objective from an orthogonal `start` (D, D), with `warm_up` iterations of the paper's.

    `memory` is that of an earlier run on nearly the same objective, which ended at `start`; it is added to.
    `window` is the number of iterations over which the gain is held against `tol`.
    """
    basis, at = start, objective.evaluate(start)
    gradient = objective.tangent_gradient(at)
    history = [at.value]
    memory = Memory(objective.columns) if memory is None else memory
    since_refresh = 0
    fraction = 1.0  # of the paper's step
    while len(history) <= max_iter:
        if len(history) % REFRESH == 0:
            basis = corrected(basis)
        if len(history) <= warm_up:
            # To first order the paper's U + ∂J/∂U, orthogonalised, is a turn by half of L − Lᵀ.
            trial_basis = turn(basis, gradient * (fraction / 2))
            there = objective.evaluate(trial_basis)
            if there.value < at.value and fraction > SMALLEST_FRACTION:
                fraction /= 2  # a turn by the gradient overshoots where the gradient is large
                continue
            basis, at = trial_basis, there
            gradient = objective.tangent_gradient(at)
        else:
            if since_refresh % REFRESH == 0:
                preconditioner = Preconditioner(objective.curvature(at))
            since_refresh += 1
            step, slope = memory.direction(gradient, preconditioner)
            trial = line_search(objective, basis, at, step, slope)
            if trial is None and memory.pairs:
                memory.pairs.clear()  # the remembered curvature misled: try the preconditioned gradient
                continue
            if trial is None:
                return Result(orthogonalise(basis), history, True, "no step increases the objective further")
            length, basis, at = trial
            previous, gradient = gradient, objective.tangent_gradient(at)
            memory.add(length * step, previous - gradient)
        history.append(at.value)
        callback(at.value)
        # Only quasi-Newton iterations tell: the first ones may creep, or go to and fro.
        if stalled(history[warm_up:], tol, window):
            reason = f"the gain per iteration fell below tol = {tol:g}"
            return Result(orthogonalise(basis), history, True, reason)
    return Result(orthogonalise(basis), history, False, f"max_iter = {max_iter} was reached")


class Preconditioner:
    """Division by the curvature, made positive, in the frame in which it is diagonal."""

    def __init__(self, curvature: Curvature) -> None:
        self.rotations = curvature.rotations
        self.back = [rotation.T for rotation in curvature.rotations]
        largest = float(curvature.diagonal.abs().max())
        self.diagonal = curvature.diagonal.clamp(min=FLOOR * largest if largest > 0 else 1.0)

    def __call__(self, lower: Tensor) -> Tensor:
        """H⁻¹ L, shape (D, D)."""
        return rotate(rotate(lower, self.rotations) / self.diagonal, self.back)


class Memory:
    """The steps and gradient changes of L-BFGS, with the two-loop recursion over them.

    Parameters
    ----------
    columns : list of slice
        Blocks. Only the entries of L below them are kept, as vectors: three eighths of all for four blocks.
    """

    def __init__(self, columns: list[slice]) -> None:
        self.below = [(slice(here.stop, None), here) for here in columns[:-1]]
        #: (step, decrease of the gradient, 1 / their inner product), oldest first.
        self.pairs: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=MEMORY)

    def pack(self, lower: Tensor) -> Tensor:
        """The entries of L (D, D) below the blocks, as a vector."""
        parts = [lower[rows, columns].reshape(-1) for rows, columns in self.below]
        return torch.cat(parts) if parts else lower.new_zeros(0)

    def unpack(self, packed: Tensor, like: Tensor) -> Tensor:
        """L, of the shape of `like`, from its entries below the blocks."""
        lower, first = torch.zeros_like(like), 0
        for rows, columns in self.below:
            part = lower[rows, columns]
            part.copy_(packed[first : first + part.numel()].view(part.shape))
            first += part.numel()
        return lower

    def add(self, step: Tensor, decrease: Tensor) -> None:
        """Remember a step, unless the objective is not concave along it."""
        step, decrease = self.pack(step), self.pack(decrease)
        product = float(step @ decrease)
        if product > 1e-10 * float(decrease @ decrease):
            self.pairs.append((step, decrease, 1 / product))

    def direction(self, gradient: Tensor, preconditioner: Preconditioner) -> tuple[Tensor, float]:
        """Ascent direction L and the slope of J along it."""

        def preconditioned(packed: Tensor) -> Tensor:
            return self.pack(preconditioner(self.unpack(packed, gradient)))

        slopes = self.pack(gradient)
        direction, coefficients = slopes.clone(), []
        for step, decrease, inverse in reversed(self.pairs):
            coefficients.append(float(step @ direction) * inverse)
            direction.sub_(decrease, alpha=coefficients[-1])
        direction = preconditioned(direction)
        if self.pairs:
            _, decrease, inverse = self.pairs[-1]
            direction /= inverse * float(decrease @ preconditioned(decrease))
        for (step, decrease, inverse), coefficient in zip(self.pairs, reversed(coefficients), strict=True):
            direction.add_(step, alpha=coefficient - float(decrease @ direction) * inverse)
        slope = float(slopes @ direction)
        if slope <= 0 and self.pairs:
            self.pairs.clear()
            return self.direction(gradient, preconditioner)
        lower = self.unpack(direction, gradient)
        limit = MAX_ANGLE if self.pairs else FIRST_ANGLE
        shrink = min(1.0, limit / max(largest_angle(lower), 1e-30))
        return lower * shrink, slope * shrink


def line_search(
    objective: Problem[At], basis: Tensor, at: At, step: Tensor, slope: float
) -> tuple[float, Tensor, At] | None:
    """Backtrack from the full step until J gains enough (Armijo); None if no length does."""
    length = 1.0
    for _ in range(15):
        trial = turn(basis, length * step)
        there = objective.evaluate(trial)
        if there.value > at.value and there.value >= at.value + 1e-4 * length * slope:
            return length, trial, there
        # The maximum of the parabola through value, slope and trial value, kept within bounds.
        gained, hoped = there.value - at.value, length * slope
        length *= min(max(hoped / (2 * (hoped - gained)), 0.1), 0.5) if hoped > gained else 0.5
    return None


def rotate(lower: Tensor, rotations: list[Tensor]) -> Tensor:
    """Qᵀ L Q for a block-diagonal Q, given by its blocks, where L is zero on and above the block diagonal."""
    rotated, first = torch.zeros_like(lower), 0
    for rotation in rotations:
        here = slice(first, first + len(rotation))
        # L's columns to the left of this block are rotated already: its rows can follow.
        rotated[here, :first] = rotation.T @ rotated[here, :first]
        rotated[here.stop :, here] = lower[here.stop :, here] @ rotation
        first = here.stop
    return rotated


def turn(basis: Tensor, lower: Tensor) -> Tensor:
    """U·cayley(L − Lᵀ), where cayley(Ω) = (I − Ω/2)⁻¹(I + Ω/2) agrees with exp(Ω) to second order.

    Since I + Ω/2 = 2I − (I − Ω/2), this is 2U(I − Ω/2)⁻¹ − U: one solution and no product.
    """
    half = (lower - lower.T) / 2
    identity = torch.eye(len(half), dtype=half.dtype, device=half.device)
    return 2 * torch.linalg.solve(identity - half, basis, left=False) - basis


def corrected(basis: Tensor) -> Tensor:
    """A Newton step towards orthogonality, which keeps rounding errors of turns from piling up.

    Those of a few turns are of either sign, and change J by much less than the default `tol`.
    """
    return 1.5 * basis - 0.5 * basis @ (basis.T @ basis)


def largest_angle(lower: Tensor, iterations: int = 16) -> float:
    """Spectral norm of L − Lᵀ by power iteration: the largest angle of the turn, from below."""
    skew = lower - lower.T
    vector = skew[:, skew.square().sum(0).argmax()]
    for _ in range(iterations):
        vector = skew @ (vector / vector.norm().clamp(min=1e-30))
    return float(vector.norm())


#: The result is only a start: a few iterations are enough.
MAX_ITER, TOL = 10, 1e-3


@dataclass(frozen=True)
class QuadraticPoint:
    """The quadratic objective at Q: its value, Q, and the columns S_k Q_k next to each other, (n, n)."""

    value: float
    basis: Tensor
    images: Tensor


class Quadratic:
    """½ Σ_k tr(Q_kᵀ S_k Q_k) over orthogonal Q (n, n), a `Problem` of the quasi-Newton solver.

    Parameters
    ----------
    matrices : tensor, shape (K, n, n)
        Symmetric S_k.
    dims : sequence of int
        Block sizes of at least 1 that add up to n.
    """

    def __init__(self, matrices: Tensor, dims: Sequence[int]) -> None:
        self.matrices, self.columns = matrices, block_columns(dims, matrices.shape[1])
        self.total = matrices.sum(0)

    def evaluate(self, basis: Tensor) -> QuadraticPoint:
        """The objective at Q."""
        images = torch.cat(
            [matrix @ basis[:, here] for matrix, here in zip(self.matrices, self.columns, strict=True)], dim=1
        )
        return QuadraticPoint(float((basis * images).sum()) / 2, basis, images)

    def tangent_gradient(self, at: QuadraticPoint) -> Tensor:
        """∂/∂L_lk = Q_lᵀ (S_k − S_l) Q_k."""
        product = at.basis.T @ at.images
        return below_blocks(product - product.T, self.columns)

    def curvature(self, at: QuadraticPoint) -> Curvature:
        """−∂²/∂L_ji² = s_ki + s_lj − s_kj − s_li with s_kj = Q_jᵀ S_k Q_j, as for the DRSA objective."""
        rotations = []
        for k, here in enumerate(self.columns):
            own = at.basis[:, here]
            others = (self.total - self.matrices[k]) / max(1, len(self.columns) - 1)
            contrast = own.T @ at.images[:, here] - own.T @ others @ own
            rotations.append(torch.linalg.eigh((contrast + contrast.T) / 2).eigenvectors)
        basis = rotate_columns(at.basis, rotations)
        scores = torch.stack([(basis * (matrix @ basis)).sum(0) for matrix in self.matrices])  # [k, j] = s_kj
        sizes = torch.tensor([here.stop - here.start for here in self.columns], device=scores.device)
        spread = scores.repeat_interleave(sizes, dim=0).T  # [j, i] = s_{block of i, j}
        own_scores = spread.diagonal()
        diagonal = own_scores[:, None] + own_scores[None, :] - spread - spread.T
        return Curvature(rotations, diagonal)


def share_out(matrices: Tensor, sizes: Sequence[int]) -> Tensor:
    """Orthogonal Q (n, n), in blocks of the given sizes, for which Σ_k tr(Q_kᵀ S_k Q_k) is large.

    Parameters
    ----------
    matrices : tensor, shape (K, n, n)
        Symmetric S_k, one for each size.
    sizes : sequence of int
        They add up to n; some may be zero.
    """
    used = [k for k, size in enumerate(sizes) if size]
    problem = Quadratic(matrices[used], [sizes[k] for k in used])
    start = torch.eye(matrices.shape[1], dtype=matrices.dtype, device=matrices.device)
    return quasi_newton(problem, start, MAX_ITER, TOL, lambda _: None, warm_up=0).basis


@dataclass(frozen=True)
class Span:
    """The same problem in fewer dimensions.

    Attributes
    ----------
    objective : Objective
        With Σ_k min(d_k, s) features, the residual's included.
    directions : tensor, shape (D, D)
        Orthonormal columns; the first are the features of `objective`, all others see no pair.
    columns : list of slice
        Blocks in D dimensions.
    """

    objective: Objective
    directions: Tensor
    columns: list[slice]

    def expand(self, basis: Tensor) -> Tensor:
        """Basis (D, D) with the same relevances as one of the small problem."""
        size = self.objective.n_features
        inside = [(self.directions[:, :size] @ basis)[:, here] for here in self.objective.columns]
        outside = self.directions[:, size:].split(missing_columns(self.columns, inside), dim=1)
        return torch.cat([part for pair in zip(inside, outside, strict=True) for part in pair], dim=1)

    def expand_result(self, result: Result) -> Result:
        """A result of the small problem as one of the full problem."""
        return replace(result, basis=self.expand(result.basis))


def reduce_to_span(objective: Objective) -> Span | None:
    """The problem in Σ_k min(d_k, s) dimensions for s = 2N, or None if these are not fewer than D."""
    span = 2 * objective.n_samples
    sizes = [min(here.stop - here.start, span) for here in objective.columns]
    size = sum(sizes)
    if size >= objective.n_features:
        return None
    # In float64: a direction that is not quite orthogonal would change the relevances.
    pairs = torch.cat([objective.a, objective.c]).double()
    directions = torch.linalg.qr(pairs.T, mode="complete").Q
    inside = directions[:, :span]

    def coordinates(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x.double() @ inside, (0, size - span)).to(x)

    dims = sizes[: objective.n_subspaces]
    a, c = coordinates(objective.a), coordinates(objective.c)
    small = Objective(a, c, dims, objective.q, objective.n_total)
    return Span(small, directions.to(objective.a), objective.columns)


#: Part of the weighted energy that the leading directions hold, and of Σ_n R_n² that the samples hold.
ENERGY, EVIDENCE = 0.85, 0.97
#: Fewest directions, in all and for each block, and fewest samples for each direction.
FEWEST_DIRECTIONS, DIRECTIONS_PER_BLOCK, SAMPLES_PER_DIRECTION = 64, 8, 16
#: Iterations of the paper's from each reduced start, and the tolerance: enough to tell the best start.
COARSE_WARM_UP, COARSE_TOL = 20, 1e-3
#: Levels on which a lifted start is improved first: part of J that their samples hold, and how far.
LEVELS = ((0.95, 2e-3), (0.98, 1e-3), (0.995, 3e-4))
LEVEL_MAX_ITER = 30


@dataclass(frozen=True)
class Reduction:
    """A problem in the r leading directions, for the samples that matter.

    Attributes
    ----------
    objective : Objective
        The reduced problem, with r features and smaller blocks.
    directions : tensor, shape (D, D)
        Orthonormal columns; the first r are the features of the reduced problem.
    samples : tensor of int
        The samples it has.
    """

    objective: Objective
    directions: Tensor
    samples: Tensor

    def lift(self, basis: Tensor, full: Objective) -> Tensor:
        """A basis (D, D) of the full problem that holds each block of a reduced one (r, r)."""
        r, dims = self.objective.n_features, self.objective.dims
        leading, others = self.directions[:, :r] @ basis, self.directions[:, r:]
        inside = [leading[:, here] for here in block_columns(dims, r)]
        if len(inside) < len(full.columns):
            inside.append(leading[:, :0])  # only the full problem has a residual
        sizes = missing_columns(full.columns, inside)
        outside = list(others.split(sizes, dim=1))

        def joined() -> Tensor:
            return torch.cat([column for pair in zip(inside, outside, strict=True) for column in pair], dim=1)

        if max(sizes) < others.shape[1]:  # else all of them go to one block
            some = full.of_samples(self.samples)
            turned = others @ share_out(some.linearised(some.evaluate(joined()), others), sizes)
            outside = list(turned.split(sizes, dim=1))
        return joined()


def reduce_problem(full: Objective) -> Reduction | None:
    """The reduced problem, or None where it would have more than half of the directions.

    Samples are weighted by the square of their positive relevance max(0, a·c), which is what each adds to
    J² for a single subspace. Directions are the leading eigenvectors of E[w aaᵀ]/E[w ‖a‖²] + the same for c.
    """
    relevance = full.pair_relevance().clamp_(min=0)
    weights = relevance.double().square()
    if not weights.any():
        return None
    weights = (weights / weights.sum()).to(relevance)
    moments = full.moments(weights)
    energy = moments[0] / moments[0].trace() + moments[1] / moments[1].trace()
    values, vectors = torch.linalg.eigh(energy)
    values, vectors = values.flip(0).clamp_(min=0), vectors.flip(1)
    by_energy = int((values.cumsum(0) < ENERGY * values.sum()).sum()) + 1
    n_directions = max(by_energy, FEWEST_DIRECTIONS, DIRECTIONS_PER_BLOCK * full.n_subspaces)
    if n_directions > full.n_features // 2:
        return None
    samples = leading_samples(weights, EVIDENCE, SAMPLES_PER_DIRECTION * n_directions)
    directions = vectors.to(full.a)
    dims = reduced_dims(full.dims, n_directions)
    reduced = full.of_samples(samples).in_directions(directions[:, :n_directions], dims)
    return Reduction(reduced, directions, samples)


def reduced_dims(dims: Sequence[int], n_directions: int) -> tuple[int, ...]:
    """Block sizes in r directions: the same if there is room, else in proportion, adding up to r."""
    total = sum(dims)
    if total <= n_directions:
        return tuple(dims)
    exact = [n_directions * d / total for d in dims]
    sizes = [max(1, int(size)) for size in exact]
    while sum(sizes) != n_directions:  # those furthest from their share first, ties in order
        sign = 1 if sum(sizes) < n_directions else -1
        behind = [
            sign * (size - want) if size + sign >= 1 else float("inf")
            for size, want in zip(sizes, exact, strict=True)
        ]
        sizes[behind.index(min(behind))] += sign
    return tuple(sizes)


def leading_samples(weights: Tensor, part: float, fewest: int) -> Tensor:
    """Indices, ascending, of the largest weights (N,) that hold `part` of their sum, at least `fewest`."""
    ordered, order = weights.double().sort(descending=True, stable=True)
    count = int((ordered.cumsum(0) < part * ordered.sum()).sum()) + 1
    return order[: max(count, fewest)].sort().values


@dataclass(frozen=True)
class Climb:
    """A basis of the full problem on its way up.

    Attributes
    ----------
    basis : tensor, shape (D, D)
    at : Evaluation
        The objective there, of all samples.
    memory : Memory
        What L-BFGS remembers of the way.
    """

    basis: Tensor
    at: Evaluation
    memory: Memory


def climb(full: Objective, start: Tensor, tol: float) -> Climb:
    """The first level, from a lifted start; after it J tells better than before which start ends highest."""
    begin = Climb(start, full.evaluate(start), Memory(full.columns))
    return _through(LEVELS[:1], full, begin, tol, lambda _: None)


def finish(full: Objective, begin: Climb, max_iter: int, tol: float, callback: Callback) -> Result:
    """Maximise the full objective from where a climb ended; what is returned is never below that."""
    there = _through(LEVELS[1:], full, begin, tol, callback)
    return quasi_newton(full, there.basis, max_iter, tol, callback, 0, there.memory)


def _through(
    levels: Sequence[tuple[float, float]], full: Objective, begin: Climb, tol: float, callback: Callback
) -> Climb:
    """Through levels with more and more samples.

    Each starts with what L-BFGS remembers of the one before, whose objective is nearly the same.
    """
    basis, at, memory = begin.basis, begin.at, begin.memory
    for share, level_tol in levels:
        samples = leading_samples(full.shares(at), share, 2 * full.n_features)
        if len(samples) > full.n_samples // 2:
            break
        some, level_tol = full.of_samples(samples), max(tol, level_tol)
        run = quasi_newton(some, basis, LEVEL_MAX_ITER, level_tol, lambda _: None, 0, memory, window=5)
        there = full.evaluate(run.basis)
        if there.value <= at.value:  # the gain was that of these samples alone
            memory.pairs.clear()
            break
        basis, at = run.basis, there
        callback(at.value)
    return Climb(basis, at, memory)


#: Seconds after which a run is long enough to tell how long it still takes.
LONG = 5.0

#: A solver from one start: objective, start, max_iter, tol and callback in, result out.
Solve = Callable[[Objective, Tensor, int, float, Callback], Result]

#: Starts by default: reduced ones are cheap.
STARTS, REDUCED_STARTS = 3, 12
#: How many of the reduced ones are lifted, before the choice is made.
CLIMBS = 2


class DeadSubspaceError(ValueError):
    """A subspace without positive relevance could not be revived."""


def random_orthogonal(n_features: int, seed: int | np.random.Generator | None) -> Tensor:
    """A Haar-distributed orthogonal matrix (D, D) in float64, from SciPy's `ortho_group`."""
    generator = np.random.default_rng(seed)
    if n_features == 1:  # ortho_group starts at dimension 2
        return torch.ones(1, 1, dtype=torch.float64)
    return torch.as_tensor(ortho_group.rvs(n_features, random_state=generator))


def revive(objective: Objective, start: Tensor, generator: np.random.Generator, tries: int = 20) -> Tensor:
    """A start in which every subspace has positive relevance somewhere: others would get no gradient, ever.

    A dead block is mixed with the strongest one by a random rotation of both.
    """
    for _ in range(tries):
        means = objective.evaluate(start).block_means
        dead = (means == 0).nonzero().flatten().tolist()
        if not dead:
            return start
        strongest = int(means.argmax()) if len(dead) < len(means) else (dead[0] + 1) % len(means)
        columns = torch.arange(objective.n_features)
        mixed = torch.cat([columns[objective.columns[k]] for k in {*dead, strongest}])
        if len(means) == 1:
            mixed = columns  # a single block: draw on the residual
        start = start.clone()
        start[:, mixed] = start[:, mixed] @ random_orthogonal(len(mixed), generator).to(start)
    raise DeadSubspaceError(
        f"subspaces without positive relevance remain after {tries} random restarts: hardly any sample has "
        "relevance a·c for the target. Check the target and the sign of the contexts, or use fewer subspaces"
    )


@dataclass
class Search:
    """Runs from starts, with one budget, one generator and one way of showing progress.

    Attributes
    ----------
    max_iter, tol
        Of each run.
    generator : numpy Generator
        Where starts come from.
    name : str
        Shown before the progress bar.
    progress : bool or None
        Whether there is one; None: on a terminal, for long runs.
    reduced : list of Result
        Runs in a reduced problem, if there were any.
    """

    max_iter: int
    tol: float
    generator: np.random.Generator
    name: str
    progress: bool | None
    reduced: list[Result] = field(default_factory=list)

    def from_start(self, solve: Solve, objective: Objective, start: Tensor) -> list[Result]:
        """One run from a given start."""
        return [self.run(solve, objective, start, "start 1/1", self.tol, self.generator)]

    def from_random_starts(self, solve: Solve, objective: Objective, n_starts: int | None) -> list[Result]:
        """One run from each random start."""
        starts = self._starts(objective, STARTS if n_starts is None else n_starts)
        return [self.run(solve, objective, *start, self.tol, self.generator) for start in starts]

    def coarse_to_fine(self, objective: Objective, n_starts: int | None) -> list[Result]:
        """Starts in the reduced problem, of which one of the best is finished; without it, each in full.

        Where the pairs span so little that nothing is lost by it, all of this happens in fewer dimensions.
        """
        span = reduce_to_span(objective)
        if span is not None:
            objective = span.objective
        reduction = reduce_problem(objective)
        results: list[Result] | None = None
        if reduction is not None:
            try:
                results = self._best_of_reduced(objective, reduction, n_starts)
            except DeadSubspaceError:
                self.reduced = []  # the relevance lies elsewhere: start in full
        if results is None:
            results = self.from_random_starts(quasi_newton, objective, n_starts)
        return results if span is None else [span.expand_result(result) for result in results]

    def _best_of_reduced(
        self, objective: Objective, reduction: Reduction, n_starts: int | None
    ) -> list[Result]:
        def rough(problem: Objective, start: Tensor, max_iter: int, tol: float, callback: Callback) -> Result:
            return quasi_newton(problem, start, max_iter, tol, callback, COARSE_WARM_UP)

        small, tol = reduction.objective, max(self.tol, COARSE_TOL)
        starts = self._starts(small, REDUCED_STARTS if n_starts is None else n_starts)
        # Each has a generator of its own, so that their order does not matter.
        seeds = self.generator.integers(2**63, size=len(starts)).tolist()

        def from_one(number: int) -> Result:
            return self.run(rough, small, *starts[number], tol, np.random.default_rng(seeds[number]))

        def lifted(result: Result) -> Climb:
            return climb(objective, reduction.lift(result.basis, objective), self.tol)

        # Not with samples on several ranks, which would have to take the same turns, nor on a GPU.
        beside = type(small) is Objective and small.a.device.type == "cpu"
        each = parallel_map if beside else one_by_one
        self.reduced = each(from_one, range(len(starts)))
        best = sorted(self.reduced, key=lambda result: result.objective, reverse=True)[:CLIMBS]
        highest = max(each(lifted, best), key=lambda done: done.at.value)

        def rest(problem: Objective, start: Tensor, max_iter: int, tol: float, callback: Callback) -> Result:
            callback(highest.at.value)
            begin = (
                highest if start is highest.basis else Climb(start, problem.evaluate(start), highest.memory)
            )
            return finish(problem, begin, max_iter, tol, callback)

        return [self.run(rest, objective, highest.basis, "in full", self.tol, self.generator)]

    def _starts(self, objective: Objective, n_starts: int) -> list[tuple[Tensor, str]]:
        """Random orthogonal matrices, and their titles."""
        size = objective.n_features
        return [
            (random_orthogonal(size, self.generator).to(objective.a), f"start {i + 1}/{n_starts}")
            for i in range(n_starts)
        ]

    def run(
        self,
        solve: Solve,
        objective: Objective,
        start: Tensor,
        title: str,
        tol: float,
        generator: np.random.Generator,
    ) -> Result:
        """One run, and a second one from where it ended if a subspace died on the way."""
        with tqdm(
            total=self.max_iter,
            desc=f"{self.name} {title}",
            disable=None if self.progress is None else not self.progress,  # None: on a terminal
            delay=0 if self.progress else LONG,
            leave=bool(self.progress),
        ) as bar:

            def show(value: float, bar: tqdm[Any] = bar) -> None:
                bar.update()
                bar.set_postfix_str(f"objective {value:.5f}", refresh=False)

            result = solve(objective, revive(objective, start, generator), self.max_iter, tol, show)
            if not objective.evaluate(result.basis).block_means.all():
                # A subspace died on the way: give it a second start from where the others are.
                start = revive(objective, result.basis, generator)
                result = solve(objective, start, self.max_iter, tol, show)
        return result
