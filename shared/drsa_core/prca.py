"""What all estimators share: parameters, fitted attributes, and where their pairs come from.

The conventions are those of scikit-learn, which is not needed: constructors store parameters as they are,
`fit` checks them, fitted attributes end in an underscore.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from .checks import (
    ArrayLike,
    Seed,
    as_int,
    as_seed,
    check_matrix,
    check_nonzero,
    check_pairs,
    feature_relevance,
    times_power_of_two,
    unit_scale,
    unscaled,
)
from .distributed import ALONE, Ranks
from .objective import HeldSamples, Samples, ShardedSamples
from .optimizers import random_orthogonal
from .pairs import Pairs, PairShards
from .provenance import common_provenance
from .subspaces import RESIDUAL, Subspaces


class NotFittedError(ValueError, AttributeError):
    """A fitted attribute was read before `fit`."""


@runtime_checkable
class PairsLike(Protocol):
    """Activations and contexts with their provenance, e.g. `Pairs`."""

    @property
    def a(self) -> Tensor:
        """Activations, shape (N, D)."""

    @property
    def c(self) -> Tensor:
        """Contexts, shape (N, D)."""

    @property
    def provenance(self) -> Any:
        """A `Provenance`, or None."""


Activations: TypeAlias = "ArrayLike | PairsLike | PairShards"


class Solver(Protocol):
    """What learns subspaces: PRCA, DRSA and the baselines, or anything with the same two names."""

    @property
    def subspaces_(self) -> Subspaces:
        """What was learned."""

    def fit(self, a: Tensor, c: Tensor) -> Any:
        """Learn `subspaces_` from activations and contexts (N, D)."""


def learn_subspaces(solver: Solver, pairs: Pairs, ranks: Ranks = ALONE) -> Subspaces:
    """The subspaces that a solver finds in the pairs of all ranks, with the pairs' provenance."""
    if ranks.size > 1:
        fit_shards: Any = solver.fit  # PRCA, DRSA and what is derived from them
        fit_shards(PairShards(pairs, ranks))
    else:
        solver.fit(pairs.a, pairs.c)
    subspaces = solver.subspaces_
    return subspaces if pairs.provenance is None else subspaces.with_provenance(pairs.provenance)


class Estimator:
    """Parameters by name, a short `repr`, and a clear error for attributes that `fit` has not set yet."""

    #: Whether the estimator is blind to the model: c = a, and contexts need not be given.
    _ignores_contexts: ClassVar[bool] = False

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        """Names and default values of the constructor's parameters."""
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # without self
        return {parameter.name: parameter.default for parameter in parameters}

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name. `deep` is for estimators inside estimators, of which there are none here."""
        return {name: getattr(self, name) for name in self._defaults()}

    def set_params(self, **parameters: Any) -> Self:
        """Change parameters by name; they count from the next `fit` on.

        Raises
        ------
        ValueError
            For a name that is not a parameter. Nothing is changed then.
        """
        valid = self._defaults()
        for name in parameters:
            if name not in valid:
                raise ValueError(
                    f"{type(self).__name__} has no parameter {name!r}; the parameters are {', '.join(valid)}"
                )
        for name, value in parameters.items():
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        shown = [
            f"{name}={getattr(self, name)!r}"
            for name, default in self._defaults().items()
            if repr(getattr(self, name)) != repr(default)  # also right for arrays and NaN, unlike !=
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def __getattr__(self, name: str) -> Any:
        # Called only where there is no such attribute. Names with two underscores are Python's own.
        if name.endswith("_") and not name.endswith("__") and not self.__sklearn_is_fitted__():
            raise NotFittedError(
                f"this {type(self).__name__} is not fitted yet: call fit(a, c) or fit(pairs) before reading "
                f"{name}"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __sklearn_is_fitted__(self) -> bool:
        """Whether `fit` has set fitted attributes; scikit-learn's `check_is_fitted` asks this."""
        return any(name.endswith("_") and not name.endswith("__") for name in vars(self))

    def _pairs(self, a: Activations, c: ArrayLike | None) -> tuple[Tensor, Tensor, Any]:
        """Checked activations and contexts (N, D) of one dtype and device, and their provenance or None."""
        a, c, provenance = unpack_pairs(a, c, needs_contexts=not self._ignores_contexts)
        if self._ignores_contexts:
            checked = check_matrix(a, "a (activations)")
            return checked, checked, provenance
        return *check_pairs(a, c), provenance

    def _samples(self, a: Activations, c: ArrayLike | None) -> Samples:
        """The pairs that `fit` was given, in memory or in shards."""
        if not isinstance(a, PairShards):
            return HeldSamples(*self._pairs(a, c))
        if c is not None:
            raise TypeError("PairShards hold their contexts: give fit(shards) or fit(a, c)")
        if not len(a):
            raise ValueError("the shards hold no pairs on any rank; collect some first")
        shards = a.without_contexts() if self._ignores_contexts else a
        if 2 * len(shards) < shards.n_features:
            # All pairs are smaller than U itself, of which D² numbers would be sent at every step.
            pairs = shards.gathered()
            return HeldSamples(pairs.a, pairs.c, pairs.provenance)
        return ShardedSamples(shards)


def unpack_pairs(
    a: Activations, c: ArrayLike | None, needs_contexts: bool = True
) -> tuple[ArrayLike, ArrayLike, Any]:
    """Activations, contexts and provenance of `fit(a, c)` or `fit(pairs)`; without pairs it is None.

    Parameters
    ----------
    a : array or tensor, shape (N, D), or pairs
    c : array or tensor, shape (N, D), optional
    needs_contexts : bool
        Whether `fit(a)` is an error; if not, it stands for c = a.
    """
    if isinstance(a, PairShards):
        raise TypeError("only PRCA, PCA, DRSA and DSA take PairShards; give shards.gathered(), all in memory")
    if not isinstance(a, Tensor | np.ndarray) and isinstance(a, PairsLike):
        if c is not None:
            raise TypeError(
                f"got {type(a).__name__}, which holds its contexts, and c as well: give fit(pairs) or "
                "fit(a, c)"
            )
        return a.a, a.c, a.provenance
    if c is None and needs_contexts:
        raise TypeError(
            "contexts are missing: give fit(a, c) with arrays or tensors (n_samples, n_features), or "
            f"fit(pairs) with drsa_core.Pairs; got only {type(a).__name__}"
        )
    return a, a if c is None else c, None


def with_provenance(metadata: dict[str, Any], provenance: Any) -> dict[str, Any]:
    """Metadata of subspaces, with the provenance of their pairs if it is known."""
    return metadata if provenance is None else {**metadata, "provenance": provenance.as_dict()}


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
    basis_ : tensor, shape (D, D)
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
        exponents = shards.ranks.all_gather(exponent if total.any() else lowest)
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
    def basis_(self) -> Tensor:
        """Eigenvectors as columns, shape (D, D)."""
        return self._solve()[1].to(self._dtype)

    @property
    def subspaces_(self) -> Subspaces:
        """The blocks (U | Ũ)."""
        components, d = self.basis_, self._dimension
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


def block_sizes(n_features: int, n_subspaces: int, dims: Sequence[int] | None) -> tuple[int, ...]:
    """Sizes of K blocks in D dimensions: `dims` if given, else D/K, the first ones one larger if need be."""
    if dims is not None:
        if isinstance(dims, str) or not isinstance(dims, Iterable):
            raise ValueError(f"dims must be a sequence of block sizes, one for each subspace, got {dims!r}")
        sizes = tuple(as_int(d, "every entry of dims", 1) for d in dims)
        if not sizes or sum(sizes) > n_features:
            raise ValueError(
                f"dims must add up to at most D = {n_features}, got {sizes} with sum {sum(sizes)}"
            )
        return sizes
    n_subspaces = as_int(n_subspaces, "n_subspaces", 1)
    if n_subspaces > n_features:
        raise ValueError(f"n_subspaces must be at most D = {n_features}, got {n_subspaces}")
    small, larger = divmod(n_features, n_subspaces)
    return (small + 1,) * larger + (small,) * (n_subspaces - larger)
