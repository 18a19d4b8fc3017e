"""PRCA, PCA, Max-Rel and random subspaces; and what all solvers share, by scikit-learn's conventions."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
import torch
from scipy.stats import ortho_group
from torch import Tensor

from .checks import ArrayLike, Seed, as_int, as_seed, check_nonzero, check_pairs
from .distributed import ALONE, Ranks
from .pairs import Pairs, PairShards
from .provenance import Provenance, common_provenance
from .subspaces import RESIDUAL, Subspaces

Activations: TypeAlias = "ArrayLike | Pairs | PairShards"


class NotFittedError(ValueError, AttributeError):
    """A fitted attribute was read before `fit`."""


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
        fit_shards: Any = solver.fit  # only the solvers of this package know ranks
        fit_shards(PairShards(pairs, ranks))
    else:
        solver.fit(pairs.a, pairs.c)
    subspaces = solver.subspaces_
    return subspaces if pairs.provenance is None else subspaces.with_provenance(pairs.provenance)


class Samples(NamedTuple):
    """What `fit` was given, checked: this rank's activations and contexts (N, D), and where they are from."""

    a: Tensor
    c: Tensor
    provenance: Provenance | None = None
    ranks: Ranks = ALONE

    @property
    def n_total(self) -> int:
        """Number of pairs of all ranks."""
        return sum(self.ranks.all_gather(len(self.a)))

    def seed(self, seed: int | None) -> int | None:
        """The seed; where there is none, one that all ranks share."""
        if seed is None and self.ranks.size > 1:
            return int(self.ranks.from_first(np.random.SeedSequence().generate_state(1)[0]))
        return seed


def unpack_pairs(a: Activations, c: ArrayLike | None, needs_contexts: bool = True) -> Samples:
    """The samples of `fit(a, c)`, `fit(pairs)` or `fit(shards)`; with c = a where contexts are not needed."""
    provenance, ranks = None, ALONE
    if isinstance(a, Pairs | PairShards):
        if c is not None:
            raise TypeError(f"{type(a).__name__} hold their contexts: give fit(pairs) or fit(a, c)")
        provenance = a.provenance
        if isinstance(a, PairShards):
            if not len(a):
                raise ValueError("the shards hold no pairs on any rank; collect some first")
            ranks = a.ranks
            empty = torch.empty(0, a.n_features, dtype=a.dtype)
            read = [chunk.read() for chunk in a.chunks] or [(empty, empty)]
            a, c = (torch.cat(rows) for rows in zip(*read, strict=True))
        else:
            a, c = a
    elif c is None and needs_contexts:
        raise TypeError(
            "contexts are missing: give fit(a, c) with arrays or tensors (n_samples, n_features), or "
            f"fit(pairs) with drsa_core.Pairs; got only {type(a).__name__}"
        )
    a, c = check_pairs(a, c if needs_contexts and c is not None else a, 1 if ranks.size == 1 else 0)
    return Samples(a, c, provenance, ranks)


def with_provenance(metadata: dict[str, Any], provenance: Provenance | None) -> dict[str, Any]:
    """Metadata of subspaces, with the provenance of their pairs if it is known."""
    return metadata if provenance is None else {**metadata, "provenance": provenance.as_dict()}


class Estimator:
    """Parameters by name, a short `repr`, and a clear error for attributes that `fit` has not set yet."""

    #: Whether the estimator is blind to the model: c = a, and contexts need not be given.
    _ignores_contexts: ClassVar[bool] = False

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # without self
        return {parameter.name: parameter.default for parameter in parameters}

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name. `deep` is for estimators inside estimators, of which there are none here."""
        return {name: getattr(self, name) for name in self._defaults()}

    def set_params(self, **parameters: Any) -> Self:
        """Change parameters by name; they count from the next `fit` on."""
        valid = self._defaults()
        for name in parameters:
            if name not in valid:
                raise ValueError(
                    f"{type(self).__name__} has no parameter {name!r}; the parameters are {', '.join(valid)}"
                )
        vars(self).update(parameters)
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

    def _samples(self, a: Activations, c: ArrayLike | None) -> Samples:
        """What `fit` was given, checked; all activations or contexts zero is an error."""
        samples = unpack_pairs(a, c, needs_contexts=not self._ignores_contexts)
        alive = samples.ranks.all_gather((bool(samples.a.any()), bool(samples.c.any())))
        check_nonzero(*torch.tensor(alive).T)
        return samples


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
    A stream given to `partial_fit` piece by piece yields what one `fit` on all of it yields.

    Examples
    --------
    >>> import torch
    >>> a = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    >>> c = torch.tensor([[1.0, 0.0], [0.0, -1.0]])      # the second direction is strong, but counts against
    >>> PRCA(n_components=1).fit(a, c).eigenvalues_
    tensor([ 1., -3.], dtype=torch.float64)
    """

    #: Σ_n a_n c_nᵀ in float64.
    _sum: Tensor | None = None
    _dtype: torch.dtype
    _dimension: int
    _provenance: Provenance | None
    # The eigenproblem is solved when it is asked for: a stream of B batches costs one, not B.
    _solution: tuple[Tensor, Tensor] | None = None

    def __init__(self, n_components: int = 1) -> None:
        self.n_components = n_components

    def fit(self, a: Activations, c: ArrayLike | None = None) -> Self:
        """Fit from activations and contexts of shape (N, D), or from `Pairs` or `PairShards` alone."""
        if not isinstance(a, PairShards):
            samples = self._samples(a, c)
            total, dtype, n_samples = _cross_sum(samples.a, samples.c), samples.a.dtype, len(samples.a)
            provenance = samples.provenance
        else:
            total = torch.zeros(a.n_features, a.n_features, dtype=torch.float64)
            for chunk in a.chunks:
                rows, contexts = check_pairs(*chunk.read(), min_rows=0)
                batch = _cross_sum(rows, rows if self._ignores_contexts else contexts)
                total = total.to(batch.device) + batch
            total, dtype, n_samples, provenance = a.ranks.sum(total), a.dtype, len(a), a.provenance
        self._dimension = _checked_dimension(self.n_components, len(total))
        self._sum, self._dtype, self.n_samples_seen_ = total, dtype, n_samples
        self._provenance, self._solution = provenance, None
        return self

    def partial_fit(self, a: Activations, c: ArrayLike | None = None) -> Self:
        """Add a batch (N, D) of a stream to the fit. What is known of its origin must not contradict."""
        a, c, provenance, _ = unpack_pairs(a, c, needs_contexts=not self._ignores_contexts)
        dimension, total = _checked_dimension(self.n_components, a.shape[1]), _cross_sum(a, c)
        if self._sum is None:
            self._dtype, self._provenance, self.n_samples_seen_ = a.dtype, provenance, 0
        elif len(self._sum) != a.shape[1]:
            raise ValueError(f"fitted on {len(self._sum)} features, but this batch has {a.shape[1]}")
        else:
            joined = common_provenance([self._provenance, provenance])
            self._provenance = None if None in (self._provenance, provenance) else joined
            total = self._sum + total.to(self._sum.device)
            self._dtype = torch.promote_types(self._dtype, a.dtype)
        self._sum, self._dimension, self._solution = total, dimension, None
        self.n_samples_seen_ += len(a)
        return self

    @property
    def eigenvalues_(self) -> Tensor:
        """Signed eigenvalues, descending, in float64, shape (D,)."""
        return self._solve()[0]

    @property
    def basis_(self) -> Tensor:
        """Eigenvectors as columns, shape (D, D)."""
        return self._solve()[1].to(self._dtype)

    @property
    def subspaces_(self) -> Subspaces:
        """The blocks (U | Ũ)."""
        return _one_block(self.basis_, self._dimension, type(self).__name__, self._provenance)

    def _solve(self) -> tuple[Tensor, Tensor]:
        if self._sum is None:
            raise NotFittedError(
                f"this {type(self).__name__} is not fitted yet: call fit(a, c) or fit(pairs)"
            )
        if self.n_samples_seen_ < self._dimension:
            raise ValueError(
                f"{self._dimension} components need at least as many samples, got {self.n_samples_seen_}; "
                "collect more pairs, or lower n_components"
            )
        if self._solution is None:
            if not self._sum.any():
                raise ValueError("E[acᵀ] is zero: the contexts are all zero, or never meet an active neuron")
            values, vectors = torch.linalg.eigh((self._sum + self._sum.T) / self.n_samples_seen_)
            vectors = vectors.flip(1)
            # Eigenvectors are unique up to sign: that of the largest entry becomes positive.
            largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
            self._solution = values.flip(0), torch.where(largest < 0, -vectors, vectors)
        return self._solution


def _cross_sum(a: Tensor, c: Tensor, chunk: int = 4096) -> Tensor:
    """Σ_n a_n c_nᵀ in float64, to which samples are widened chunk by chunk."""
    total = a.new_zeros(a.shape[1], a.shape[1], dtype=torch.float64)
    for rows in range(0, len(a), chunk):
        total.addmm_(a[rows : rows + chunk].double().T, c[rows : rows + chunk].double())
    return total


def _checked_dimension(n_components: object, n_features: int) -> int:
    dimension = as_int(n_components, "n_components", 1)
    if dimension > n_features:
        raise ValueError(f"n_components must be at most D = {n_features}, got {dimension}")
    return dimension


def _one_block(basis: Tensor, d: int, name: str, provenance: Provenance | None) -> Subspaces:
    """The first d columns as a block of that name, and the rest."""
    rest = basis.shape[1] - d
    dims, names = ([d, rest], [name, RESIDUAL]) if rest else ([d], [name])
    metadata = with_provenance({"solver": {"name": name, "n_components": d}}, provenance)
    return Subspaces(basis, dims, names, metadata=metadata)


class PCA(PRCA):
    """Uncentred PCA of the activations: PRCA with c = a (Proposition 2). Contexts are ignored.

    `eigenvalues_` are those of E[aaᵀ]; otherwise as in `PRCA`.
    """

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
        """Fit from activations and contexts of shape (N, D), or from `Pairs` or `PairShards` alone."""
        samples = self._samples(a, c)
        n_features = samples.a.shape[1]
        d = _checked_dimension(self.n_components, n_features)
        self.relevance_ = mean_relevance_of_features(samples)
        self.order_ = self.relevance_.argsort(descending=True, stable=True)
        basis = torch.eye(n_features, dtype=samples.a.dtype, device=samples.a.device)[:, self.order_]
        self.subspaces_ = _one_block(basis, d, "MaxRel", samples.provenance)
        return self


def mean_relevance_of_features(samples: Samples) -> Tensor:
    """E[a_j c_j] of each feature over all ranks, in float64, shape (D,)."""
    return samples.ranks.sum((samples.a.double() * samples.c.double()).sum(0)) / samples.n_total


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
        samples = unpack_pairs(a, c, needs_contexts=False)
        n_features, seed = samples.a.shape[1], as_seed(self.random_state)
        dims = block_sizes(n_features, self.n_subspaces, self.dims)
        basis = random_orthogonal(n_features, samples.seed(seed))[:, : sum(dims)]
        metadata = with_provenance({"solver": {"name": "RandomSubspaces"}, "seed": seed}, samples.provenance)
        self.subspaces_ = Subspaces(basis.to(samples.a), dims, metadata=metadata)
        return self


def random_orthogonal(n_features: int, seed: int | np.random.Generator | None) -> Tensor:
    """A Haar-distributed orthogonal matrix (D, D) in float64, from SciPy's `ortho_group`."""
    generator = np.random.default_rng(seed)
    if n_features == 1:  # ortho_group starts at dimension 2
        return torch.ones(1, 1, dtype=torch.float64)
    return torch.as_tensor(ortho_group.rvs(n_features, random_state=generator))


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
