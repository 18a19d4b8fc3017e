"""Solvers: pairs of activations and contexts in, `Subspaces` out.

One file each: `prca`, `drsa` with its `objective`, its two solvers `quasi_newton` and `paper_loop`, the
`baselines`, subspaces from `labelled` concepts, and the `estimator` that all of them are.
"""

from .baselines import DSA, PCA, MaxRel, RandomSubspaces
from .drsa import DRSA, ConvergenceWarning
from .estimator import NotFittedError, Solver, learn_subspaces
from .labelled import concept_vectors, ibd_subspaces, netdissect_subspaces
from .prca import PRCA

__all__ = [
    "DRSA",
    "DSA",
    "PCA",
    "PRCA",
    "ConvergenceWarning",
    "MaxRel",
    "NotFittedError",
    "RandomSubspaces",
    "Solver",
    "concept_vectors",
    "ibd_subspaces",
    "learn_subspaces",
    "netdissect_subspaces",
]
