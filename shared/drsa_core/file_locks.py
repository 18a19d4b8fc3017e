"""Locks on open files. The system drops them with the process, however it ends, so none stays behind."""

from __future__ import annotations

import errno
import os
import sys

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
