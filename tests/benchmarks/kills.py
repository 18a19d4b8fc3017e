"""kill -9 at random times: what is lost, and is the result the same after resuming?

    python tests/benchmarks/kills.py                     # 100 kills, shared by all cases
    python tests/benchmarks/kills.py --kills 8 --case collection
    python tests/benchmarks/kills.py --kills 8 --case 'audit and report'

A trial starts a case in a process of its own, kills it at a time drawn evenly from the length of a whole run,
and compares what was begun (noted by the work itself) with what is on the disk: all but the unit under way
must be there and whole. Then the case is run again in the same folder. It must do the rest and nothing else,
and end with the result of a run that nobody killed: collections with the same bytes, subspaces and scores
within 1e-9. With two ranks one of them is killed, and the other must end by itself with an error.

Prints a Markdown table; the exit status is 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kill_cases import Audit, Benchmark, Case, Collection, ManyClasses, ManyClassesOnTwoRanks, noted

from tests.audit.photos import random_photos


def start(case: Case, folder: Path, log: Path) -> list[int]:
    """Process numbers of the ranks of a case. Forked: nothing is imported again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    for rank in range(case.n_ranks):
        child = os.fork()
        if not child:
            code = 1
            try:
                variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank)}
                os.environ.update(variables, WORLD_SIZE=str(case.n_ranks), LOCAL_RANK=str(rank))
                case.run(folder, log)
                code = 0
            except BaseException:
                (log.parent / f"error{rank}.txt").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        started.append(child)
    return started


def wait(children: list[int]) -> list[int]:
    """Exit codes, negative for signals."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Where numbers, lists and mappings differ by more than 1e-9."""
    if isinstance(expected, dict):
        if set(found) != set(expected):
            return [f"{path}: {sorted(set(found) ^ set(expected))[:3]}"]
        return [text for key in expected for text in differences(found[key], expected[key], f"{path}/{key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        pairs = zip(found, expected, strict=True)
        return [text for i, (x, y) in enumerate(pairs) for text in differences(x, y, f"{path}/{i}")]
    if isinstance(expected, float) and isinstance(found, float) and abs(found - expected) <= 1e-9:
        return []
    return [] if found == expected else [path]


def trial(case: Case, place: Path, after: float, victim: int, expected: Any) -> dict[str, Any]:
    """Kill one rank of a case after some seconds, resume, and compare."""
    folder, log = place / "out", place / "begun"
    folder.mkdir(parents=True)
    children = start(case, folder, log)
    time.sleep(after)
    os.kill(children[victim], signal.SIGKILL)
    codes = wait(children)
    problems: list[str] = []
    if case.n_ranks > 1 and codes[victim] == -9 and 1 in codes:
        said = (place / f"error{1 - victim}.txt").read_text()
        if "RankError" not in said:
            problems.append(f"the other rank said {said.splitlines()[-1]}")
    kept, begun = case.units(folder), noted(log)
    lost = {kind: begun.count(kind) - kept[kind] for kind in kept}
    problems += [f"{n} units lost: {kind}" for kind, n in lost.items() if n > case.n_ranks]
    log.unlink(missing_ok=True)
    if wait(start(case, folder, log)) != [0] * case.n_ranks:
        problems.append(f"could not be resumed: {(place / 'error0.txt').read_text().splitlines()[-1]}")
        return {"killed": codes[victim] == -9, "lost": lost, "problems": problems}
    total = case.units(folder)
    for kind in kept:
        done_again = noted(log).count(kind) - (total[kind] - kept[kind])
        if done_again > 0:
            problems.append(f"{done_again} finished units done again: {kind}")
    same, numbers = case.result(folder)
    wrong = [name for name in set(same) | set(expected[0]) if same.get(name) != expected[0].get(name)]
    wrong += differences(numbers, expected[1])
    problems += [f"differs: {name}" for name in sorted(wrong)[:3]]
    leftovers = [str(file) for file in folder.rglob(".*.tmp")]
    problems += [f"left behind: {name}" for name in leftovers]
    return {"killed": codes[victim] == -9, "lost": lost, "problems": problems}


def try_case(case: Case, kills: int, generator: random.Random, place: Path) -> dict[str, Any]:
    """Kills until `kills` of them came before the end of the run."""
    reference = place / "reference"
    (reference / "out").mkdir(parents=True)
    begin = time.monotonic()
    codes = wait(start(case, reference / "out", reference / "begun"))
    length = time.monotonic() - begin
    if codes != [0] * case.n_ranks:
        raise RuntimeError((reference / "error0.txt").read_text())
    expected = case.result(reference / "out")
    begun, done = noted(reference / "begun"), case.units(reference / "out")
    if any(begun.count(kind) != n for kind, n in done.items()):
        raise RuntimeError(f"{case.name}: begun and finished units differ: {begun}, {done}")
    row: dict[str, Any] = {
        "case": case.name,
        "seconds": length,
        "kills": 0,
        "late": 0,
        "lost": {},
        "problems": [],
    }
    while row["kills"] < kills and row["late"] < 10 * kills:
        here = place / f"trial{row['kills'] + row['late']}"
        victim = generator.randrange(case.n_ranks)
        found = trial(case, here, generator.uniform(0, length), victim, expected)
        row["kills" if found["killed"] else "late"] += 1
        for kind, n in found["lost"].items():
            row["lost"][kind] = max(row["lost"].get(kind, 0), n)
        row["problems"] += found["problems"]
        shutil.rmtree(here)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("collection", "many classes", "many classes, 2 ranks", "benchmark", "audit and report")
    parser.add_argument("--kills", type=int, default=100, help="kills in all (default: 100)")
    parser.add_argument("--case", choices=names, nargs="*", default=names, help="which cases (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the times (default: 0)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = random.Random(args.seed)
    failed = False
    print("| case | s, whole run | kills | units under way that were lost, at most | other losses |")
    print("|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        data = random_photos(Path(folder) / "data", ["001_a", "003_b"], 12, 4)
        makers: list[Callable[[], Case]] = [
            Collection,
            ManyClasses,
            ManyClassesOnTwoRanks,
            lambda: Benchmark(data),
            lambda: Audit(Path(folder) / "pictures"),
        ]
        cases = [case for case in (make() for make in makers) if case.name in args.case]
        for i, case in enumerate(cases):
            kills = args.kills * (i + 1) // len(cases) - args.kills * i // len(cases)
            row = try_case(case, kills, generator, Path(folder) / str(i))
            lost = ", ".join(f"{max(n, 0)} {kind}" for kind, n in row["lost"].items())
            print(
                f"| {row['case']} | {row['seconds']:.1f} | {row['kills']} | {lost} | "
                f"{'; '.join(row['problems']) or 'none'} |",
                flush=True,
            )
            failed |= bool(row["problems"]) or row["kills"] < kills
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
