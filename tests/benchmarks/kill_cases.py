"""Work that can be resumed, for `kills.py`: every unit is noted when it begins."""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "shared"), str(ROOT / "examples")]

from drsa_audit import steps  # noqa: E402
from drsa_audit.work import Work  # noqa: E402
from drsa_core import DRSA, Pairs, PairStore, Subspaces, fit_many, joined_ranks  # noqa: E402
from drsa_core.collection import collect_pairs  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from study.classes import find_classes  # noqa: E402
from study.jobs import learned_job, single_job  # noqa: E402

from tests.command.running import succeeded  # noqa: E402
from tests.command.tiny import INPUT, MODEL, pictures  # noqa: E402
from tests.ranks.work import GradientTimesInput, photographs  # noqa: E402
from tests.study.test_experiment import CountingBackend, Model, experiment_on  # noqa: E402

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
        """As in `study.backends.Backend`."""

        def context(inputs: Any, chosen: Any) -> Any:
            note(self.log, "batch")
            return self._context(inputs, chosen)[:2]

        origin: dict[str, Any] = {"backend": "test", "method": "gradient", "layer": "features", "model": None}
        return collect_pairs(
            context, batches, target, positions=positions, random_state=seed, store=store, **origin
        )

    def explain(self, inputs: Any, target: Any, subspaces: Any) -> Any:
        """As in `study.backends.Backend`; the first of two calls a job is noted."""
        if self.explained % 2 == 0:
            note(self.log, "job")
        return super().explain(inputs, target, subspaces)


class Benchmark(Case):
    """An experiment of `examples/study`: two classes, four jobs each."""

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


class Audit(Case):
    """`drsa audit` with flipping and ablation, then `drsa report` six times, each with another name."""

    name = "audit and report"

    def __init__(self, data: Path) -> None:
        self.train, self.test = pictures(data / "train", 8), pictures(data / "test", 6, seed=1)

    def run(self, folder: Path, log: Path) -> None:
        """As in `Case`."""
        # The process was forked for this run and ends with it: nothing has to be put back.
        places: list[tuple[Any, str, str]] = [
            (steps, "explain_batch", "map"),
            (steps, "patch_flipping", "flipping"),
            (steps, "_learn", "fit"),
        ]
        for module, name, kind in places:
            setattr(module, name, noting(log, kind, getattr(module, name)))
        remembered, patched = Work.remembered, vars(steps)["Work"]

        def noting_steps(work: Work, name: str, key: Any, make: Callable[[], Any]) -> Any:
            return remembered(work, name, key, noting(log, "step", make))

        patched.remembered = noting_steps
        out, names = folder / "report.html", folder.parent / "names.json"
        words = ("--train", self.train, "--test", self.test, "--target", "blobs", "--out", out)
        succeeded("audit", MODEL, *INPUT, *words, "--layer", "4", "--subspaces", 2, "--batch-size", 2)
        for i in range(6):
            names.write_text(json.dumps({"S1": f"name {i}"} if i == 0 else {f"name {i - 1}": f"name {i}"}))
            succeeded("report", out.with_suffix(".drsa"), "--names", names, "--out", out)

    def units(self, folder: Path) -> dict[str, int]:
        """As in `Case`."""
        work, page = folder / "report.drsa", folder / "report.html"
        for place in work.glob("pairs-*"):
            if damaged := PairStore(place).damaged():
                raise ValueError(f"damaged: {damaged}")
        for file in work.glob("[!.]*.safetensors"):
            load_file(file)
        maps = [load_file(file) for file in work.glob("explained-*/[!.]*.safetensors")]
        written = [
            file.name.split("-")[0] for file in work.glob("[!.]*-*.json") if json.loads(file.read_text())
        ]
        if page.exists() and not page.read_text().rstrip().endswith("</html>"):
            raise ValueError(f"damaged: {page}")
        kinds = {"learned": "fit", "flipping": "flipping"}
        units = {"map": len(maps), "fit": 0, "flipping": 0, "step": 0}
        for name in written:
            units[kinds.get(name, "step")] += 1
        return units

    def result(self, folder: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
        """As in `Case`."""
        work = folder / "report.drsa"
        same = {f"{f.parent.name}/{f.name}": f.read_bytes() for f in work.glob("pairs-*/0*.safetensors")}
        numbers: dict[str, Any] = {
            f"{file.relative_to(work)} {key}": value.double().tolist()
            for file in work.rglob("[!.]*.safetensors")
            if "pairs" not in file.parent.name
            for key, value in load_file(file).items()
        }
        for file in work.glob("[!.]*-*.json"):
            numbers[file.name] = without_seconds(json.loads(file.read_text()))
        numbers["name 5 is on the page"] = "name 5" in (folder / "report.html").read_text()
        return same, numbers


def noting(log: Path, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, noted whenever it begins."""

    def noted_function(*args: Any, **keywords: Any) -> Any:
        note(log, what)
        return function(*args, **keywords)

    return noted_function


def without_seconds(value: Any) -> Any:
    """A JSON value without its timings, which differ from run to run."""
    if isinstance(value, dict):
        return {key: without_seconds(part) for key, part in value.items() if not key.endswith("seconds")}
    return [without_seconds(part) for part in value] if isinstance(value, list) else value
