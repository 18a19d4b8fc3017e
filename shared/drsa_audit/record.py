"""What an audit found, as a value that a file can hold: all that a report needs beside maps and subspaces."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import BadInput
from .work import read_json, write_json

FILE = "audit.json"


@dataclass(frozen=True, kw_only=True)
class AuditRecord:
    """An audit in numbers and words.

    Attributes
    ----------
    model : dict
        `name`, `kind` and `fingerprint`.
    target : dict
        `name`, `index` and `output` of the explained class.
    layer : dict
        `name`, `kind` and `shape` of the layer with the concepts.
    method : dict
        `backend`, `name`, `reason`, and whether it `is_other` than asked for.
    doctor : dict or None
        What the doctor found of LRP.
    subspaces, explained : str
        File and folder beside this record that hold the concepts and the explained images.
    n_train : int
        Images that the concepts were learned from.
    train_relevance : list of list
        R_k of these images.
    other_classes : dict
        R_k of images of other classes, by name of the class.
    history : list of float
        Objective along the fit.
    stability, choice_of_k, flipping, ablation : dict or None
    settings, versions, seconds : dict
    notes : list of str
        What the user should know.
    command, created : str
    """

    model: dict[str, Any]
    target: dict[str, Any]
    layer: dict[str, Any]
    method: dict[str, Any]
    doctor: dict[str, Any] | None
    subspaces: str
    explained: str
    n_train: int
    train_relevance: list[list[float]]
    other_classes: dict[str, list[list[float]]]
    history: list[float]
    settings: dict[str, Any]
    versions: dict[str, str]
    seconds: dict[str, float]
    command: str
    created: str
    notes: list[str] = field(default_factory=list)
    stability: dict[str, Any] | None = None
    choice_of_k: dict[str, Any] | None = None
    flipping: dict[str, Any] | None = None
    ablation: dict[str, Any] | None = None

    def save(self, folder: Path) -> None:
        """Write it into a work folder."""
        write_json(folder / FILE, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> AuditRecord:
        """Read it from a work folder."""
        if not (folder / FILE).is_file():
            raise BadInput(f"{folder} holds no finished audit; run `drsa audit`, which writes such a folder")
        entries = read_json(folder / FILE)
        known = {f.name for f in fields(cls)}
        try:
            return cls(**{name: value for name, value in entries.items() if name in known})
        except (TypeError, AttributeError) as error:
            raise BadInput(f"{folder / FILE} is not the record of an audit: {error}") from error
