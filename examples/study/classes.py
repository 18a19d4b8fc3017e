"""Folders of photographs that are named after their class, e.g. `281_tabby`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drsa_audit import photo_files


@dataclass(frozen=True)
class ClassFolder:
    """A folder of one class: its index, the name of the folder, the files in it."""

    index: int
    name: str
    files: list[Path]

    @property
    def label(self) -> str:
        """The folder's name without the index, e.g. "tabby"."""
        return self.name.partition("_")[2].replace("_", " ") or self.name


@dataclass(frozen=True)
class ClassImages:
    """Images of one class: index of the class, name of its folder, files to learn from and to evaluate on."""

    index: int
    name: str
    train: list[Path]
    val: list[Path]


def class_folders(folder: Path, wanted: Sequence[str] | None = None) -> list[ClassFolder]:
    """The folders `<index>_<name>` in a folder, in order.

    Parameters
    ----------
    folder : path
    wanted : sequence of str, optional
        Indices or folder names; default all.
    """
    found, known = [], set()
    for path in sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."):
        number = path.name.split("_")[0]
        if not number.isdigit():
            raise ValueError(f"{path} must begin with the index of its class, as in 281_tabby")
        names = {number, str(int(number)), path.name}
        if wanted is None or names & set(wanted):
            known |= names
            found.append(ClassFolder(int(number), path.name, photo_files(path)))
    missing = sorted(set(wanted or ()) - known)
    if missing or not found:
        raise ValueError(f"no photographs of the classes {', '.join(missing) or '(any)'} in {folder}")
    return found


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
