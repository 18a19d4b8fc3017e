"""The paper's baselines and ablations (sections 5.1 and 5.2), with the interface of PRCA and DRSA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from ..checks import ArrayLike, Seed, as_int, as_seed, check_nonzero, feature_relevance, unscaled
from ..subspaces import RESIDUAL, Subspaces
from .drsa import DRSA, block_sizes
from .estimator import Activations, Estimator, with_provenance
from .prca import PRCA
from .search import random_orthogonal


class PCA(PRCA):
    """Uncentred PCA of the activations: PRCA with c = a (Proposition 2). Contexts are ignored.

    `eigenvalues_` are those of E[aaᵀ]; otherwise as in `PRCA`.
    """

    _block_name = "PCA"
    _ignores_contexts = True

    @property
    def eigenvalues_(self) -> Tensor:
        """Eigenvalues of E[aaᵀ], descending, in float64, shape (D,)."""
        return super().eigenvalues_ / 2  # PRCA's matrix for c = a is 2 E[aaᵀ]


class MaxRel(Estimator):
    """The d most relevant feature maps: PRCA restricted to canonical directions.

    Attributes
    ----------
    subspaces_ : Subspaces
        Blocks of sizes d and D − d of canonical vectors, by descending mean relevance.
    relevance_ : tensor of float64, shape (D,)
        Mean relevance E[a_j c_j] of each feature.
    order_ : tensor of int, shape (D,)
        Features by descending relevance; ties in the order of the features.
    """

    def __init__(self, n_components: int = 1) -> None:
        self.n_components = n_components

    def fit(self, a: Activations, c: ArrayLike | None = None) -> Self:
        """Fit from activations and contexts of shape (N, D), or from `Pairs` alone."""
        a, c, provenance = self._pairs(a, c)
        check_nonzero(a, c)
        d, n_features = as_int(self.n_components, "n_components", 1), a.shape[1]
        if d > n_features:
            raise ValueError(f"n_components must be at most D = {n_features}, got {d}")
        self._relevance, self._exponent = feature_relevance(a, c)
        self.order_ = self._relevance.argsort(descending=True, stable=True)
        basis = torch.eye(n_features, dtype=a.dtype, device=a.device)[:, self.order_]
        dims, names = ([d, n_features - d], ["MaxRel", RESIDUAL]) if d < n_features else ([d], ["MaxRel"])
        metadata = with_provenance({"solver": {"name": "MaxRel", "n_components": d}}, provenance)
        self.subspaces_ = Subspaces(basis, dims, names, metadata=metadata)
        return self

    @property
    def relevance_(self) -> Tensor:
        """Mean relevance of each feature, in float64, shape (D,)."""
        return unscaled(self._relevance, self._exponent, "the relevance of the features")


class RandomSubspaces(Estimator):
    """Blocks of a random orthogonal matrix: DRSA without training.

    Parameters
    ----------
    n_subspaces, dims, random_state
        As in `DRSA`. For the paper's random subspace of dimension d: `dims=[d]`.
    """

    _ignores_contexts = True

    def __init__(
        self, n_subspaces: int = 4, dims: Sequence[int] | None = None, random_state: Seed = None
    ) -> None:
        self.n_subspaces = n_subspaces
        self.dims = dims
        self.random_state = random_state

    def fit(self, a: Activations, c: ArrayLike | None = None) -> Self:
        """Draw subspaces of the space in which activations of shape (N, D) lie; contexts are ignored."""
        a, _, provenance = self._pairs(a, c)
        dims = block_sizes(a.shape[1], self.n_subspaces, self.dims)
        seed = as_seed(self.random_state)
        basis = random_orthogonal(a.shape[1], seed)[:, : sum(dims)]
        metadata = with_provenance({"solver": {"name": "RandomSubspaces"}, "seed": seed}, provenance)
        self.subspaces_ = Subspaces(basis.to(a), dims, metadata=metadata)
        return self


class DSA(DRSA):
    """Disentangled subspace analysis: DRSA with c = a, blind to the model. Contexts are ignored."""

    _ignores_contexts = True
