"""Ctrl-C at every line: does the model come back?

    python tests/benchmarks/interrupts.py                # 300 lines of each case, evenly spaced
    python tests/benchmarks/interrupts.py --every 1      # every line
    python tests/benchmarks/interrupts.py --twice        # a second Ctrl-C some lines after the first
    python tests/benchmarks/interrupts.py --at-once      # an exception at the line itself

A trial runs one case of `interrupt_cases` and sends SIGINT at the n-th line that this library, Zennit or
Captum executes in it. Afterwards the model, the attributor, the handler of SIGINT and the settings of PyTorch
must be as before, the interrupt must have been delivered, and the next explanation must be right. Prints a
Markdown table; the exit status is 1 if anything had changed.

When Python is not told otherwise, the signal arrives at the line and is handled where the interpreter next
looks for signals, as a real one. `--at-once` handles it before the line, also where no signal can be handled,
such as between the end of a `with` block and the call of its `__exit__`. That is harder to withstand.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import captum
import torch
import zennit
from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[2] / "shared")]

import drsa_core  # noqa: E402
from drsa_core import model_state as restoring  # noqa: E402
from interrupt_cases import CASES, Case, Result  # noqa: E402

import captum_drsa  # noqa: E402
import zennit_drsa  # noqa: E402
from tests.model_state import model_state  # noqa: E402

TRACED = tuple(
    str(Path(str(package.__file__)).parent)
    for package in (drsa_core, captum_drsa, zennit_drsa, captum, zennit)
)
#: Only of this version is it known that an opcode event follows its line event at once.
CAN_ARRIVE = sys.implementation.name == "cpython" and sys.version_info[:2] == (3, 11)

# An iterator's next item, called from C with the three arguments of a trace function and no Python frame in
# which the signal could be handled.
_next = ctypes.PYFUNCTYPE(None, *[ctypes.py_object] * 4)(("PyIter_Next", ctypes.pythonapi))
_raise_in_c: Any = ctypes.PyDLL(None)["raise"]


class Injection:
    """A trace function that sends SIGINT at a line, counted from 1; by default at none.

    Parameters
    ----------
    line : int
        Of those executed in the packages `TRACED`.
    second : int, optional
        How many lines after the handling of the first signal to send another.
    at_once : bool
        Whether the signal is handled before the line is executed.
    """

    def __init__(self, line: int = sys.maxsize, second: int | None = None, at_once: bool = False) -> None:
        self._line, self._second, self._at_once = line, second, at_once
        self._is_traced: dict[CodeType, bool] = {}
        self._trace = self._on_call  # the same object each time: the interpreter does not own it
        self.n_lines = 0
        self.n_sent = 0
        self.n_delivered = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The user's handler of SIGINT."""
        self.n_delivered += 1
        self._go_on(frame)
        raise KeyboardInterrupt

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The handler in place, and the trace function too, which `stop` takes off."""
        own_handle = restoring.restored._handle

        def noticed(context: restoring.restored, number: int, frame: FrameType | None) -> None:
            own_handle(context, number, frame)
            self._go_on(frame)

        before = signal.signal(signal.SIGINT, self.handle)
        try:
            with mock.patch.object(restoring.restored, "_handle", noticed):
                yield
        finally:
            signal.signal(signal.SIGINT, before)

    def run(self, work: Callable[[], Any]) -> Any:
        """`work()` with interrupts."""
        sys.settrace(self._trace)
        try:
            return work()
        finally:
            sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code not in self._is_traced:
            self._is_traced[code] = code.co_filename.startswith(TRACED)
        return self._on_line if self._is_traced[code] else None

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "line":
            return self._on_line
        self.n_lines += 1
        if self.n_lines != self._line:
            return self._on_line
        self.n_sent += 1
        if self._at_once:
            signal.raise_signal(signal.SIGINT)
            return self._on_line
        # No trace function may run before the signal is handled, else it would be handled there. The opcode
        # event of this line is still to come; it sends the signal.
        sys.settrace(None)
        frame.f_trace_opcodes = True
        return functools.partial(_next, map(_raise_in_c, [signal.SIGINT]))

    def _go_on(self, frame: FrameType | None) -> None:
        """After the first signal, count on for the second."""
        if self._second is None or self.n_sent != 1:
            return
        self._line = self.n_lines + self._second
        while frame is not None:
            if self._is_traced.get(frame.f_code):
                frame.f_trace, frame.f_trace_opcodes = self._on_line, False
            frame = frame.f_back
        sys.settrace(self._trace)


@dataclass
class Count:
    """Trials of one case: how many lines there are, how many were tried, and what was wrong at which."""

    lines: int = 0
    trials: int = 0
    stopped: int = 0
    problems: dict[int, str] = field(default_factory=dict)


def count_lines(case: Case) -> int:
    """Number of lines that a case executes in the packages `TRACED`."""
    injection = Injection()
    injection.run(case.run)
    return injection.n_lines


def try_case(case: Case, lines: Sequence[int], second: int | None = None, at_once: bool = False) -> Count:
    """Interrupt a case at each of these lines."""
    case.prepare()
    case.run()  # caches are filled
    count = Count(lines=count_lines(case))
    reference, before = case.run(), _state(case)
    for line in lines:
        injection = Injection(line, second, at_once)
        with injection.installed():
            result: Result | None = None
            try:
                result = injection.run(case.run)
                _look_for_signals()
            except BaseException as error:
                if not _comes_of_interrupt(error):
                    raise
                count.stopped += 1
            is_handler_back = signal.getsignal(signal.SIGINT) == injection.handle
        count.trials += bool(injection.n_sent)
        problems = [name for name, value in _state(case).items() if value != before[name]]
        problems += [] if is_handler_back else ["handler of SIGINT"]
        problems += ["interrupt lost"] if injection.n_sent and not injection.n_delivered else []
        problems += ["delivered too often"] if injection.n_delivered > injection.n_sent else []
        problems += [] if result is None or _same(result, reference) else ["result"]
        if not problems:
            problems += [] if _same(case.run(), reference) else ["next explanation"]
        if problems:
            count.problems[line] = ", ".join(problems)
            case.prepare()
            reference, before = case.run(), _state(case)
    return count


def spread(n_lines: int, every: int | None, sample: int) -> Sequence[int]:
    """Every so manieth line, or so many lines evenly spaced."""
    return range(1, n_lines + 1, every or max(1, n_lines // sample))


def _state(case: Case) -> dict[str, Any]:
    torch_settings = torch.backends.mha.get_fastpath_enabled(), torch.is_grad_enabled()
    return {
        "model": model_state(case.model),
        "attributor": case.leftovers(),
        "settings of PyTorch": (*torch_settings, torch.is_inference_mode_enabled()),
        "lock": (lock := restoring._locks.get(case.model)) is not None and lock._is_owned(),
        "contexts": len(restoring._entered),
    }


def _same(result: Result, reference: Result) -> bool:
    return len(result) == len(reference) and all(map(torch.equal, result, reference))


def _comes_of_interrupt(error: BaseException | None) -> bool:
    """Whether an interrupt was raised, or an error on the way out of one (Zennit's `finally` clauses)."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _look_for_signals() -> None:
    """A function call: here a signal is handled at the latest."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sample", type=int, default=300, help="lines of each case, evenly spaced")
    parser.add_argument("--every", type=int, help="instead: every so manieth line")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--twice", action="store_true", help="a second signal a few lines after the first")
    parser.add_argument("--at-once", action="store_true", help="handle the signal before the line")
    options = parser.parse_args()
    if not options.at_once and not CAN_ARRIVE:
        parser.error("a signal can arrive at a line in CPython 3.11 alone; use --at-once")
    if options.at_once and options.twice:
        parser.error("an exception at a line ends the tracing: --twice needs signals that arrive")
    torch.set_num_threads(1)
    start = time.perf_counter()
    total = Count()
    print("| case | lines | trials | stopped | changed |\n|---|---|---|---|---|")
    for name in tqdm([name for name in CASES if options.only in name], unit="case", file=sys.stderr):
        case = CASES[name]()
        case.prepare()
        case.run()
        lines = spread(count_lines(case), options.every, options.sample)
        n_changed = 0
        for second in (1, 3, 10, 40) if options.twice else (None,):
            count = try_case(case, lines, second, options.at_once)
            total.trials += count.trials
            total.problems |= {len(total.problems) + i: p for i, p in enumerate(count.problems.values())}
            n_changed += len(count.problems)
            for line, problem in count.problems.items():
                print(f"{name}, line {line}, second after {second}: {problem}", file=sys.stderr)
            tqdm.write(
                f"| {name} | {count.lines} | {count.trials} | {count.stopped} | {len(count.problems)} |"
            )
    print(f"\n{total.trials} trials, {len(total.problems)} changed, {time.perf_counter() - start:.0f} s")
    return bool(total.problems)


if __name__ == "__main__":
    sys.exit(main())
