"""What a user can put right, told apart from faults of the program."""

from __future__ import annotations


class BadInput(ValueError):
    """A model, folder, file or setting that cannot be used; the message says which and what to do."""


def one_line(text: object, limit: int = 600) -> str:
    """A message on one line, cut where it is longer than a reader would follow."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else f"{line[:limit].rstrip()}…"
