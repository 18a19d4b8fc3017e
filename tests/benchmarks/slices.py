"""Two programs that take turns in short slices of time, so that a machine whose speed drifts slows both.

Each runs from its beginning to its end in a process of its own, which is stopped (SIGSTOP) while the other
runs. Its time is the sum of its slices.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

#: Makes what is timed: called once in its process, where it may load what it needs.
Factory = Callable[..., Callable[[], object]]


class Runner:
    """A process that waits until it is told to run once.

    Parameters
    ----------
    slice_seconds : float
        Length of its slices.
    factory, arguments : callable and its arguments
        Both can be pickled.
    """

    def __init__(self, slice_seconds: float, factory: Factory, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.slice_seconds = slice_seconds
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, factory, arguments), daemon=True)
        self.process.start()
        theirs.close()  # so that the death of the process is seen here
        self.seconds, self.running = 0.0, False
        self.result: Any = None

    def start(self) -> None:
        """Wait until it is ready, and begin; it is stopped until its first slice."""
        self.pipe.recv()
        self.seconds, self.running = 0.0, True
        self._signal(signal.SIGSTOP)
        self.pipe.send(True)

    def step(self) -> None:
        """One slice, or less if it ends within."""
        begin = time.perf_counter()
        self._signal(signal.SIGCONT)
        if self.pipe.poll(self.slice_seconds):
            self.result, self.running = self.pipe.recv(), False
        else:
            self._signal(signal.SIGSTOP)
        self.seconds += time.perf_counter() - begin

    def close(self) -> None:
        """End the process."""
        if self.running:
            self._signal(signal.SIGKILL)
        else:
            self.pipe.send(False)
        self.process.join()

    def _signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def alternate(
    runners: list[Runner], between: Callable[[], None] = lambda: None, every: int = 1
) -> list[float]:
    """Seconds that each needs when they take turns; `between` is called first, last and every few turns."""
    for runner in runners:
        runner.start()
    turn = 0
    while any(runner.running for runner in runners):
        if turn % every == 0:
            between()
        for runner in runners:
            if runner.running:
                runner.step()
        turn += 1
    between()
    return [runner.seconds for runner in runners]


def _serve(pipe: Connection, factory: Factory, arguments: tuple[Any, ...]) -> None:
    run = factory(*arguments)
    pipe.send(None)
    while pipe.recv():
        pipe.send(run())
        pipe.send(None)  # ready again
