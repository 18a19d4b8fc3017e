"""Photographs in folders that are named after their class, e.g. `281_tabby`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm"}


@dataclass(frozen=True)
class ClassImages:
    """Images of one class: index of the class, name of its folder, files to learn from and to evaluate on."""

    index: int
    name: str
    train: list[Path]
    val: list[Path]


def find_classes(
    folder: Path, wanted: list[str] | None, n_train: int | None, n_val: int | None
) -> list[ClassImages]:
    """Classes in FOLDER/train/<index>_<name>/ and FOLDER/val/<index>_<name>/.

    Parameters
    ----------
    folder : path
    wanted : list of str, optional
        Indices or folder names; default all.
    n_train, n_val : int, optional
        How many images to take at most, the first ones by name; None for all.
    """
    train, val = folder / "train", folder / "val"
    if not train.is_dir() or not val.is_dir():
        raise ValueError(f"{folder} must hold the folders train and val, each with one folder for each class")
    found = []
    for sub in sorted(path for path in val.iterdir() if path.is_dir()):
        number = sub.name.split("_")[0]
        if not number.isdigit():
            raise ValueError(f"{sub} must begin with the index of its class, as in 281_tabby")
        if wanted is not None and not {number, str(int(number)), sub.name} & set(wanted):
            continue
        files = [_photographs(part / sub.name)[:n] for part, n in ((train, n_train), (val, n_val))]
        found.append(ClassImages(int(number), sub.name, *files))
    known = {name for c in found for name in (c.name, str(c.index), c.name.split("_")[0])}
    missing = sorted(set(wanted or ()) - known)
    if missing or not found:
        raise ValueError(f"no photographs of the classes {', '.join(missing) or '(any)'} in {val}")
    return found


def load_images(files: list[Path], size: int) -> tuple[Tensor, list[str], list[str]]:
    """Pixels (N, 3, size, size) in [0, 1], names of the files, and names of those that cannot be read."""
    pixels, names, unreadable = [], [], []
    for file in files:
        try:
            with Image.open(file) as image:
                resized = image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
        except (OSError, UnidentifiedImageError, SyntaxError) as error:
            warnings.warn(f"skipped {file}, which cannot be read: {error}", stacklevel=2)
            unreadable.append(str(file))
            continue
        pixels.append(torch.from_numpy(np.array(resized)).permute(2, 0, 1).float() / 255)
        names.append(file.name)
    if not pixels:
        raise ValueError(f"none of the {len(files)} photographs can be read, e.g. {files[0]}")
    return torch.stack(pixels), names, unreadable


def _photographs(folder: Path) -> list[Path]:
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES) if folder.is_dir() else []
    if not files:
        raise ValueError(f"no photographs ({', '.join(sorted(SUFFIXES))}) in {folder}")
    return files
