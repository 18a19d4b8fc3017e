"""Photographs of classes, to learn from and to evaluate on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drsa_audit import class_folders, photo_files


@dataclass(frozen=True)
class ClassImages:
    """Images of one class: index of the class, name of its folder, files to learn from and to evaluate on."""

    index: int
    name: str
    train: list[Path]
    val: list[Path]


def find_classes(
    folder: Path,
    wanted: Sequence[str] | None = None,
    n_train: int | None = None,
    n_val: int | None = None,
) -> list[ClassImages]:
    """Classes in FOLDER/train/<index>_<name>/ and FOLDER/val/<index>_<name>/.

    Parameters
    ----------
    folder : path
    wanted : sequence of str, optional
        Indices or folder names; default all.
    n_train, n_val : int, optional
        How many images to take at most, the first ones by name; None for all.
    """
    train, val = folder / "train", folder / "val"
    if not train.is_dir() or not val.is_dir():
        raise ValueError(f"{folder} must hold the folders train and val, each with one folder for each class")
    return [
        ClassImages(c.index, c.name, photo_files(train / c.name)[:n_train], c.files[:n_val])
        for c in class_folders(val, wanted)
    ]
