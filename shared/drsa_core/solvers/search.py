"""Starts of DRSA and how the solvers are run from them: in full, or coarse to fine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.stats import ortho_group
from torch import Tensor
from tqdm import tqdm

from ..side_by_side import one_by_one, side_by_side
from .coarse import COARSE_TOL, COARSE_WARM_UP, Climb, Reduction, climb, finish, reduce_problem
from .objective import Objective
from .paper_loop import Callback, Result
from .quasi_newton import quasi_newton
from .span import reduce_to_span

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
        each = side_by_side if beside else one_by_one
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
