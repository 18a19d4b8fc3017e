"""Where pairs and subspaces come from, so that they are not used for something else unnoticed."""

from __future__ import annotations

import hashlib
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .fingerprint import function_digest, model_fingerprint
from .targets import LABEL

__all__ = [
    "COLLECTION",
    "USE",
    "Provenance",
    "ProvenanceWarning",
    "check_provenance",
    "describe_target",
    "model_fingerprint",
    "target_order",
]

# What must agree between learning subspaces and explaining with them.
USE = ("model", "layer", "channel_dim", "method", "canonizers", "target")
# What must agree between the batches of one collection.
COLLECTION = (*USE, "backend", "target_order", "positions", "random_state", "skip_tokens")

Target: TypeAlias = int | Sequence[Any] | Tensor | np.ndarray[Any, Any] | Callable[..., Any] | None
TargetDescription: TypeAlias = int | list[int] | str | None


class ProvenanceWarning(UserWarning):
    """Subspaces or pairs are used with another model, layer, target or method than they were made for."""


@dataclass(frozen=True)
class Provenance:
    """How pairs (a, c) were collected. Subspaces learned from them carry it in their metadata.

    Attributes
    ----------
    backend : str
        "zennit" or "captum".
    method : str
        How contexts are found: the context method or composite, with its rules.
    layer : str
        Dotted name of the layer.
    channel_dim : int
        Axis of the features in the layer's output.
    target : int, list of int, str or None
        The explained outputs as `describe_target` gives them. None in a use that does not say.
    model : str or None
        `model_fingerprint` of the model; None if there is only a function.
    positions, random_state : int or None
        Positions per image (None for all) and the seed that chose them.
    skip_tokens : int or None
        First tokens of each image that were left out; None for parts that differ in it.
    target_order : str or None
        `target_order` of targets that differ from image to image.
    canonizers : str or None
        What changed the form of the model before rules were applied, "none" if nothing did. None if that is
        not known, as in files of earlier versions.
    """

    backend: str
    method: str
    layer: str
    channel_dim: int
    target: TargetDescription
    model: str | None = None
    positions: int | None = None
    random_state: int | None = None
    target_order: str | None = None
    skip_tokens: int | None = 0
    canonizers: str | None = None

    def __post_init__(self) -> None:
        for name in ("backend", "method", "layer"):
            self._check(name, isinstance(getattr(self, name), str), "a string")
        for name in ("model", "target_order", "canonizers"):
            self._check(name, isinstance(getattr(self, name), str | None), "a string or None")
        for name in ("channel_dim", "positions", "random_state", "skip_tokens"):
            value = getattr(self, name)
            if value is None and name != "channel_dim":
                continue
            self._check(name, _is_integer(value), "an integer")
            object.__setattr__(self, name, operator.index(value))  # NumPy's integers fit into no JSON
        if not isinstance(self.target, str):
            object.__setattr__(self, "target", describe_target(self.target))

    def _check(self, name: str, right: bool, expected: str) -> None:
        if not right:
            raise TypeError(f"{name} of a provenance must be {expected}, got {getattr(self, name)!r}")

    def as_dict(self) -> dict[str, Any]:
        """As a mapping that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Provenance:
        """The inverse of `as_dict`; unknown entries are ignored."""
        if not isinstance(entries, Mapping):
            raise ValueError(f"a provenance is a mapping, got {type(entries).__name__}")
        known = {field.name for field in fields(cls)}
        try:
            return cls(**{name: value for name, value in entries.items() if name in known})
        except TypeError as error:
            raise ValueError(f"this is no provenance: {error}") from error

    @property
    def counts_from_the_end(self) -> bool:
        """Whether there is a negative target."""
        targets = self.target if isinstance(self.target, list) else [self.target]
        return any(isinstance(target, int) and target < 0 for target in targets)

    def with_outputs(self, n_outputs: int | None) -> Provenance:
        """With negative targets, which count from the end of `n_outputs`, as what they stand for."""
        target, counted = self.target, n_outputs or 0

        def positive(index: int) -> int:
            return index + counted if -counted <= index < 0 else index

        if isinstance(target, int):
            return replace(self, target=positive(target))
        if isinstance(target, list):
            return replace(self, target=describe_target([positive(index) for index in target]))
        return self

    def differences(self, other: Provenance, names: Iterable[str] = USE, exact: bool = False) -> list[str]:
        """One line for each named field in which `other` differs, e.g. "layer: 'a' there, 'b' here".

        A model or canonizers that one side does not know are no difference. Nor are, unless `exact`, a target
        that one side does not know and some of the targets of `self`.
        """
        lines = []
        for name in names:
            mine, theirs = getattr(self, name), getattr(other, name)
            unknown = mine is None or theirs is None
            if mine == theirs or (name in ("model", "canonizers") and unknown):
                continue
            # Which labels a loader gave is not kept: "label" stands for any of them.
            if name == "target" and not exact and (unknown or mine == LABEL or _is_part(theirs, mine)):
                continue
            lines.append(f"{name}: {_shown(name, mine)} there, {_shown(name, theirs)} here")
        return lines


def check_provenance(
    made: Provenance | None, used: Provenance, what: str, strict: bool = False, stacklevel: int = 3
) -> None:
    """Compare where something was made with where it is used.

    Parameters
    ----------
    made, used : Provenance
        Nothing can be compared if `made` is None.
    what : str
        What was made, in the plural, for the message: "subspaces".
    stacklevel : int
        Of the warning; 3 names the line that called the caller of this function.

    Raises
    ------
    ValueError
        If they differ and `strict`; otherwise a `ProvenanceWarning` is given.
    """
    if made is None:
        return
    differences = made.differences(used)
    if not differences:
        return
    message = f"the {what} were made for something else: {'; '.join(differences)}"
    if strict:
        raise ValueError(message)
    warnings.warn(message, ProvenanceWarning, stacklevel=stacklevel)


def describe_target(target: Target, tuple_is_index: bool = False) -> TargetDescription:
    """The explained outputs as something that can be compared and kept in a file.

    Parameters
    ----------
    target : int, sequence, tensor, array, function or None
        One output, one for each image, or a function that gives them.
    tuple_is_index : bool
        Whether a tuple is an index into an output with several axes, as in Captum, instead of one target for
        each image.

    Returns
    -------
    int, list of int, str or None
        The different outputs in rising order, or the only one. A string for indices into an output with
        several axes, and for functions: the function's name and a digest of its code and simple captured
        values.
    """
    if target is None:
        return None
    if isinstance(target, Tensor | np.ndarray | np.generic):
        target = _as_integers(target)
    if _is_integer(target):
        return operator.index(target)  # type: ignore[arg-type]
    if isinstance(target, tuple) and tuple_is_index and all(map(_is_integer, target)):
        return str(tuple(map(operator.index, target)))
    if isinstance(target, Sequence) and not isinstance(target, str):
        return _describe_many(target)
    if callable(target):
        name = getattr(target, "__qualname__", None) or type(target).__qualname__
        module = getattr(target, "__module__", None) or "builtins"
        return f"{module}.{name} {function_digest(target)}"
    raise TypeError(
        "target must be an int, one int for each image (a sequence, tensor or array), a function or None, "
        f"got {target!r}"
    )


def target_order(target: Target) -> str | None:
    """Digest of the targets image by image; None if there is one for all.

    `describe_target` forgets which image had which target. A collection that goes on must know.
    """
    if isinstance(target, Tensor | np.ndarray | np.generic):
        target = _as_integers(target)
    if not isinstance(target, Sequence) or isinstance(target, str):
        return None
    entries = [
        [operator.index(i) for i in entry] if isinstance(entry, Sequence) else operator.index(entry)
        for entry in target
    ]
    return hashlib.sha256(repr(entries).encode()).hexdigest()[:12]


def _describe_many(target: Sequence[Any]) -> TargetDescription:
    entries = [_as_integers(entry) if isinstance(entry, Tensor) else entry for entry in target]
    if entries and all(map(_is_integer, entries)):
        different = sorted({operator.index(entry) for entry in entries})
        return different[0] if len(different) == 1 else different
    if entries and all(isinstance(e, tuple | list) and all(map(_is_integer, e)) for e in entries):
        return str(sorted({tuple(map(operator.index, entry)) for entry in entries}))
    raise TypeError(f"a sequence of targets must hold integers, or tuples of them, got {target!r}")


def _as_integers(target: Tensor | np.ndarray[Any, Any] | np.generic[Any]) -> Any:
    """An int, or nested lists of int."""
    kind = torch.as_tensor(target).dtype if not isinstance(target, Tensor) else target.dtype
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise TypeError(f"target must be made of integers, got {kind}")
    return target.tolist()


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_part(some: TargetDescription, of: TargetDescription) -> bool:
    """Whether targets are among those of a list."""
    if not isinstance(of, list) or isinstance(some, str | None):
        return False
    return {some} <= set(of) if isinstance(some, int) else set(some) <= set(of)


def _shown(name: str, value: Any) -> str:
    if name == "model" and value is not None:
        return f"weights {value[:8]}…"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
