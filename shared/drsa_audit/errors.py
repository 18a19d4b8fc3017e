"""What a user can put right, told apart from faults of the program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class BadInput(ValueError):
    """A model, folder, file or setting that cannot be used; the message says which and what to do."""


@contextmanager
def one_writer() -> Iterator[None]:
    """What is raised where another process writes to the same folder becomes `BadInput`."""
    try:
        yield
    except RuntimeError as error:
        if "another writer" in str(error):
            raise BadInput(str(error)) from error
        raise


def printable(name: str) -> str:
    """A name of a file with a sign in place of bytes that are no text: no page or JSON file can hold them."""
    return "".join("\ufffd" if "\ud800" <= letter <= "\udfff" else letter for letter in name)


def one_line(text: object, limit: int = 600) -> str:
    """A message on one line, cut where it is longer than a reader would follow."""
    line = " ".join(printable(str(text)).split())
    return line if len(line) <= limit else f"{line[:limit].rstrip()}…"
