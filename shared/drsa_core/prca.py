"""PRCA: the subspace of maximal expected relevance, an eigenproblem (section 4.1, Note C.2)."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from .subspaces import RESIDUAL, Subspaces
from .validation import ArrayLike, check_pairs, check_positive_int


class PRCA:
    """Principal relevant component analysis: max_U E[(Uᵀa)ᵀ(Uᵀc)] subject to UᵀU = I.

    The solution is the eigenvectors of Σ = E[acᵀ + caᵀ] with the largest *signed* eigenvalues: Σ is
    indefinite, and a negative eigenvalue belongs to a direction that speaks against the prediction.

    Parameters
    ----------
    n_components : int
        Dimension d of the relevant subspace U.

    Attributes
    ----------
    subspaces_ : Subspaces
        The blocks (U | Ũ), of sizes d and D − d, named "PRCA" and "residual".
    components_ : tensor, shape (D, D)
        All eigenvectors as columns; the largest entry of each is positive, so that signs are repeatable.
    eigenvalues_ : tensor, shape (D,)
        Descending, signed. Twice the expected relevance that each component captures.
    n_samples_seen_ : int
        Number of pairs that went into the fit.

    Notes
    -----
    One pass over the data and O(D²) memory: `fit` is `partial_fit` on an empty state, and a stream given
    to `partial_fit` piece by piece yields what one `fit` on all of it yields. The sums and the
    eigenproblem are in float64, results in the dtype of the data.

    Examples
    --------
    >>> import torch
    >>> a = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    >>> c = torch.tensor([[1.0, 0.0], [0.0, -1.0]])      # the second direction is strong, but speaks against
    >>> PRCA(n_components=1).fit(a, c).eigenvalues_
    tensor([ 1., -3.])
    """

    _block_name = "PRCA"
    _sum: Tensor | None
    # The eigenproblem is solved when it is asked for: a stream of B batches costs one, not B.
    _solution: tuple[Tensor, Tensor] | None

    def __init__(self, n_components: int = 1) -> None:
        self.n_components = n_components
        self._forget()

    def fit(self, a: ArrayLike, c: ArrayLike) -> Self:
        """Fit from activations and contexts of shape (N, D)."""
        self._forget()
        return self.partial_fit(a, c)

    def partial_fit(self, a: ArrayLike, c: ArrayLike) -> Self:
        """Add a batch (N, D) of a stream to the fit."""
        a, c = check_pairs(a, c)
        check_positive_int(self.n_components, "n_components")
        if self.n_components > a.shape[1]:
            raise ValueError(f"n_components must be at most D = {a.shape[1]}, got {self.n_components}")
        if self._sum is not None and len(self._sum) != a.shape[1]:
            raise ValueError(
                f"this PRCA was fitted on {len(self._sum)} features, this batch has {a.shape[1]}"
            )
        batch = _cross_covariance_sum(a, c)
        self._sum = batch if self._sum is None else self._sum + batch.to(self._sum.device)
        self.n_samples_seen_ += len(a)
        self._dtype = a.dtype
        self._solution = None
        return self

    def _forget(self) -> None:
        self.n_samples_seen_ = 0
        self._sum = None
        self._solution = None

    @property
    def eigenvalues_(self) -> Tensor:
        """Signed eigenvalues, descending, shape (D,)."""
        return self._solve()[0].to(self._dtype)

    @property
    def components_(self) -> Tensor:
        """Eigenvectors as columns, shape (D, D)."""
        return self._solve()[1].to(self._dtype)

    @property
    def subspaces_(self) -> Subspaces:
        """The blocks (U | Ũ)."""
        components, d = self.components_, self.n_components
        rest = components.shape[1] - d
        dims, names = ([d, rest], [self._block_name, RESIDUAL]) if rest else ([d], [self._block_name])
        metadata = {"solver": {"name": type(self).__name__, "n_components": d}}
        return Subspaces(components, dims, names, metadata=metadata)

    def _solve(self) -> tuple[Tensor, Tensor]:
        if self._sum is None:
            raise ValueError(f"this {type(self).__name__} is not fitted yet; call fit(a, c) first")
        if self.n_samples_seen_ < self.n_components:
            raise ValueError(
                f"{self.n_components} components need at least as many samples, got {self.n_samples_seen_}; "
                "collect more pairs, or lower n_components"
            )
        if self._solution is None:
            if not self._sum.any():
                raise ValueError("E[acᵀ] is zero: the contexts are all zero, or never meet an active neuron")
            values, vectors = torch.linalg.eigh((self._sum + self._sum.T) / self.n_samples_seen_)
            self._solution = values.flip(0), fix_signs(vectors.flip(1))
        return self._solution


def fix_signs(vectors: Tensor) -> Tensor:
    """Flip columns so that the entry of largest modulus is positive: eigenvectors up to sign, made unique."""
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)


def _cross_covariance_sum(a: Tensor, c: Tensor, chunk: int = 4096) -> Tensor:
    """Σ_n a_n c_nᵀ in float64, widened chunk by chunk so that memory stays O(D²)."""
    total = a.new_zeros(a.shape[1], a.shape[1], dtype=torch.float64)
    for rows in range(0, len(a), chunk):
        total.addmm_(a[rows : rows + chunk].double().T, c[rows : rows + chunk].double())
    return total
