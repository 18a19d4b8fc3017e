"""The paper's baselines and ablations (sections 5.1 and 5.2), with the interface of PRCA and DRSA."""

from __future__ import annotations

from typing import Self

import torch

from .drsa import DRSA, block_sizes, random_orthogonal
from .prca import PRCA
from .subspaces import RESIDUAL, Subspaces
from .validation import ArrayLike, check_matrix, check_nonzero_contexts, check_pairs, check_positive_int


class PCA(PRCA):
    """Uncentred PCA of the activations: PRCA with c = a (Proposition 2). Contexts are ignored.

    `eigenvalues_` are those of E[aaᵀ]; otherwise as in `PRCA`.
    """

    _block_name = "PCA"

    def fit(self, a: ArrayLike, c: ArrayLike | None = None) -> Self:
        """Fit from activations of shape (N, D)."""
        return super().fit(a, a)

    def partial_fit(self, a: ArrayLike, c: ArrayLike | None = None) -> Self:
        """Add a batch (N, D) of a stream to the fit."""
        return super().partial_fit(a, a)

    @property
    def eigenvalues_(self) -> torch.Tensor:
        """Eigenvalues of E[aaᵀ], descending, shape (D,)."""
        return super().eigenvalues_ / 2  # PRCA's matrix for c = a is 2 E[aaᵀ]


class MaxRel:
    """The d most relevant feature maps: PRCA restricted to canonical directions.

    Attributes
    ----------
    subspaces_ : Subspaces
        Blocks of sizes d and D − d of canonical vectors, by descending mean relevance.
    relevance_ : tensor, shape (D,)
        Mean relevance E[a_j c_j] of each feature.
    order_ : tensor of int, shape (D,)
        Features by descending relevance; ties in the order of the features.
    """

    def __init__(self, n_components: int = 1) -> None:
        self.n_components = n_components

    def fit(self, a: ArrayLike, c: ArrayLike) -> Self:
        """Fit from activations and contexts of shape (N, D)."""
        a, c = check_pairs(a, c)
        check_nonzero_contexts(c)
        d, n_features = check_positive_int(self.n_components, "n_components"), a.shape[1]
        if d > n_features:
            raise ValueError(f"n_components must be at most D = {n_features}, got {d}")
        self.relevance_ = (a.double() * c.double()).mean(0).to(a.dtype)
        self.order_ = self.relevance_.argsort(descending=True, stable=True)
        basis = torch.eye(n_features, dtype=a.dtype, device=a.device)[:, self.order_]
        dims, names = ([d, n_features - d], ["MaxRel", RESIDUAL]) if d < n_features else ([d], ["MaxRel"])
        metadata = {"solver": {"name": "MaxRel", "n_components": d}}
        self.subspaces_ = Subspaces(basis, dims, names, metadata=metadata)
        return self


class RandomSubspaces:
    """Blocks of a random orthogonal matrix: DRSA without training.

    Parameters
    ----------
    n_subspaces, dims, random_state
        As in `DRSA`. For the paper's random subspace of dimension d: `dims=[d]`.
    """

    def __init__(
        self, n_subspaces: int = 4, dims: list[int] | None = None, random_state: int | None = None
    ) -> None:
        self.n_subspaces = n_subspaces
        self.dims = dims
        self.random_state = random_state

    def fit(self, a: ArrayLike, c: ArrayLike | None = None) -> Self:
        """Draw subspaces of the space in which activations of shape (N, D) lie."""
        a = check_matrix(a, "a (activations)")
        dims = block_sizes(a.shape[1], self.n_subspaces, self.dims)
        basis = random_orthogonal(a.shape[1], self.random_state)[:, : sum(dims)]
        metadata = {"solver": {"name": "RandomSubspaces"}, "seed": self.random_state}
        self.subspaces_ = Subspaces(basis.to(a), dims, metadata=metadata)
        return self


class DSA(DRSA):
    """Disentangled subspace analysis: DRSA with c = a, blind to the model. Contexts are ignored."""

    def fit(self, a: ArrayLike, c: ArrayLike | None = None, init: ArrayLike | None = None) -> Self:
        """Fit from activations of shape (N, D)."""
        return super().fit(a, a, init=init)
