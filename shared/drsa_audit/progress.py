"""What a run tells while it works: steps with an estimate of their time, bars, notes, and refusals."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm.auto import tqdm

_T = TypeVar("_T")


class BadInput(ValueError):
    """A model, folder, file or setting that cannot be used; the message says which and what to do."""


class Progress:
    """Steps with their times, and notes of what the user should know of the result.

    By default it is shown on stderr only if that is a terminal, so that a pipe or a log stays quiet.
    """

    def __init__(self, shown: bool | None = None) -> None:
        self.shown = sys.stderr.isatty() if shown is None else shown
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []

    @contextmanager
    def step(self, name: str, what: str, estimate: float | None = None) -> Iterator[None]:
        """Time a step; `what` is shown before it, with the estimate in seconds."""
        if self.shown:
            about = "" if estimate is None else f": about {duration(estimate)}"
            tqdm.write(f"{what}{about}", file=sys.stderr)
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def bar(self, items: Iterable[_T], unit: str) -> Iterable[_T]:
        """The items, with a bar that says how long the rest will take."""
        bar: Iterable[_T] = tqdm(items, unit=unit, leave=False, disable=not self.shown, file=sys.stderr)
        return bar

    def note(self, text: str) -> None:
        """Something to know of the result; the same text is kept once."""
        if text not in self.notes:
            self.notes.append(text)
            if self.shown:
                tqdm.write(f"note: {text}", file=sys.stderr)


def duration(seconds: float) -> str:
    """A time as people say it: "5 s", "3 min", "1 h 20 min"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def printable(name: str) -> str:
    """A name of a file with a sign in place of bytes that are no text: no page or JSON file can hold them."""
    return "".join("\ufffd" if "\ud800" <= letter <= "\udfff" else letter for letter in name)


def one_line(text: object, limit: int = 600) -> str:
    """A message on one line, cut where it is longer than a reader would follow."""
    line = " ".join(printable(str(text)).split())
    return line if len(line) <= limit else f"{line[:limit].rstrip()}…"
