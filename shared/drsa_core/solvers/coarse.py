"""Coarse to fine: the reduced problem in which starts are cheap, and the way back to the full one.

J is a mean of squares of relevances, so that few samples make up nearly all of it, and these lie mostly in
few directions. The reduced problem has only those samples and directions. Its solution is lifted by sharing
out the other directions among the blocks, then finished: first on the samples that matter, then on all. The
two best starts go the first part of that way, the higher of them goes on.

The levels were chosen on one set of 10 000 pairs of VGG16 (Conv4_3), and `tests/benchmarks/bench_drsa.py`
reports them on another one as well. Tried there and dropped:

* Trials of the three best reduced starts in full: a rank correlation of 0.8 instead of 0.6 with the end, but
  later. Of two, after the first level, the choice gains 0.04 % on average of eight seeds.
* 16 reduced starts instead of 12: no higher on average of six seeds. (12 instead of 8 gain 0.02 %, and cost
  nothing since starts run side by side.)
* Half as many samples in the reduced problem: starts in half the time, but a rank correlation of 0.52 instead
  of 0.59, and lower optima from the same starts.
* Stopping the worse half of the starts early: after 20 of some 44 iterations the rank correlation with the
  end of the reduced run is 0.6 only.
* One level of samples instead of three, 98 % of J: the same optimum, later.
* A fourth level, 99.9 % of J, to the end (one start): a third less time for K = 16, more for K = 4.
* A second reduced problem, in directions that hold 98 % of the energy of a wide layer (601 of 2048 at
  ResNet50's `layer4`): 7 % of J lie outside of them, so that the full problem has a long way to go. It was
  not timed to the end.
* bfloat16 products on a CPU that has them: 2.4 times as fast as float32. But where the precision would do, on
  the first levels, products are only a part of the time, and it would be a second code path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .complement import share_out
from .objective import Evaluation, Objective, block_columns, missing_columns
from .paper_loop import Callback, Result
from .quasi_newton import Memory, quasi_newton

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
