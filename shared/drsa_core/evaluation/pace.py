"""Which batch size and memory format suit a network: found on the first batches of the work itself.

Large batches may fall out of the processor's caches, and on Linux outputs of more than 32 MB get new memory
from the kernel in every pass, page by page. Many networks are twice as fast on inputs in channels-last, the
weights as they are. All of that depends on network and machine, so it is timed. Nothing is run for timing
alone, apart from one batch that has to give the same in both formats.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

#: Batch size to begin with, and those to go on with while they are faster.
FIRST, LARGER, SMALLER = 4, (8, 16, 32, 64), (3, 2, 1)
#: Batches for each setting; the first of them only warms up.
TRIES = 3
#: What a batch size must gain to be taken, so that noise does not decide for an extreme one.
GAIN = 0.97


@dataclass(frozen=True)
class Pace:
    """Images per batch, and their memory format (None: as it comes)."""

    batch_size: int
    memory_format: torch.memory_format | None


#: Yields what to try on the next batch, takes its seconds per image, and returns what was fastest.
Probe = Generator[Pace, float, Pace]


def probe(formats: tuple[torch.memory_format, ...]) -> Probe:
    """Try the formats, then larger batches, or else smaller ones, for as long as they gain."""
    seconds = []
    for memory_format in formats:
        pace = Pace(FIRST, memory_format)
        seconds.append(((yield from _fastest(pace)), pace))
    fastest, best = min(seconds, key=lambda entry: entry[0])
    for sizes in (LARGER, SMALLER):
        for size in sizes:
            pace = Pace(size, best.memory_format)
            found = yield from _fastest(pace)
            if found > GAIN * fastest:
                break
            fastest, best = found, pace
        if best.batch_size != FIRST:
            break
    return best


def _fastest(pace: Pace) -> Generator[Pace, float, float]:
    seconds = []
    for _ in range(TRIES):
        seconds.append((yield pace))
    return min(seconds[1:])


class Paces:
    """The pace of the next batch: what was asked for, or what is still being tried.

    Parameters
    ----------
    batch_size : int, optional
        Asked for, with inputs in the memory format in which they come; nothing is tried.
    formats : tuple of memory formats
        To be tried if no batch size was asked for.

    Attributes
    ----------
    now : Pace
    """

    def __init__(self, batch_size: int | None, formats: tuple[torch.memory_format, ...]) -> None:
        self._tries: Probe | None = None
        if batch_size is None:
            self._tries = probe(formats)
            self.now = next(self._tries)
        else:
            self.now = Pace(batch_size, None)

    @property
    def found(self) -> bool:
        """Whether it stays as it is."""
        return self._tries is None

    def note(self, seconds: float) -> None:
        """Take note of the seconds per image of a batch."""
        if self._tries is not None:
            try:
                self.now = self._tries.send(seconds)
            except StopIteration as end:
                self.now, self._tries = end.value, None
