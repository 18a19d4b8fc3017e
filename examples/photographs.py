"""Photographs that come with packages: scikit-image's cat, coffee and rocket, foolbox's 20 ImageNet images.

Nothing is downloaded. foolbox keeps its images in its own folder as `imagenet_<number>_<class>.jpg`; they are
named here by that class. Their names, for `quickstart.py --photo`:

    python examples/photographs.py
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from drsa_audit.images import as_rgb
from PIL import Image, ImageOps


def class_name(index: int) -> str:
    """The first name of an ImageNet class, e.g. 471 ↦ "cannon"."""
    import timm.data

    names: str = timm.data.ImageNetInfo().index_to_description(index)
    return names.split(",")[0]


def package_photos() -> dict[str, Callable[[], Image.Image]]:
    """Functions that load each photograph, by name; all are square."""
    import skimage.data

    photos: dict[str, Callable[[], Image.Image]] = {
        # The square around the cat's head; the coffee's and the rocket's middle.
        "cat": lambda: Image.fromarray(skimage.data.chelsea()).crop((75, 0, 375, 300)),
        "coffee": lambda: _middle(Image.fromarray(skimage.data.coffee())),
        "rocket": lambda: _middle(Image.fromarray(skimage.data.rocket())),
    }
    for file in foolbox_files():
        name = class_name(int(file.stem.split("_")[-1]))
        while name in photos:  # there are two jeeps
            name += " 2"
        photos[name] = lambda file=file: _middle(Image.open(file))  # type: ignore[misc]
    return photos


def find_photo(name: str) -> Image.Image:
    """A photograph of a package by name, or a file."""
    photos = package_photos()
    if name in photos:
        return photos[name]()
    if not Path(name).is_file():
        raise ValueError(f"{name!r} is neither a file nor a photograph of a package: {', '.join(photos)}")
    with Image.open(name) as image:
        return as_rgb(ImageOps.exif_transpose(image))


def random_crops(photo: Image.Image, n_crops: int, seed: int = 0) -> list[Image.Image]:
    """Squares of 55 to 100 % of a photograph's side, at random places, half of them mirrored."""
    generator = np.random.default_rng(seed)
    side = min(photo.size)
    crops = []
    for _ in range(n_crops):
        size = int(generator.integers(int(0.55 * side), side + 1))
        left = int(generator.integers(0, photo.width - size + 1))
        top = int(generator.integers(0, photo.height - size + 1))
        crop = photo.crop((left, top, left + size, top + size))
        mirrored = generator.random() < 0.5
        crops.append(crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else crop)
    return crops


def foolbox_files() -> Iterator[Path]:
    """The files of foolbox's photographs, none if it is not installed; names end in the class."""
    # The package itself need not be imported: that would take a second, and frameworks that are not needed.
    found = importlib.util.find_spec("foolbox")
    for place in (found.submodule_search_locations or []) if found else []:
        yield from sorted((Path(place) / "data").glob("imagenet_*.jpg"))


def _middle(photo: Image.Image) -> Image.Image:
    side = min(photo.size)
    left, top = (photo.width - side) // 2, (photo.height - side) // 2
    return photo.crop((left, top, left + side, top + side))


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for name, load in package_photos().items():
        print(f"{name:16} {load().width} pixels")


if __name__ == "__main__":
    main()
