"""Photographs from files, as pixels in [0, 1]."""

from __future__ import annotations

import os
import struct
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from .progress import one_line, printable

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".webp")
#: What Pillow's decoders raise on a damaged file.
DAMAGES = (
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)


def photo_files(folder: Path) -> list[Path]:
    """The photographs in a folder and in the folders in it, in order; hidden ones are copies of editors."""
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    if not files:
        raise ValueError(f"no photographs ({', '.join(SUFFIXES)}) in {folder}")
    return files


def to_pixels(
    photo: Image.Image, size: int, resize: int | None = None, interpolation: str = "bicubic"
) -> Tensor:
    """A photograph as a square, with values in [0, 1], shape (3, size, size).

    Parameters
    ----------
    photo : PIL image
        With 8 or 16 bits for each value; it is turned upright as its camera noted.
    size : int
        Side of the square.
    resize : int, optional
        Length of the shorter side before the central square is cut out. None: the whole photograph is
        squeezed into the square.
    interpolation : {"bicubic", "bilinear"}
    """
    how = Image.Resampling[interpolation.upper()]
    upright = as_rgb(ImageOps.exif_transpose(photo))
    if resize is None:
        resized = upright.resize((size, size), how)
    else:
        scale = max(resize, size) / min(upright.size)
        width, height = (max(size, round(side * scale)) for side in upright.size)
        left, top = (width - size) // 2, (height - size) // 2
        resized = upright.resize((width, height), how).crop((left, top, left + size, top + size))
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1).float() / 255


def as_rgb(photo: Image.Image) -> Image.Image:
    """With 8 bits for each value; Pillow's own conversion would cut 16 bits off at 255."""
    if photo.mode.startswith("I;16"):
        values = np.asarray(photo).astype(np.float64) / 257
        return Image.fromarray(values.round().astype(np.uint8)).convert("RGB")
    if photo.mode in ("I", "F"):
        kind = "32-bit integers" if photo.mode == "I" else "floating-point numbers"
        raise ValueError(
            f"its values are {kind} (mode {photo.mode}), whose range is not known; save it with 8 or 16 bits"
        )
    return photo.convert("RGB")


class UnreadablePhoto(ValueError):
    """A file that holds no photograph that can be used; the message names it and says why."""


def load_photo(file: Path, size: int, resize: int | None = None, interpolation: str = "bicubic") -> Tensor:
    """Pixels (3, size, size) in [0, 1] of one file; `UnreadablePhoto` if it cannot be read."""
    try:
        with Image.open(file) as image:
            return to_pixels(image, size, resize, interpolation)
    except DAMAGES as error:
        # Pillow repeats the file's name, which stands beside the reason already.
        why = str(error).replace(f" {str(file)!r}", "") or type(error).__name__
        raise UnreadablePhoto(f"{file} ({one_line(why, 160)})") from error


def load_images(
    files: Sequence[Path],
    size: int,
    resize: int | None = None,
    interpolation: str = "bicubic",
    limit: int | None = None,
) -> tuple[Tensor, list[str], list[str]]:
    """Photographs from files; one warning names those that cannot be read and are skipped.

    Parameters
    ----------
    files : sequence of path
    size, resize, interpolation
        As in `to_pixels`.
    limit : int, optional
        Stop after so many that can be read.

    Returns
    -------
    tensor, shape (N, 3, size, size)
        Pixels in [0, 1].
    list of str
        Names of the files, with their folders where two have the same.
    list of str
        What cannot be read, and why.
    """
    pixels: list[Tensor] = []
    read, unreadable = [], []
    for file in files:
        try:
            pixels.append(load_photo(file, size, resize, interpolation))
        except UnreadablePhoto as error:
            unreadable.append(str(error))
        else:
            read.append(file)
        if len(pixels) == limit:
            break
    if not pixels:
        example = f", e.g. {unreadable[0]}" if unreadable else ""
        raise ValueError(f"none of the {len(files)} photographs can be read{example}")
    if unreadable:
        warnings.warn(skipped(unreadable, len(files)), stacklevel=2)
    return torch.stack(pixels), _names(read), unreadable


def skipped(unreadable: Sequence[str], n_files: int) -> str:
    """What is said of files that cannot be read."""
    shown = ", ".join(unreadable[:5]) + (", …" if len(unreadable) > 5 else "")
    return printable(f"{len(unreadable)} of {n_files} images cannot be read and were skipped: {shown}")


def _names(files: Sequence[Path]) -> list[str]:
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        common = os.path.commonpath([file.parent for file in files])
        names = [file.relative_to(common).as_posix() for file in files]
    return [printable(name) for name in names]
