"""Where pairs and subspaces come from, so that they are not used for something else unnoticed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

# What must agree between learning subspaces and explaining with them.
USE = ("model", "layer", "channel_dim", "backend", "method", "target")
# What must agree between the batches of one collection.
COLLECTION = (*USE, "positions", "random_state")


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
        The attribution method or composite, with its rules and the context method.
    layer : str
        Dotted name of the layer.
    channel_dim : int
        Axis of the features in the layer's output.
    target : int, list of int, str or None
        The explained outputs; a description if it was a function of the output.
    model : str or None
        Fingerprint of the model's weights.
    positions, random_state : int or None
        Positions per image and the seed that chose them.
    """

    backend: str
    method: str
    layer: str
    channel_dim: int
    target: int | list[int] | str | None
    model: str | None = None
    positions: int | None = None
    random_state: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """As a mapping that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Provenance:
        """The inverse of `as_dict`; unknown entries are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in entries.items() if name in known})

    def differences(self, other: Provenance, names: Iterable[str] = USE) -> list[str]:
        """One line for each named field in which `other` differs, e.g. "layer: 'a' there, 'b' here"."""
        mine, theirs = self.as_dict(), other.as_dict()
        return [
            f"{name}: {mine[name]!r} there, {theirs[name]!r} here"
            for name in names
            if mine[name] != theirs[name]
        ]


def check_provenance(made: Provenance | None, used: Provenance, what: str, strict: bool = False) -> None:
    """Compare where something was made with where it is used.

    Raises
    ------
    ValueError
        If they differ and `strict`; otherwise a `ProvenanceWarning` is given. Nothing can be compared if
        `made` is None.
    """
    if made is None:
        return
    differences = made.differences(used)
    if not differences:
        return
    message = f"the {what} were made for something else: {'; '.join(differences)}"
    if strict:
        raise ValueError(message)
    warnings.warn(message, ProvenanceWarning, stacklevel=3)
