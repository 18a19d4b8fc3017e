"""What all estimators share: parameters, fitted attributes, and where their pairs come from.

The conventions are those of scikit-learn, which is not needed: constructors store parameters as they are,
`fit` checks them, fitted attributes end in an underscore.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
from torch import Tensor

from ..checks import ArrayLike, check_matrix, check_pairs
from ..pair_shards import PairShards
from ..pairs import Pairs
from ..ranks import ALONE, Ranks
from ..subspaces import Subspaces
from .samples import HeldSamples, Samples, ShardedSamples


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
