"""The folder in which a run keeps its finished parts, so that an interrupted one goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drsa_core.storage import read_json, write_json

from .progress import BadInput


class Work:
    """A folder of results, each under a name that holds a digest of what decided it.

    Another setting gives another name: what is still right is used again, and nothing is ever mixed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def place(self, name: str, decided_by: Mapping[str, Any], suffix: str = "") -> Path:
        """Where a result with these settings lies, or will lie."""
        return self.folder / f"{name}-{digest(decided_by)}{suffix}"

    def remembered(self, name: str, decided_by: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """A JSON value that is made once."""
        file = self.place(name, decided_by, ".json")
        if not file.exists():
            write_json(file, make())
        return read_json(file)


def digest(settings: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that stand for the settings."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def files_digest(files: list[Path]) -> str:
    """Stands for the content of files, in their order."""
    total = hashlib.sha256()
    for file in files:
        try:
            content = file.read_bytes()
        except OSError:
            content = b"unreadable"  # it is skipped as an image, too
        total.update(hashlib.sha256(content).digest())
    return total.hexdigest()[:16]


def check_out(file: Path) -> None:
    """Refuse a file that cannot be written, before any work is done."""
    if file.is_dir():
        raise BadInput(f"{file} is a folder; give the name of a file in it")
    if not file.absolute().parent.is_dir():
        raise BadInput(f"there is no folder {file.absolute().parent} for {file.name}; make it first")


def work_folder(out: Path, given: Path | None = None) -> Path:
    """The folder for finished parts: the given one, or the one beside the output, which ends in .drsa."""
    folder = out.with_suffix(".drsa") if given is None else given
    if folder.absolute() == out.absolute():
        raise BadInput(f"{out} is the folder for what is done, and cannot be the output; name another file")
    return folder
