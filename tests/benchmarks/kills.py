"""kill -9 at random times: what is lost, and is the result the same after resuming?

    python tests/benchmarks/kills.py                     # 100 kills, shared by all cases
    python tests/benchmarks/kills.py --kills 8 --case collection

A trial starts a case in a process of its own, kills it at a time drawn evenly from the length of a whole run,
and compares what was begun (noted by the work itself) with what is on the disk: all but the unit under way
must be there and whole. Then the case is run again in the same folder. It must do the rest and nothing else,
and end with the result of a run that nobody killed: collections with the same bytes, subspaces and scores
within 1e-9. With two ranks one of them is killed, and the other must end by itself with an error.

Prints a Markdown table; the exit status is 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[2] / "shared")]

from drsa_audit import find_classes  # noqa: E402
from drsa_audit.jobs import learned_job, single_job  # noqa: E402
from drsa_core import DRSA, Pairs, PairStore, Subspaces, fit_many, joined_ranks  # noqa: E402
from drsa_core.collect import collect_pairs  # noqa: E402

from tests.audit.photos import random_photos  # noqa: E402
from tests.audit.test_experiment import CountingBackend, Model, experiment_on  # noqa: E402
from tests.ranks.work import GradientTimesInput, photographs  # noqa: E402

IMAGES, BATCH, CLASSES = 120, 3, 5


def note(file: Path, text: str) -> None:
    """Add a line to a file at once: it is there also if this process is killed right after."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{text}\n".encode())
    os.close(descriptor)


def noted(file: Path) -> list[str]:
    """The lines of a file, none if it is missing."""
    return file.read_text().splitlines() if file.exists() else []


class NotingExplainer(GradientTimesInput):
    """Notes every batch that it begins."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.log = log

    def context(self, inputs: Any, target: Any) -> Any:
        """As in `Explainer`."""
        note(self.log, "batch")
        return super().context(inputs, target)


class NotingDRSA(DRSA):
    """Notes every fit that it begins, with a path that is set for the process."""

    log: Path

    def fit(self, *pairs: Any, **options: Any) -> NotingDRSA:
        """As in `DRSA`."""
        note(type(self).log, "fit")
        super().fit(*pairs, **options)
        return self


class Case(ABC):
    """Work that can be resumed."""

    name: str
    n_ranks = 1

    @abstractmethod
    def run(self, folder: Path, log: Path) -> None:
        """Do what is missing in a folder; every unit is noted when it begins."""

    @abstractmethod
    def units(self, folder: Path) -> dict[str, int]:
        """Finished units on the disk, by kind; ValueError if one of them is damaged."""

    @abstractmethod
    def result(self, folder: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
        """What must have the same bytes, and numbers that must agree within 1e-9."""


class Collection(Case):
    """A collection into a store, 40 batches."""

    name = "collection"

    def run(self, folder: Path, log: Path) -> None:
        """As in `Case`."""
        loader = photographs(IMAGES, CLASSES, BATCH)
        NotingExplainer(log).collect(loader, "label", 5, 0, False, PairStore(folder))

    def units(self, folder: Path) -> dict[str, int]:
        """As in `Case`."""
        store = PairStore(folder)
        if damaged := store.damaged():
            raise ValueError(f"damaged: {damaged}")
        return {"batch": len(store)}

    def result(self, folder: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
        """As in `Case`."""
        return {file.name: file.read_bytes() for file in folder.glob("[!.]*")}, {}


class ManyClasses(Case):
    """40 batches and five classes with a fit each."""

    name = "many classes"

    def run(self, folder: Path, log: Path) -> None:
        """As in `Case`."""
        NotingDRSA.log = log
        solver = NotingDRSA(2, random_state=0, n_init=2)
        loader = photographs(IMAGES, CLASSES, BATCH)
        with joined_ranks(timedelta(seconds=120)) as ranks:
            explainer = NotingExplainer(log)
            fit_many(explainer, loader, folder, solver, positions=5, progress=False, ranks=ranks)

    def units(self, folder: Path) -> dict[str, int]:
        """As in `Case`."""
        for store in (PairStore(place) for place in (folder / "pairs").glob("*")):
            if damaged := store.damaged():
                raise ValueError(f"damaged: {damaged}")
        for file in (folder / "batches").glob("*.json"):
            json.loads(file.read_text())
        results = [Subspaces.load(file) for file in (folder / "subspaces").glob("*.safetensors")]
        return {"batch": len(list((folder / "batches").glob("*.json"))), "fit": len(results)}

    def result(self, folder: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
        """As in `Case`."""
        found = [f for name in ("pairs", "batches") for f in (folder / name).rglob("*.*") if f.is_file()]
        same = {str(file.relative_to(folder)): file.read_bytes() for file in found}
        files = (folder / "subspaces").glob("*.safetensors")
        return same, {file.name: Subspaces.load(file).basis.tolist() for file in files}


class ManyClassesOnTwoRanks(ManyClasses):
    """The same, shared by two ranks; resumed by two."""

    name = "many classes, 2 ranks"
    n_ranks = 2


class NotingBackend(CountingBackend):
    """Collects into the store that it is given, and notes batches and maps."""

    def __init__(self, model: Model, log: Path) -> None:
        super().__init__(model)
        self.log = log

    def collect(self, batches: Any, target: Any, positions: Any, seed: Any, store: Any) -> Pairs:
        """As in `drsa_audit.Backend`."""

        def context(inputs: Any, chosen: Any) -> Any:
            note(self.log, "batch")
            return self._context(inputs, chosen)[:2]

        origin: dict[str, Any] = {"backend": "test", "method": "gradient", "layer": "features", "model": None}
        return collect_pairs(
            context, batches, target, positions=positions, random_state=seed, store=store, **origin
        )

    def explain(self, inputs: Any, target: Any, subspaces: Any) -> Any:
        """As in `drsa_audit.Backend`; the first of two calls a job is noted."""
        if self.explained % 2 == 0:
            note(self.log, "job")
        return super().explain(inputs, target, subspaces)


class Benchmark(Case):
    """An experiment of `drsa_audit`: two classes, four jobs each."""

    name = "benchmark"

    def __init__(self, data: Path) -> None:
        self.data = data

    def run(self, folder: Path, log: Path) -> None:
        """As in `Case`."""
        torch.manual_seed(0)
        model = Model().eval()
        jobs = [learned_job("drsa", 2, 0), learned_job("dsa", 2, 0), single_job("prca", [1, 2], 0)]
        jobs.append(single_job("pca", [1], 0))
        experiment = experiment_on(folder, model)
        experiment.say = lambda _: None
        experiment.run("main", "features", NotingBackend(model, log), find_classes(self.data), jobs)

    def units(self, folder: Path) -> dict[str, int]:
        """As in `Case`."""
        batches = 0
        for place in (folder / "pairs").glob("*/*"):
            store = PairStore(place)
            if damaged := store.damaged():
                raise ValueError(f"damaged: {damaged}")
            batches += len(store)
        files = list((folder / "results").rglob("*.json"))
        for file in files:
            json.loads(file.read_text())
        return {"batch": batches, "job": len(files)}

    def result(self, folder: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
        """As in `Case`."""
        pairs = {
            str(f.relative_to(folder)): f.read_bytes() for f in (folder / "pairs").rglob("0*.safetensors")
        }
        scores = {
            f"{file.relative_to(folder)} {i} {key}": value
            for file in (folder / "results").rglob("*.json")
            for i, record in enumerate(json.loads(file.read_text()))
            for key, value in record.items()
            if not key.endswith("seconds")
        }
        return pairs, scores


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
    names = ("collection", "many classes", "many classes, 2 ranks", "benchmark")
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
