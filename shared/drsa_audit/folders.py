"""Which class is explained, and which files show it: a folder of images, or one of class folders."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import timm.data

from .images import SUFFIXES
from .networks import Network
from .progress import BadInput, printable


@dataclass(frozen=True)
class TargetClass:
    """The class that is explained: number of the output, index of the class, name."""

    output: int
    index: int
    name: str


@dataclass(frozen=True)
class ImageFiles:
    """Files of the explained class, and of other classes by their name."""

    own: list[Path]
    others: dict[str, list[Path]]
    doubt: str | None = None  # why they may be of another class, if the folder's name says so


def find_target(network: Network, n_outputs: int, wanted: str, folders: Sequence[Path]) -> TargetClass:
    """The class of a number or a name.

    A name is looked for among the class folders (`235_german_shepherd`, or, where there is one folder for
    each output and none has a number, in alphabetical order as torchvision's `ImageFolder` counts them) and,
    if no folder has it, among ImageNet's classes if the network has 1000 outputs.
    """
    of_folders = _names_of_folders(n_outputs, folders)
    names = of_folders
    if n_outputs == 1000 and network.classes is None:
        info = timm.data.ImageNetInfo()
        names = {i: info.index_to_description(i).split(",")[0] for i in range(1000)} | of_folders
    index = int(wanted) if re.fullmatch(r"[0-9]+", wanted) else _named(wanted, of_folders, names, n_outputs)
    try:
        output = network.output_of(index)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if not 0 <= output < n_outputs:
        raise BadInput(f"the model has the classes 0 to {n_outputs - 1}, got {index}")
    return TargetClass(output, index, names.get(index, f"class {index}"))


def find_files(folder: Path, target: TargetClass, limit: int | None = None) -> ImageFiles:
    """The images of the explained class in a folder, and those of other classes if it has class folders.

    A folder with images holds the explained class alone. Of each class at most `limit`, the first by name.
    """
    check_folder(folder)
    here = images_in(folder)
    if here:
        inside = [path.name for path in _subfolders(folder) if images_in(path)]
        if inside:
            raise BadInput(
                f"{folder} holds images, e.g. {here[0].name}, and folders of images, {_some(inside)}, so "
                "that it is not clear which are meant; move the images away, or give one of the folders"
            )
        return ImageFiles(here[:limit], {}, _doubt(folder, target))
    by_class = class_files(folder)
    own = [name for name in by_class if _is_of(name, target)]
    if len(own) != 1:
        which = "none of which" if not own else "more than one of which"
        raise BadInput(
            f"{folder} holds the class folders {_some(list(by_class))}, {which} is of {target.name} "
            f"({target.index}); give the folder of that class itself, or name it as in 235_german_shepherd"
        )
    shared = Counter(label(name) for name in by_class)
    others = {
        # Where several classes have one name, with the number: "517 crane".
        label(name) if shared[label(name)] == 1 else printable(name.replace("_", " ")): files[:limit]
        for name, files in by_class.items()
        if name != own[0]
    }
    return ImageFiles(by_class[own[0]][:limit], others)


def check_folder(folder: Path) -> None:
    """Refuse what is no folder."""
    if not folder.exists():
        raise BadInput(f"there is no folder {folder}")
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; give a folder of images, or of class folders")


def class_files(folder: Path, limit: int | None = None) -> dict[str, list[Path]]:
    """The images in each class folder of a folder, by its name; of each at most `limit`, the first ones."""
    check_folder(folder)
    by_class = {path.name: images_in(path)[:limit] for path in _subfolders(folder)}
    by_class = {name: files for name, files in by_class.items() if files}
    if not by_class:
        raise BadInput(f"no images ({', '.join(SUFFIXES)}) in {folder}")
    return by_class


def images_in(folder: Path) -> list[Path]:
    """The images in a folder itself, in order; with links to files that are gone, which cannot be read."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.suffix.lower() in SUFFIXES and not file.is_dir() and not file.name.startswith(".")
    )


def label(name: str) -> str:
    """The name of a class folder without its number: "235_german_shepherd" ↦ "german shepherd"."""
    return printable(re.sub(r"^\d+_", "", name).replace("_", " ") or name)


def number_of(folder_name: str) -> int | None:
    """The number at the beginning of the name of a class folder."""
    found = re.match(r"(\d+)(_|$)", folder_name)
    return int(found[1]) if found else None


def _named(wanted: str, of_folders: dict[int, str], names: dict[int, str], n_outputs: int) -> int:
    """The index of the class of a name, e.g. "german_shepherd" or "235_german_shepherd"."""
    number = number_of(wanted)
    plain = _plain(re.sub(r"^[0-9]+_", "", wanted))
    found = [index for index, name in of_folders.items() if _plain(name) == plain]
    # The user's own folders say more than a list of a thousand names, of which some occur twice.
    found = found or [index for index, name in names.items() if _plain(name) == plain]
    if not found:
        close = difflib.get_close_matches(plain, {_plain(name) for name in names.values()}, n=3, cutoff=0.5)
        near = f"; did you mean {' or '.join(repr(name) for name in close)}?" if close else ""
        advice = "" if close else f"; give the number of the output, 0 to {n_outputs - 1}"
        raise BadInput(f"the model has no class {wanted!r} that is known by name{near}{advice}")
    listed = " and ".join(map(str, sorted(found)))
    if number is not None and number not in found:
        raise BadInput(f"{wanted!r} says class {number}, but {names[found[0]]} is class {listed}")
    if number is None and len(found) > 1:
        raise BadInput(f"more than one class is called {wanted!r}: {listed}; give the number of one of them")
    return found[0] if number is None else number


def _doubt(folder: Path, target: TargetClass) -> str | None:
    """Why the images of a folder may be of another class than the explained one."""
    name = folder.absolute().name
    number = number_of(name) if "_" in name else None
    if number is None or number == target.index:
        return None
    return (
        f"the folder {name} is by its name of class {number}, but the explained class is {target.index} "
        f"({target.name})"
    )


def _names_of_folders(n_outputs: int, folders: Sequence[Path]) -> dict[int, str]:
    names: dict[int, str] = {}
    for folder in folders:
        found = [path.name for path in _subfolders(folder)] if folder.is_dir() else []
        # A folder of images of one class may carry the class in its own name.
        names |= {int(m[1]): label(n) for n in [folder.name, *found] if (m := re.match(r"(\d+)_", n))}
        if len(found) == n_outputs and not any(re.match(r"\d", name) for name in found):
            names |= {i: label(name) for i, name in enumerate(sorted(found))}
    return names


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _is_of(folder_name: str, target: TargetClass) -> bool:
    number = number_of(folder_name)
    return _plain(folder_name) == _plain(target.name) if number is None else number == target.index


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


def _plain(name: str) -> str:
    return re.sub(r"[\s_\-]+", " ", name).strip().casefold()
