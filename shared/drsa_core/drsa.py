"""DRSA: subspaces that split the relevance into distinct concepts (section 4.2, Note E)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from torch import Tensor
from tqdm import tqdm

from .checks import ArrayLike, Seed, as_float, as_float_tensor, as_int, as_seed, full_precision, warn_user
from .objective import Objective, prepared
from .optimizers import (
    Budget,
    Result,
    Solve,
    ascend,
    coarse_to_fine,
    from_random_starts,
    gradient_ascent,
    quasi_newton,
)
from .prca import Activations, Estimator, Samples, block_sizes, with_provenance
from .subspaces import Subspaces

COARSE_TO_FINE = "coarse-to-fine"
#: Solvers by name, with their default max_iter and tol; the paper's loop never stops early.
SOLVERS: dict[str, tuple[Solve, int, float]] = {
    COARSE_TO_FINE: (quasi_newton, 500, 3e-6),
    "quasi-newton": (quasi_newton, 500, 3e-6),
    "paper": (gradient_ascent, 5000, 0.0),
}
#: Seconds after which a fit shows its progress on a terminal.
LONG = 5.0


class ConvergenceWarning(UserWarning):
    """The iteration budget ended before the solver's stopping criterion was met."""


class DRSA(Estimator):
    """Disentangled relevant subspace analysis: max_U M^q_k [ M²_n [ R⁺_kn(U) ] ] subject to UᵀU = I.

    Parameters
    ----------
    n_subspaces : int
        Number K of subspaces, of D/K dimensions each. Ignored if `dims` is given.
    dims : sequence of int, optional
        Block sizes d_1 … d_K, at most D in all; what they leave over is not scored.
    q : float
        Exponent of the mean over subspaces. 0.5 is a soft minimum: it balances the subspaces.
    n_init : int, optional
        Random starts; the run with the highest objective is kept. Default 12 where they are run in a reduced
        problem, else 3.
    max_iter : int, optional
        Iterations per run. Default 500, or 5 000 for the paper's loop.
    tol : float, optional
        Stop when the relative gain per iteration, over the last ten, falls below it. Default 3e-6, or 0 for
        the paper's loop, which then never stops early.
    random_state : int or None
        Seed of the starts, at least 0; the same seed gives the same result.
    progress : bool, optional
        Show the iterations in full and their objective. Default: on a terminal, for fits of more than five
        seconds.
    solver : {"coarse-to-fine", "quasi-newton", "paper"}
        "coarse-to-fine" runs all starts in the leading directions of the samples that matter, side by side
        on torch's threads, and one of the two best in full; where that saves nothing (D < 128, say), it is
        "quasi-newton", which runs every start in full. "paper" is gradient ascent with step 1 and symmetric
        orthogonalisation, the yardstick.
    balance : float
        How far unequal evidence is levelled before the fit, from 0 to 1: pairs are scaled such that R_kn
        becomes R_kn / (‖a_n‖ ‖c_n‖)^balance. 0 is the paper's objective, in which positions count by the
        square of their evidence; with 1 all count the same. See Notes.

    Attributes
    ----------
    subspaces_ : Subspaces
        Blocks sorted by mean relevance E[(U_kᵀa)ᵀ(U_kᵀc)], largest first.
    objective_ : float
        J of the kept run, on normalised data.
    history_ : list of float
        J along the kept run.
    n_iter_ : int
        Iterations of the kept run.
    converged_ : bool
        Whether the kept run met `tol` within `max_iter`.
    results_ : list of Result
        All runs in full; `results_[i].reason` says why it stopped.
    reduced_results_ : list of Result
        All runs in the reduced problem; none if there was no reduced problem.

    Notes
    -----
    With very unequal evidence two subspaces may share the strongest concept while a weak one gets none, and
    this is no failure of the solver. Let a strong concept have m = 1 and a weak one m = w. With q = 0.5, a
    subspace for each adds 1 + √w to the mean, two halves of the strong one 2√½: sharing pays for w < 0.17.
    `balance` works against it; `examples/known_concepts.py --when` compares it with other settings.

    Examples
    --------
    >>> pairs = collect(model, composite, "features.22", loader, target=430, random_state=0)
    >>> DRSA(n_subspaces=4, random_state=0).fit(pairs).subspaces_.dims
    (2, 2, 2, 2)
    """

    def __init__(
        self,
        n_subspaces: int = 4,
        dims: Sequence[int] | None = None,
        q: float = 0.5,
        n_init: int | None = None,
        max_iter: int | None = None,
        tol: float | None = None,
        random_state: Seed = None,
        progress: bool | None = None,
        solver: str = COARSE_TO_FINE,
        balance: float = 0.0,
    ) -> None:
        self.n_subspaces = n_subspaces
        self.dims = dims
        self.q = q
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.progress = progress
        self.solver = solver
        self.balance = balance

    @full_precision()
    def fit(self, a: Activations, c: ArrayLike | None = None, init: ArrayLike | None = None) -> Self:
        """Fit from activations and contexts of shape (N, D), or from `Pairs` or `PairShards` alone.

        `init` (D, D) is an orthogonal start to use instead of the `n_init` random ones; it is run in full.
        """
        samples = self._samples(a, c)
        n_features, n_total = samples.a.shape[1], samples.n_total
        dims = block_sizes(n_features, self.n_subspaces, self.dims)
        if n_total < len(dims):
            raise ValueError(
                f"{len(dims)} subspaces need at least as many samples, got {n_total}; collect more pairs"
            )
        if not isinstance(self.solver, str) or self.solver not in SOLVERS:
            raise ValueError(f"solver must be one of {', '.join(SOLVERS)}, got {self.solver!r}")
        solve, max_iter, tol = SOLVERS[self.solver]
        max_iter = max_iter if self.max_iter is None else as_int(self.max_iter, "max_iter", 1)
        tol = tol if self.tol is None else as_float(self.tol, "tol", 0)
        n_init = None if self.n_init is None else as_int(self.n_init, "n_init", 1)
        q, balance = as_float(self.q, "q"), as_float(self.balance, "balance", 0, 1)
        seed = as_seed(self.random_state)

        objective = Objective(*prepared(samples.a, samples.c, balance, samples.ranks), dims, q, samples.ranks)
        reduced: list[Result] = []
        with self._bar() as bar:

            def show(value: float) -> None:
                bar.update()
                bar.set_postfix_str(f"objective {value:.5f}", refresh=False)

            budget = Budget(max_iter, tol, np.random.default_rng(samples.seed(seed)), show)
            if init is not None:
                results = [ascend(solve, objective, _checked_start(init, samples.a), budget)]
            elif self.solver == COARSE_TO_FINE:
                results, reduced = coarse_to_fine(objective, n_init, budget)
            else:
                results = from_random_starts(solve, objective, n_init, budget)

        best = max(results, key=lambda result: result.objective)
        if not best.converged and tol > 0:
            warn_user(
                f"{type(self).__name__} stopped before it converged ({best.reason}; tol = {tol:g}); raise "
                "max_iter, or tol if the objective in history_ is flat enough",
                ConvergenceWarning,
            )
        self.results_, self.reduced_results_ = results, reduced
        self.objective_ = best.objective
        self.history_, self.n_iter_, self.converged_ = best.history, best.n_iter, best.converged
        found = {
            "name": type(self).__name__,
            "solver": self.solver,
            "q": q,
            "balance": balance,
            "objective": best.objective,
            "n_iter": best.n_iter,
            "converged": best.converged,
            "n_samples": n_total,
        }
        metadata = with_provenance({"solver": found, "seed": seed}, samples.provenance)
        self.subspaces_ = _by_relevance(Subspaces(best.basis[:, : sum(dims)], dims), samples, metadata)
        return self

    def _bar(self) -> Any:
        return tqdm(
            desc=type(self).__name__,
            unit="iteration",
            disable=None if self.progress is None else not self.progress,  # None: on a terminal
            delay=0 if self.progress else LONG,
            leave=bool(self.progress),
        )


def _by_relevance(found: Subspaces, samples: Samples, metadata: dict[str, Any]) -> Subspaces:
    """The blocks sorted by mean relevance E[a·c] (not a·a) within each."""
    # Scales do not change the order, and without them relevance stays in range.
    relevance = found.relevance(*prepared(samples.a, samples.c, 0, samples.ranks)).double().sum(0)
    order = samples.ranks.sum(relevance).argsort(descending=True, stable=True)
    ordered = found.select(order.tolist())
    return Subspaces(ordered.basis, ordered.dims, metadata=metadata)


def _checked_start(init: ArrayLike, like: Tensor) -> Tensor:
    start, n_features = as_float_tensor(init, "init"), like.shape[1]
    if start.shape != (n_features, n_features):
        raise ValueError(
            f"init must have shape (D, D) = ({n_features}, {n_features}), got {tuple(start.shape)}"
        )
    return Subspaces(start, [n_features]).basis.to(like)  # complains if it is not orthogonal


class DSA(DRSA):
    """Disentangled subspace analysis: DRSA with c = a, blind to the model. Contexts are ignored."""

    _ignores_contexts = True
