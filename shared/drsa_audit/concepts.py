"""Concepts from pairs: how many, which, and whether they come back in other fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drsa_core import DRSA, Pairs, Subspaces
from drsa_core.solvers.estimator import learn_subspaces

AUTO = "auto"


@dataclass(frozen=True)
class Learned:
    """The concepts, and what is known of them.

    Attributes
    ----------
    subspaces : Subspaces
    history : list of float
        Objective along the fit.
    stability : dict or None
        `index`, `is_stable`, `threshold`, `null_mean`.
    choice : dict or None
        Why there are so many: `best`, and for each K `n_subspaces`, `index`, `threshold`.
    """

    subspaces: Subspaces
    history: list[float]
    stability: dict[str, Any] | None = None
    choice: dict[str, Any] | None = None


def learn(pairs: Pairs, n_subspaces: int | str, seed: int, test_stability: bool, shown: bool) -> Learned:
    """Learn K concepts, or as many as are stable.

    Parameters
    ----------
    pairs : Pairs
    n_subspaces : int or "auto"
    seed : int
    test_stability : bool
        Whether to repeat the fit on other images and from other starts.
    shown : bool
        Whether to show progress.
    """
    solver = DRSA(int(n_subspaces), random_state=seed, progress=shown)
    subspaces = learn_subspaces(solver, pairs)
    return Learned(subspaces, [float(value) for value in solver.history_])
