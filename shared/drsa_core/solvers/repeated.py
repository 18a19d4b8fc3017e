"""The same fit many times: other starts, other images, contexts of other images; in few directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..checks import unit_scale
from ..pairs import Pairs, balanced, normalise
from ..subspaces import Subspaces
from .coarse import COARSE_TOL, COARSE_WARM_UP, Reduction, leading_samples, reduced_dims
from .drsa import DRSA, block_sizes
from .objective import Evaluation, Objective, below_blocks
from .quasi_newton import quasi_newton
from .resampling import Rows, bootstrap, rows_by_image
from .search import random_orthogonal, revive

#: Part of the weighted energy that the directions hold, and of Σ_n R_n² that the pairs hold.
ENERGY, EVIDENCE = 0.95, 0.95
#: Random starts of each fit, of which the best is kept.
STARTS = 3
#: Of each start.
MAX_ITER = 300


class NoRelevanceError(ValueError):
    """No pair has positive relevance: there is nothing to fit."""


@dataclass(frozen=True)
class Run:
    """One fit.

    Attributes
    ----------
    basis : tensor, shape (r, r)
        In the directions of the `Repeated` that made it.
    relevance : tensor, shape (n, K)
        Positive R_k of the pairs that matter, be their images among those of the fit or not.
    objective, held_out : float
        J on the images of the fit, and on those left out; NaN if there are none.
    """

    basis: Tensor
    relevance: Tensor
    objective: float
    held_out: float


class Repeated:
    """Fits of K subspaces in the leading directions of the pairs, for the pairs that matter.

    As in `coarse`, few pairs and directions hold nearly all of the objective. They are found once, and every
    fit is small.

    Parameters
    ----------
    pairs : Pairs
    n_subspaces : int
    solver : DRSA
        Whose parameters `q`, `balance` and `n_init` are used.
    """

    def __init__(self, pairs: Pairs, n_subspaces: int, solver: DRSA) -> None:
        self.n_starts = STARTS if solver.n_init is None else solver.n_init
        a, c = balanced(unit_scale(pairs.a)[0], unit_scale(pairs.c)[0], float(solver.balance))
        dims = block_sizes(a.shape[1], n_subspaces, None)
        full = Objective(normalise(a), normalise(c), dims, float(solver.q))
        reduction = leading_part(full)
        self.problem, self._full, self._samples = reduction.objective, full, reduction.samples
        self.rows: Rows = rows_by_image(pairs.image[reduction.samples.cpu()])
        self.lift: Callable[[Tensor], Tensor] = lambda basis: reduction.lift(basis, full)

    def relevance(self, subspaces: Subspaces) -> tuple[Tensor, Tensor]:
        """Positive R_k of all pairs, and of those that the runs have; shapes (N, K) and (n, K)."""
        everywhere = subspaces.relevance(self._full.a, self._full.c).clamp_(min=0)
        return everywhere, everywhere[self._samples]

    def fit(self, resampled: bool, generator: np.random.Generator) -> Run:
        """One fit, the best of new random starts; on a bootstrap over images if `resampled`."""
        problem = self.problem
        times = torch.ones(problem.n_samples)
        if resampled:
            times = bootstrap(self.rows, generator)
        drawn = Small.of_rows(problem, times)
        results = []
        for _ in range(self.n_starts):
            start = random_orthogonal(problem.n_features, generator).to(problem.a)
            start = revive(drawn, start, generator)
            results.append(quasi_newton(drawn, start, MAX_ITER, COARSE_TOL, lambda _: None, COARSE_WARM_UP))
        best = max(results, key=lambda result: result.objective)
        left_out = times == 0
        return Run(
            best.basis,
            problem.evaluate(best.basis).relevance,
            best.objective,
            Small.of_rows(problem, left_out).evaluate(best.basis).value if left_out.any() else float("nan"),
        )


class Small(Objective):
    """The objective where D is small: one whole product costs less than many of pairs of blocks."""

    @classmethod
    def of_rows(cls, problem: Objective, times: Tensor) -> Small:
        """The objective if each sample occurred so many times, (N,).

        A sample counts by R², so that its vectors are scaled by the fourth root.
        """
        times = times.to(problem.a)
        rows = times.nonzero().flatten()
        scale = times[rows, None] ** 0.25
        # All samples of the full problem count, those that were left out as zero.
        n_total = round(problem.n_total * float(times.sum()) / problem.n_samples)
        return cls(problem.a[rows] * scale, problem.c[rows] * scale, problem.dims, problem.q, n_total)

    def tangent_gradient(self, at: Evaluation) -> Tensor:
        """As of `Objective`."""
        weights = at.weights @ self.membership.T
        whole = torch.addmm(
            at.activations.T @ (weights * at.contexts), at.contexts.T, weights * at.activations
        )
        return below_blocks(whole - whole.T, self.columns)


def leading_part(full: Objective) -> Reduction:
    """The problem in its leading directions, at least one for each block, for the pairs that matter.

    Other than in `coarse.reduce_problem`, nothing is kept for safety: a direction that holds no relevance is
    given to this or that block by chance, and fits would differ in it for no reason.
    """
    weights = (full.a * full.c).sum(1).clamp(min=0).double().square()
    if not weights.any():
        raise NoRelevanceError(
            "no pair has positive relevance a·c: nothing counts for the target. Check the target and the "
            "sign of the contexts"
        )
    weights = (weights / weights.sum()).to(full.a)
    moments = [((x * weights[:, None]).T @ x).double() for x in (full.a, full.c)]
    values, vectors = torch.linalg.eigh(sum(moment / moment.trace() for moment in moments))
    values, directions = values.flip(0).clamp_(min=0), vectors.flip(1).to(full.a)
    by_energy = int((values.cumsum(0) < ENERGY * values.sum()).sum()) + 1
    n_directions = min(max(by_energy, full.n_subspaces), full.n_features)
    samples = leading_samples(weights, EVIDENCE, min(full.n_samples, n_directions))
    dims = reduced_dims(full.dims, n_directions)
    a, c = (x[samples] @ directions[:, :n_directions] for x in (full.a, full.c))
    return Reduction(Objective(a, c, dims, full.q, full.n_total), directions, samples)


def mean_of_finite(values: Sequence[float]) -> float:
    """Mean of the numbers that are not NaN; NaN if there are none."""
    finite = [value for value in values if value == value]
    return sum(finite) / len(finite) if finite else float("nan")
