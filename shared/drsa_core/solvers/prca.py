"""PRCA: the subspace of maximal expected relevance, an eigenproblem (section 4.1, Note C.2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from ..checks import ArrayLike, as_int, check_pairs, times_power_of_two, unit_scale, unscaled
from ..pair_shards import PairShards
from ..pairs import common_provenance
from ..subspaces import RESIDUAL, Subspaces
from .estimator import Activations, Estimator, NotFittedError, with_provenance


class PRCA(Estimator):
    """Principal relevant component analysis: max_U E[(Uᵀa)ᵀ(Uᵀc)] subject to UᵀU = I.

    The solution is the eigenvectors of Σ = E[acᵀ + caᵀ] with the largest *signed* eigenvalues: Σ is
    indefinite, and a negative eigenvalue belongs to a direction that counts against the prediction.

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
    eigenvalues_ : tensor of float64, shape (D,)
        Descending, signed. Twice the expected relevance that each component captures: they scale with a and
        with c, unlike the subspaces.
    n_samples_seen_ : int
        Number of pairs that went into the fit.

    Notes
    -----
    One pass over the data and O(D²) memory: `fit` is `partial_fit` on an empty state, and a stream given
    to `partial_fit` piece by piece yields what one `fit` on all of it yields. The sums and the
    eigenproblem are in float64, components in the dtype of the data. Data may have any scale.

    Examples
    --------
    >>> import torch
    >>> a = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    >>> c = torch.tensor([[1.0, 0.0], [0.0, -1.0]])      # the second direction is strong, but counts against
    >>> PRCA(n_components=1).fit(a, c).eigenvalues_
    tensor([ 1., -3.], dtype=torch.float64)
    """

    _block_name = "PRCA"
    #: Σ_n a_n c_nᵀ is `_sum` · 2^`_exponent`.
    _sum: Tensor | None = None
    _exponent: int
    _dtype: torch.dtype
    _dimension: int
    #: Provenance of all pairs so far, None if some have none, and of those that have one.
    _provenance: Any
    _known_provenance: Any
    # The eigenproblem is solved when it is asked for: a stream of B batches costs one, not B.
    _solution: tuple[Tensor, Tensor] | None = None

    def __init__(self, n_components: int = 1) -> None:
        self.n_components = n_components

    def fit(self, a: Activations, c: ArrayLike | None = None) -> Self:
        """Fit from activations and contexts of shape (N, D), or from `Pairs` or `PairShards` alone.

        Shards are read once, chunk by chunk; ranks add up Σ, in one sum of D² numbers.
        """
        if isinstance(a, PairShards):
            return self._fit_shards(a, c)
        return self._add(a, c, anew=True)

    def _fit_shards(self, shards: PairShards, c: ArrayLike | None) -> Self:
        if c is not None:
            raise TypeError("PairShards hold their contexts: give fit(shards) or fit(a, c)")
        if not len(shards):
            raise ValueError("the shards hold no pairs on any rank; collect some first")
        self._dimension = self._check_dimension(shards.n_features)
        total, exponent = torch.zeros(shards.n_features, shards.n_features, dtype=torch.float64), 0
        for chunk in (shards.without_contexts() if self._ignores_contexts else shards).chunks:
            batch, of_batch = _cross_covariance_sum(*check_pairs(*chunk.read(), min_rows=0))
            total, exponent = _add_scaled(total.to(batch.device), exponent, batch, of_batch)
        # To one power of two, that of the rank with the largest sum; a sum of zeros has no say in it.
        lowest = -(2**40)
        exponents = shards.ranks.numbers(exponent if total.any() else lowest)
        largest = max(exponents) if max(exponents) > lowest else 0
        self._sum = shards.ranks.sum(times_power_of_two(total, max(exponent - largest, -4000)))
        self._exponent, self._dtype = largest, shards.dtype
        self._provenance = self._known_provenance = shards.provenance
        self.n_samples_seen_, self._solution = len(shards), None
        return self

    def partial_fit(self, a: Activations, c: ArrayLike | None = None) -> Self:
        """Add a batch (N, D) of a stream to the fit; batches may differ in scale."""
        return self._add(a, c, anew=False)

    def _add(self, a: Activations, c: ArrayLike | None, anew: bool) -> Self:
        a, c, provenance = self._pairs(a, c)
        dimension = self._check_dimension(a.shape[1])
        previous = None if anew else self._sum
        if previous is None:
            self._provenance = self._known_provenance = provenance
            self._dtype = a.dtype
            self._sum, self._exponent = _cross_covariance_sum(a, c)
            self.n_samples_seen_ = len(a)
        else:
            if len(previous) != a.shape[1]:
                name = type(self).__name__
                raise ValueError(
                    f"this {name} was fitted on {len(previous)} features, this batch has {a.shape[1]}"
                )
            known = _joined_provenance(self._known_provenance, provenance)
            self._provenance = None if provenance is None or self._provenance is None else known
            self._known_provenance = known
            self._dtype = torch.promote_types(self._dtype, a.dtype)
            batch, exponent = _cross_covariance_sum(a, c)
            self._sum, self._exponent = _add_scaled(
                previous, self._exponent, batch.to(previous.device), exponent
            )
            self.n_samples_seen_ += len(a)
        self._dimension, self._solution = dimension, None
        return self

    def _check_dimension(self, n_features: int) -> int:
        dimension = as_int(self.n_components, "n_components", 1)
        if dimension > n_features:
            raise ValueError(f"n_components must be at most D = {n_features}, got {dimension}")
        return dimension

    @property
    def eigenvalues_(self) -> Tensor:
        """Signed eigenvalues, descending, in float64, shape (D,)."""
        return unscaled(self._solve()[0], self._exponent, "the largest eigenvalue")

    @property
    def components_(self) -> Tensor:
        """Eigenvectors as columns, shape (D, D)."""
        return self._solve()[1].to(self._dtype)

    @property
    def subspaces_(self) -> Subspaces:
        """The blocks (U | Ũ)."""
        components, d = self.components_, self._dimension
        rest = components.shape[1] - d
        dims, names = ([d, rest], [self._block_name, RESIDUAL]) if rest else ([d], [self._block_name])
        metadata = {"solver": {"name": type(self).__name__, "n_components": d}}
        return Subspaces(components, dims, names, metadata=with_provenance(metadata, self._provenance))

    def _solve(self) -> tuple[Tensor, Tensor]:
        if self._sum is None:
            raise NotFittedError(f"this {type(self).__name__} is not fitted yet")
        if self.n_samples_seen_ < self._dimension:
            raise ValueError(
                f"{self._dimension} components need at least as many samples, got {self.n_samples_seen_}; "
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


def _cross_covariance_sum(a: Tensor, c: Tensor, chunk: int = 4096) -> tuple[Tensor, int]:
    """Σ_n a_n c_nᵀ as a matrix in float64 and the power of two that it is to be multiplied by.

    It is widened to float64 chunk by chunk, so that memory stays O(D²) beside the data.
    """
    (a, of_a), (c, of_c) = unit_scale(a), unit_scale(c)
    total = a.new_zeros(a.shape[1], a.shape[1], dtype=torch.float64)
    for rows in range(0, len(a), chunk):
        total.addmm_(a[rows : rows + chunk].double().T, c[rows : rows + chunk].double())
    return total, of_a + of_c


def _add_scaled(first: Tensor, of_first: int, second: Tensor, of_second: int) -> tuple[Tensor, int]:
    """Sum of two matrices with powers of two, with the larger of both; what is zero has no say in it."""
    if not second.any():
        return first, of_first
    if not first.any():
        return second, of_second
    largest = max(of_first, of_second)
    return (
        times_power_of_two(first, of_first - largest) + times_power_of_two(second, of_second - largest),
        largest,
    )


def _joined_provenance(before: Any, now: Any) -> Any:
    """How all batches so far were collected, as far as it is known; they must not contradict each other."""
    if before is None or now is None:
        return before or now
    differences = before.differences(now)
    if differences:
        raise ValueError(
            f"this batch was not collected like the ones before: {'; '.join(differences)}. If they are to be "
            "mixed, give partial_fit(pairs.a, pairs.c)"
        )
    # As for `Pairs.concatenate`: positions, seed and skipped tokens are not known where they differ.
    return common_provenance([before, replace(now, target=before.target)])
