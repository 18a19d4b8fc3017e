"""Locks on open files. The system drops them with the process, however it ends, so none stays behind."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

# Windows locks bytes, which nobody else may read then: one far behind whatever the file holds.
_BYTE = 2**30


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this writer alone; False if another one, here or elsewhere, holds it."""
    try:
        if sys.platform == "win32":
            os.lseek(descriptor, _BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(descriptor: int) -> None:
    """Give up the lock, also for processes that were forked meanwhile and share the open file."""
    if sys.platform == "win32":
        os.lseek(descriptor, _BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """A folder for this writer alone, by a lock on the file `name` in it.

    Raises
    ------
    RuntimeError
        If another writer is at work; it is named.
    """
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            free = try_lock(descriptor)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot lock {folder / name} ({error.strerror}); use a local folder"
            ) from error
        if not free:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") if hasattr(os, "pread") else ""
            raise RuntimeError(
                f"another writer{f' ({holder})' if holder else ''} is adding to {folder}; wait until it is "
                "done, or use another folder"
            )
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield
        finally:
            unlock(descriptor)
    finally:
        os.close(descriptor)
