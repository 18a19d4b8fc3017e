"""DRSA: subspaces that split the relevance into distinct concepts (section 4.2, Note E)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from scipy.stats import ortho_group
from torch import Tensor

from .objective import Objective
from .pairs import normalise
from .solvers import SOLVERS, Result
from .subspaces import Subspaces
from .validation import ArrayLike, as_float_tensor, check_nonzero_contexts, check_pairs, check_positive_int


class ConvergenceWarning(UserWarning):
    """The iteration budget ended before the solver's stopping criterion was met."""


def block_sizes(n_features: int, n_subspaces: int, dims: Sequence[int] | None) -> tuple[int, ...]:
    """Sizes of K blocks in D dimensions: `dims` if given, else D/K, the first ones larger by one if need be."""
    if dims is not None:
        sizes = tuple(check_positive_int(d, "every entry of dims") for d in dims)
        if not sizes or sum(sizes) > n_features:
            raise ValueError(f"dims must add up to at most D = {n_features}, got {sizes} with sum {sum(sizes)}")
        return sizes
    if check_positive_int(n_subspaces, "n_subspaces") > n_features:
        raise ValueError(f"n_subspaces must be at most D = {n_features}, got {n_subspaces}")
    small, larger = divmod(n_features, n_subspaces)
    return (small + 1,) * larger + (small,) * (n_subspaces - larger)


def random_orthogonal(n_features: int, seed: int | np.random.Generator | None) -> Tensor:
    """A Haar-distributed orthogonal matrix (D, D) in float64, from SciPy's `ortho_group`."""
    generator = np.random.default_rng(seed)
    if n_features == 1:  # ortho_group starts at dimension 2
        return torch.ones(1, 1, dtype=torch.float64)
    return torch.as_tensor(ortho_group.rvs(n_features, random_state=generator))


class DRSA:
    """Disentangled relevant subspace analysis: max_U M^q_k [ M²_n [ R⁺_kn(U) ] ] subject to UᵀU = I.

    Parameters
    ----------
    n_subspaces : int
        Number K of subspaces, of D/K dimensions each. Ignored if `dims` is given.
    dims : sequence of int, optional
        Block sizes d_1 … d_K, at most D in all; what they leave over is not scored.
    q : float
        Exponent of the mean over subspaces. 0.5 is a soft minimum: it balances the subspaces.
    n_init : int
        Random starts; the run with the highest objective is kept.
    max_iter : int, optional
        Iterations per run. Default 1 000, or 5 000 for the paper's loop.
    tol : float, optional
        Stop when the relative gain per iteration, over the last ten, is below it. Default 1e-6, or 0 for
        the paper's loop, which never stops early.
    random_state : int or None
        Seed of the starts; the same seed gives the same result.
    progress : bool
        Show a progress bar.
    solver : {"quasi-newton", "paper"}
        "paper" is gradient ascent with step 1 and symmetric orthogonalisation, kept as the yardstick.

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
        All runs; `results_[i].reason` says why it stopped.

    Examples
    --------
    >>> a, c = collect(model, composite, "features.22", loader, target=430)       # doctest: +SKIP
    >>> subspaces = DRSA(n_subspaces=4, random_state=0).fit(a, c).subspaces_      # doctest: +SKIP
    """

    def __init__(
        self,
        n_subspaces: int = 4,
        dims: Sequence[int] | None = None,
        q: float = 0.5,
        n_init: int = 3,
        max_iter: int | None = None,
        tol: float | None = None,
        random_state: int | None = None,
        progress: bool = False,
        solver: str = "quasi-newton",
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

    def fit(self, a: ArrayLike, c: ArrayLike, init: ArrayLike | None = None) -> Self:
        """Fit from activations and contexts of shape (N, D).

        `init` (D, D) is an orthogonal start to use instead of the `n_init` random ones.
        """
        a, c = check_pairs(a, c)
        check_nonzero_contexts(c)
        dims = block_sizes(a.shape[1], self.n_subspaces, self.dims)
        objective = Objective(normalise(a), normalise(c), dims, self.q)
        solve = SOLVERS[self.solver]
        generator = np.random.default_rng(self.random_state)
        starts = (
            [as_float_tensor(init, "init").to(a)]
            if init is not None
            else [random_orthogonal(a.shape[1], generator).to(a) for _ in range(self.n_init)]
        )
        max_iter = self.max_iter or 1000
        tol = 1e-6 if self.tol is None else self.tol
        self.results_ = [solve(objective, s, max_iter, tol, lambda i, v: None) for s in starts]
        best = max(self.results_, key=lambda result: result.objective)
        self.objective_ = best.objective
        self.history_, self.n_iter_, self.converged_ = best.history, best.n_iter, best.converged
        found = Subspaces(best.basis[:, : sum(dims)], dims)
        mean_relevance = found.relevance(a, c).mean(0)
        order = mean_relevance.argsort(descending=True, stable=True).tolist()
        ordered = found.select(order)
        self.subspaces_ = Subspaces(ordered.basis, ordered.dims)
        return self
