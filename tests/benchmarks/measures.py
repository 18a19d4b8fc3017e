"""What a computation costs: seconds side by side, operations, which have no noise, and peak memory."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class _Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.count += int(count(*args, **(kwargs or {}), out_val=result))
        return result


def operations(run: Callable[[], object]) -> int:
    """Multiplications and additions of the convolutions and matrix products in a run."""
    with _Counter() as counter:
        run()
    return counter.count


def seconds_in_turn(
    runs: Mapping[str, Callable[[], object]],
    repeats: int,
    warm_up: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each run, `repeats` of each, by name; with `time.process_time` those of the CPU.

    They take turns, so that a slow minute of the machine meets all of them. Progress goes to standard error.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    if warm_up:
        for run in runs.values():
            run()
    for _ in range(repeats):
        for name, run in runs.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
            print(f"{name}: {seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    return seconds


def peak_memory(script: str, arguments: list[str]) -> float:
    """Peak resident set in MB of a process that runs `script`, which ends with `print_peak_memory()`."""
    command = [sys.executable, str(Path(script).resolve()), *arguments]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def print_peak_memory() -> None:
    """Peak resident set of this process (VmHWM, Linux), weights and libraries included, in MB."""
    # Not getrusage: a child's ru_maxrss starts at the resident set of the process that forked it.
    status = Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) / 1024)
