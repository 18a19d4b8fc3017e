"""Solvers of the DRSA objective: the paper's loop, quasi-Newton on the rotation group, and coarse to fine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from .distributed import parallel_map
from .objective import Curvature, Evaluation, Objective, block_columns
from .prca import random_orthogonal

#: Called with the objective after every iteration; `float` does nothing.
Callback = Callable[[float], object]


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
    objective: Objective, start: Tensor, max_iter: int, tol: float, callback: Callback = float
) -> Result:
    """The paper's loop: U ← orth(U + ∂J/∂U), with a step of 1 and orth(V) = V (VᵀV)^-½ (section 4.2).

    Four products of N×D×D and one D×D eigenproblem an iteration. It is the yardstick.
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
#: Chosen, with `objective.FLOOR` and the default tol, on the reference data of the tests and one VGG16 start:
#: other data may be served better by more, and `n_init` guards against a bad basin.
WARM_UP = 40
#: Where the paper's step overshoots, it is halved down to this part of it.
SMALLEST_FRACTION = 2.0**-10
#: Pairs of steps and gradient changes that L-BFGS remembers.
MEMORY = 20
#: Iterations between corrections of the basis, and between updates of the preconditioner and of the bases
#: inside the blocks.
REFRESH = 5
#: Largest angle, in radians, by which one step may turn the basis; the first quasi-Newton step is shorter.
#: FIRST_ANGLE and the iterations of `largest_angle` were chosen among nine combinations on the reference data
#: of the tests, where one start lies between two basins and five of the nine reach the better one.
MAX_ANGLE, FIRST_ANGLE = 1.0, 0.1


def quasi_newton(
    objective: Objective,
    start: Tensor,
    max_iter: int,
    tol: float,
    callback: Callback = float,
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
    memory = Memory(objective.below) if memory is None else memory
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
                curvature = objective.curvature(at)
            since_refresh += 1
            step, slope = memory.direction(gradient, curvature)
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


class Memory:
    """The steps and gradient changes of L-BFGS, with the two-loop recursion over them."""

    def __init__(self, below: Tensor) -> None:
        self.below = below
        #: (step, decrease of the gradient, 1 / their inner product), oldest first, as vectors.
        self.pairs: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=MEMORY)

    def unpack(self, packed: Tensor) -> Tensor:
        """L, (D, D), from its entries below the blocks."""
        lower = packed.new_zeros(self.below.shape)
        lower[self.below] = packed
        return lower

    def add(self, step: Tensor, decrease: Tensor) -> None:
        """Remember a step, unless the objective is not concave along it."""
        step, decrease = step[self.below], decrease[self.below]
        product = float(step @ decrease)
        if product > 1e-10 * float(decrease @ decrease):
            self.pairs.append((step, decrease, 1 / product))

    def direction(self, gradient: Tensor, curvature: Curvature) -> tuple[Tensor, float]:
        """Ascent direction L and the slope of J along it."""

        def divided(packed: Tensor) -> Tensor:
            return curvature.divide(self.unpack(packed))[self.below]

        slopes = gradient[self.below]
        direction, coefficients = slopes.clone(), []
        for step, decrease, inverse in reversed(self.pairs):
            coefficients.append(float(step @ direction) * inverse)
            direction.sub_(decrease, alpha=coefficients[-1])
        direction = divided(direction)
        if self.pairs:
            _, decrease, inverse = self.pairs[-1]
            direction /= inverse * float(decrease @ divided(decrease))
        for (step, decrease, inverse), coefficient in zip(self.pairs, reversed(coefficients), strict=True):
            direction.add_(step, alpha=coefficient - float(decrease @ direction) * inverse)
        slope = float(slopes @ direction)
        if slope <= 0 and self.pairs:
            self.pairs.clear()
            return self.direction(gradient, curvature)
        lower = self.unpack(direction)
        limit = MAX_ANGLE if self.pairs else FIRST_ANGLE
        shrink = min(1.0, limit / max(largest_angle(lower), 1e-30))
        return lower * shrink, slope * shrink


def line_search(
    objective: Objective, basis: Tensor, at: Evaluation, step: Tensor, slope: float
) -> tuple[float, Tensor, Evaluation] | None:
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


def turn(basis: Tensor, lower: Tensor) -> Tensor:
    """U·cayley(L − Lᵀ), where cayley(Ω) = (I − Ω/2)⁻¹(I + Ω/2) agrees with exp(Ω) to second order."""
    # Since I + Ω/2 = 2I − (I − Ω/2), one solution and no product.
    half = (lower - lower.T) / 2
    identity = torch.eye(len(half), dtype=half.dtype, device=half.device)
    return 2 * torch.linalg.solve(identity - half, basis, left=False) - basis


def corrected(basis: Tensor) -> Tensor:
    """A Newton step towards orthogonality, which keeps rounding errors of turns from piling up."""
    return 1.5 * basis - 0.5 * basis @ (basis.T @ basis)


def largest_angle(lower: Tensor, iterations: int = 16) -> float:
    """Spectral norm of L − Lᵀ by power iteration: the largest angle of the turn, from below."""
    skew = lower - lower.T
    vector = skew[:, skew.square().sum(0).argmax()]
    for _ in range(iterations):
        vector = skew @ (vector / vector.norm().clamp(min=1e-30))
    return float(vector.norm())


#: A solver from one start: objective, start, max_iter, tol and callback in, result out.
Solve = Callable[[Objective, Tensor, int, float, Callback], Result]
#: Random starts by default.
STARTS = 3


@dataclass
class Budget:
    """What a run may cost, where its random numbers come from, and who is told of iterations in full."""

    max_iter: int
    tol: float
    generator: np.random.Generator
    callback: Callback = float


class DeadSubspaceError(ValueError):
    """A subspace without positive relevance could not be revived."""


def revive(objective: Objective, start: Tensor, generator: np.random.Generator, tries: int = 20) -> Tensor:
    """A start in which every subspace has positive relevance somewhere: others would get no gradient."""
    for _ in range(tries):
        means = objective.evaluate(start).block_means
        dead = (means == 0).nonzero().flatten().tolist()
        if not dead:
            return start
        # A dead block is mixed with the strongest one by a random rotation of both.
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


def ascend(solve: Solve, objective: Objective, start: Tensor, budget: Budget) -> Result:
    """One run, and a second one from where it ended if a subspace died on the way."""
    start = revive(objective, start, budget.generator)
    result = solve(objective, start, budget.max_iter, budget.tol, budget.callback)
    if objective.evaluate(result.basis).block_means.all():
        return result
    start = revive(objective, result.basis, budget.generator)
    return solve(objective, start, budget.max_iter, budget.tol, budget.callback)


def random_starts(objective: Objective, n_starts: int, generator: np.random.Generator) -> list[Tensor]:
    """Random orthogonal matrices (D, D)."""
    return [random_orthogonal(objective.n_features, generator).to(objective.a) for _ in range(n_starts)]


def from_random_starts(run: Solve, full: Objective, n_starts: int | None, budget: Budget) -> list[Result]:
    """One run from each random start."""
    starts = random_starts(full, n_starts or STARTS, budget.generator)
    return [ascend(run, full, start, budget) for start in starts]


#: Part of the weighted energy that the leading directions hold, and of Σ_n R_n² that the samples hold.
ENERGY, EVIDENCE = 0.85, 0.97
#: Fewest directions, in all and for each block, and fewest samples for each direction.
FEWEST_DIRECTIONS, DIRECTIONS_PER_BLOCK, SAMPLES_PER_DIRECTION = 64, 8, 16
#: Iterations of the paper's from each reduced start, and the tolerance: enough to tell the best start.
COARSE_WARM_UP, COARSE_TOL = 20, 1e-3
#: Reduced starts by default: they are cheap. How many of them are lifted, before the choice is made.
REDUCED_STARTS, CLIMBS = 12, 2
#: Levels on which a lifted start is improved first: part of J that their samples hold, and how far.
LEVELS = ((0.95, 2e-3), (0.98, 1e-3), (0.995, 3e-4))
LEVEL_MAX_ITER = 30


@dataclass(frozen=True)
class Reduction:
    """A problem in its r leading directions, for the samples of this rank that matter."""

    objective: Objective
    #: Orthonormal columns (D, D); the first r are the features of the reduced problem.
    directions: Tensor
    samples: Tensor

    def lift(self, basis: Tensor, full: Objective) -> Tensor:
        """A basis (D, D) of the full problem that holds each block of a reduced one (r, r).

        The other directions fill the blocks up, each where it gains most.
        """
        r = self.objective.n_features
        leading, others = self.directions[:, :r] @ basis, self.directions[:, r:]
        inside = [leading[:, here] for here in block_columns(self.objective.dims, r)]
        inside += [leading[:, :0]] * (len(full.columns) - len(inside))  # only the full problem has a residual
        sizes = [here.stop - here.start for here in full.columns]
        room = [size - part.shape[1] for size, part in zip(sizes, inside, strict=True)]

        def joined(outside: Tensor) -> Tensor:
            parts = zip(inside, outside.split(room, dim=1), strict=True)
            return torch.cat([part for pair in parts for part in pair], dim=1)

        some = full.of_samples(self.samples)
        gains = torch.nn.functional.pad(some.gains(some.evaluate(joined(others)), others), (0, 0, 0, 1))
        places = [k for k, n in enumerate(room) for _ in range(n)]
        _, order = linear_sum_assignment(gains[places].cpu().numpy(), maximize=True)
        return joined(others[:, order])


def leading_part(
    full: Objective, energy: float, evidence: float, fewest: int, per_direction: int
) -> Reduction | None:
    """The problem in at least `fewest` leading directions for the leading samples; None without relevance."""
    found = full.leading_directions()
    if found is None:
        return None
    weights, energies, directions = found
    by_energy = int((energies.cumsum(0) < energy * energies.sum()).sum()) + 1
    n_directions = min(max(by_energy, fewest), full.n_features)
    samples = full.leading_samples(weights, evidence, per_direction * n_directions)
    dims = reduced_dims(full.dims, n_directions)
    small = full.of_samples(samples).in_directions(directions[:, :n_directions], dims)
    return Reduction(small, directions, samples)


def reduce_problem(full: Objective) -> Reduction | None:
    """The problem for coarse starts, or None where it would have more than half of the directions."""
    fewest = max(FEWEST_DIRECTIONS, DIRECTIONS_PER_BLOCK * full.n_subspaces)
    if fewest > full.n_features // 2:
        return None
    found = leading_part(full, ENERGY, EVIDENCE, fewest, SAMPLES_PER_DIRECTION)
    return None if found is None or found.objective.n_features > full.n_features // 2 else found


def reduced_dims(dims: Sequence[int], n_directions: int) -> tuple[int, ...]:
    """Block sizes in r directions: the same if there is room, else in proportion, adding up to r."""
    total = sum(dims)
    if total <= n_directions:
        return tuple(dims)
    exact = [n_directions * d / total for d in dims]
    sizes = [max(1, int(size)) for size in exact]
    while missing := n_directions - sum(sizes):  # those furthest from their share first, ties in order
        sign = 1 if missing > 0 else -1
        free = [k for k in range(len(sizes)) if sizes[k] + sign >= 1]
        sizes[max(free, key=lambda k: sign * (exact[k] - sizes[k]))] += sign
    return tuple(sizes)


def roughly(objective: Objective, start: Tensor, max_iter: int, tol: float, callback: Callback) -> Result:
    """`quasi_newton` with a short warm-up, for reduced problems."""
    return quasi_newton(objective, start, max_iter, tol, callback, COARSE_WARM_UP)


def coarse_to_fine(
    full: Objective, n_starts: int | None, budget: Budget
) -> tuple[list[Result], list[Result]]:
    """Runs in full, and runs in the reduced problem, one of the best of which was finished in full.

    Without a reduced problem each start is run in full.
    """
    # Not side by side with samples on several ranks, which would have to take the same turns, nor on a GPU.
    beside = full.ranks.size == 1 and full.a.device.type == "cpu"
    each: Callable[..., list[Any]] = parallel_map if beside else lambda run, items: list(map(run, items))
    reduction = reduce_problem(full)
    if reduction is None:
        return from_random_starts(quasi_newton, full, n_starts, budget), []
    small, generator, tol = reduction.objective, budget.generator, budget.tol
    starts = random_starts(small, n_starts or REDUCED_STARTS, generator)
    # Each has a generator of its own, so that their order does not matter.
    seeds = generator.integers(2**63, size=len(starts)).tolist()

    def run(i: int) -> Result:
        own = Budget(budget.max_iter, max(tol, COARSE_TOL), np.random.default_rng(seeds[i]))
        return ascend(roughly, small, starts[i], own)

    def climbed(run: Result) -> tuple[float, Tensor, Memory]:
        memory = Memory(full.below)
        return *climb(full, reduction.lift(run.basis, full), memory, LEVELS[:1], tol), memory

    try:
        runs = each(run, range(len(starts)))
        best = sorted(runs, key=lambda run: run.objective, reverse=True)[:CLIMBS]
        value, basis, memory = max(each(climbed, best), key=lambda climb: climb[0])
        budget.callback(value)
        return [ascend(partial(finish, memory), full, basis, budget)], runs
    except DeadSubspaceError:  # the relevance lies elsewhere: start in full
        return from_random_starts(quasi_newton, full, n_starts, budget), []


def finish(
    memory: Memory, full: Objective, start: Tensor, max_iter: int, tol: float, callback: Callback = float
) -> Result:
    """Maximise the objective from where a climb ended; what is returned is never below that."""
    _, basis = climb(full, start, memory, LEVELS[1:], tol, callback)
    return quasi_newton(full, basis, max_iter, tol, callback, 0, memory)


def climb(
    full: Objective,
    basis: Tensor,
    memory: Memory,
    levels: Sequence[tuple[float, float]],
    tol: float,
    callback: Callback = float,
) -> tuple[float, Tensor]:
    """J and the basis after levels with more and more samples, of which each hands its memory to the next."""
    at = full.evaluate(basis)
    for share, level_tol in levels:
        samples = full.leading_samples(full.shares(at), share, 2 * full.n_features)
        if full.ranks.sum(torch.tensor(len(samples))) > full.n_samples // 2:
            break
        some = full.of_samples(samples)
        run = quasi_newton(
            some, basis, LEVEL_MAX_ITER, max(tol, level_tol), warm_up=0, memory=memory, window=5
        )
        there = full.evaluate(run.basis)
        if there.value <= at.value:  # the gain was that of these samples alone
            memory.pairs.clear()
            break
        basis, at = run.basis, there
        callback(at.value)
    return at.value, basis
