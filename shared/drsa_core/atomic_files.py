"""Files that are either the old ones or the whole new ones, also after a crash or on a full disk."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .file_locks import try_lock

# A writer locks its file right after it made it; nobody needs an hour for that.
_STALE_AFTER_SECONDS = 3600.0
_TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}\.tmp")


def write_atomically(path: str | os.PathLike[str], chunks: Iterable[bytes | memoryview]) -> None:
    """Write the chunks one after the other to a file beside `path`, and put that in the place of `path`.

    A symbolic link stays, and the file that it names is replaced. A new file has the permissions of the
    umask, a replaced one keeps its own. The bytes are on the disk before the name points to them.

    Raises
    ------
    OSError
        If the file cannot be written, e.g. because the disk is full. The old one is then as it was.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"cannot write to {path}: it is a folder; give the name of a file in it")
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, f"cannot write to {path}: it is a pipe or a device, no file to replace")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write to {path}: there is no folder {target.parent}; make it first")
    remove_stale(target)
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    try:
        with _new_file(temporary) as descriptor:
            if target.exists() and sys.platform != "win32":
                os.fchmod(descriptor, stat.S_IMODE(target.stat().st_mode))
            for chunk in chunks:
                _write_all(descriptor, chunk)
            os.fsync(descriptor)
            if sys.platform != "win32":  # Windows renames no open file
                os.replace(temporary, target)
        if sys.platform == "win32":
            os.replace(temporary, target)
    except BaseException as error:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise OSError(error.errno, f"could not write {path}: {error.strerror}") from error
        raise
    _sync_folder(target.parent)


def remove_stale(target: Path, min_age: float = _STALE_AFTER_SECONDS) -> None:
    """Remove what writers of `target` left that were killed `min_age` seconds ago or earlier.

    A file that its writer still holds is never removed.
    """
    # The ending tells them from files of the user, such as a copy with a date behind its name.
    pattern = re.compile(re.escape(f".{target.name}.") + r"[a-z0-9_]{8}\.tmp")
    for file in target.parent.iterdir():
        if pattern.fullmatch(file.name):
            with suppress(OSError):  # another one was faster, or it is not ours to remove
                if time.time() - file.stat().st_mtime >= min_age and not _is_held(file):
                    file.unlink()


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left in a folder, whatever it was to become, but nothing in its folders."""
    for file in list(folder.glob(".*.tmp")):
        if match := _TEMPORARY.fullmatch(file.name):
            remove_stale(folder / match[1], min_age=0)


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Write JSON atomically."""
    write_atomically(path, [json.dumps(content, indent=1).encode()])


def _is_held(file: Path) -> bool:
    descriptor = os.open(file, os.O_RDWR)
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _new_file(path: Path) -> Iterator[int]:
    # 0o666 without the bits of the umask, as `open` does it.
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, 0o666)
    try:
        with suppress(OSError):  # file systems without locks: age alone then says what is stale
            try_lock(descriptor)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, chunk: bytes | memoryview) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[os.write(descriptor, rest[: 2**30]) :]  # one call takes at most 2 GiB


def _sync_folder(folder: Path) -> None:
    """The new name is on the disk as well; some file systems cannot do that, and lose nothing else."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
