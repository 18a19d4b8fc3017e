"""Ranks, many classes and streams: time and memory.

    python tests/benchmarks/bench_scale.py ranks                # one fit on 1, 2 and 3 gloo ranks
    python tests/benchmarks/bench_scale.py classes              # 20 classes, as one job and one by one
    python tests/benchmarks/bench_scale.py streams              # pairs in memory, and read from files
    python tests/benchmarks/bench_scale.py constants            # what docs/howto/scale.md extrapolates from

Every line of a table is measured in processes of its own, with one thread each; memory is the peak resident
set of a process (VmHWM, Linux). Seconds exclude the imports. Random pairs with four planted concepts. Ranks
that share two cores cannot be faster than two.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[2] / "shared")]

from drsa_core import DRSA, PRCA, Pairs, PairShards, PairStore, Subspaces, fit_many, joined_ranks  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from tests.ranks.launching import finish, start_ranks  # noqa: E402

#: 20 classes of 50 images; 128 features at the layer.
N_CLASSES, IMAGES_PER_CLASS, SIZE, LAYER = 20, 50, 64, "features.4"


def planted(n_samples: int, n_features: int) -> Pairs:
    """Four concepts in directions whose energy falls as that of activations does, float32."""
    generator = torch.Generator().manual_seed(0)
    energy = torch.linspace(1, n_features, n_features) ** -0.5
    concept = torch.randint(0, 4, (n_samples,), generator=generator)
    mask = torch.full((n_samples, n_features), 0.1)
    for k in range(4):
        mask[concept == k, k::4] = 1
    code = torch.randn(n_samples, n_features, generator=generator).abs() * energy * mask
    noise = torch.randn(n_samples, n_features, generator=generator) * energy
    return Pairs(code, code + 0.3 * noise)


def report(**numbers: Any) -> None:
    """Say what this process found, with its peak memory."""
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    print(json.dumps({**numbers, "MB": peak}), flush=True)


# ------------------------------------------------------------------ what a process does


def fit_in_memory(n_samples: int, n_features: int, solver: Any) -> None:
    """One process with all pairs."""
    pairs = planted(n_samples, n_features)
    begin = time.perf_counter()
    solver.fit(pairs)
    report(seconds=time.perf_counter() - begin, objective=getattr(solver, "objective_", None))


def fit_on_ranks(n_samples: int, n_features: int, solver: Any) -> None:
    """A rank with its part of the pairs."""
    with joined_ranks() as ranks:
        whole = planted(n_samples, n_features)
        rows = ranks.share(n_samples)
        pairs = Pairs(whole.a[rows.start : rows.stop], whole.c[rows.start : rows.stop])
        del whole
        shards = PairShards(pairs, ranks)
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the fit, not that of making all pairs
        ranks.barrier("the start")
        begin = time.perf_counter()
        solver.fit(shards)
        ranks.barrier("the end")
        report(seconds=time.perf_counter() - begin, objective=getattr(solver, "objective_", None))


def fit_files(folder: str, memory: int, solver: Any) -> None:
    """One process that reads its pairs from a store; `memory` 0 loads all."""
    store = PairStore(folder)
    begin = time.perf_counter()
    solver.fit(store.shards(memory=memory) if memory else store.load())
    report(seconds=time.perf_counter() - begin, objective=getattr(solver, "objective_", None))


def network() -> Any:
    """LRP on a VGG11 without training; imported here, since the other tables need no Zennit."""
    from torchvision.models import vgg11
    from zennit.attribution import Gradient

    from zennit_drsa import DisentangledAttributor, VGGGamma

    torch.manual_seed(0)
    model = vgg11(num_classes=N_CLASSES)
    model.eval()
    return DisentangledAttributor(Gradient(model, VGGGamma()), LAYER)


def labelled() -> DataLoader[Any]:
    """Random images, class after class."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N_CLASSES * IMAGES_PER_CLASS, 3, SIZE, SIZE, generator=generator)
    labels = torch.arange(N_CLASSES).repeat_interleave(IMAGES_PER_CLASS)
    return DataLoader(TensorDataset(x, labels), batch_size=25)


def one_job(folder: str) -> None:
    """All classes in one job, on as many ranks as there are."""
    explainer, loader = network(), labelled()
    begin = time.perf_counter()
    index = fit_many(explainer, loader, folder, DRSA(4, random_state=0), progress=False)
    report(seconds=time.perf_counter() - begin, classes=len(index.classes))


def one_after_the_other(folder: str, label: int) -> None:
    """One class as a program of its own: its images, `fit`, `save`."""
    explainer = network()
    x, labels = labelled().dataset.tensors  # type: ignore[attr-defined]
    begin = time.perf_counter()
    images = list(x[labels == label].split(25))
    store = PairStore(Path(folder) / "pairs" / str(label))
    explainer.fit(images, label, DRSA(4, random_state=0), random_state=0, progress=False, store=store)
    assert explainer.subspaces is not None
    explainer.subspaces.save(Path(folder) / f"{label}.safetensors")
    report(seconds=time.perf_counter() - begin)


def constants(n_features: int) -> None:
    """Seconds of the parts of a job, one thread."""
    explainer, loader = network(), labelled()
    x, labels = next(iter(loader))
    seconds: dict[str, float] = {}

    def timed(name: str, run: Callable[[], object], repeats: int = 3) -> None:
        run()
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        seconds[name] = (time.perf_counter() - begin) / repeats

    timed("forward of a batch", lambda: explainer._known_model()(x).detach())
    timed("context of a batch", lambda: explainer.context(x, labels.tolist()))
    pairs = planted(1000, n_features)
    with tempfile.TemporaryDirectory() as folder:
        timed("file of 1 000 pairs, written", lambda: pairs.save(Path(folder) / "p.safetensors"))
        timed("file of 1 000 pairs, read", lambda: Pairs.load(Path(folder) / "p.safetensors"))
    a = torch.randn(n_features, n_features)
    timed("product D×D×D", lambda: a @ a)
    solver = DRSA(4, random_state=0)
    begin = time.perf_counter()
    solver.fit(pairs)
    seconds["DRSA, 1 000 pairs"] = time.perf_counter() - begin
    report(seconds=seconds, iterations=solver.n_iter_, n_features=n_features)


SOLVERS: dict[str, Callable[[], Any]] = {
    "drsa": lambda: DRSA(4, random_state=0),
    "prca": lambda: PRCA(4),
    "drsa, 15 iterations": lambda: DRSA(4, random_state=0, n_init=1, max_iter=15, tol=0),
}


# ------------------------------------------------------------------ tables


def measured(size: int, *arguments: object) -> list[dict[str, Any]]:
    """What each of the ranks that run `bench_scale.py --do arguments…` reports."""
    command = [str(Path(__file__).resolve()), "--do", *map(str, arguments)]
    processes = start_ranks(size, command)
    outputs = []
    for process in processes:
        out, errors = process.communicate()
        if process.returncode:
            finish(processes, 30)
            raise RuntimeError(errors)
        outputs.append(json.loads(out.splitlines()[-1]))
    return outputs


def idle_memory() -> float:
    """Peak memory of a process that only imports."""
    return float(measured(1, "nothing")[0]["MB"])


def ranks_table(n_samples: int, n_features: int) -> None:
    print(f"N = {n_samples}, D = {n_features}, K = 4; a process that only imports: {idle_memory():.0f} MB\n")
    print("| solver | ranks | seconds | MB per rank, at most | objective |\n|---|---|---|---|---|")
    for name in ("drsa", "prca"):
        for size in (1, 2, 3):
            found = measured(size, "fit_on_ranks", n_samples, n_features, name)
            seconds, peak = max(f["seconds"] for f in found), max(f["MB"] for f in found)
            objective = found[0]["objective"]
            shown = "" if objective is None else f"{objective:.5f}"
            print(f"| {name.upper()} | {size} | {seconds:.1f} | {peak:.0f} | {shown} |", flush=True)


def classes_table(one_by_one: bool) -> None:
    print(f"{N_CLASSES} classes × {IMAGES_PER_CLASS} images, VGG11, LRP, DRSA(4) at D = 128\n")
    print("| how | processes | seconds, imports included | of these imports and start | MB, at most |")
    print("|---|---|---|---|---|")

    def row(how: str, processes: int, whole: float, work: float, peak: float) -> None:
        print(f"| {how} | {processes} | {whole:.1f} | {whole - work:.1f} | {peak:.0f} |", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        if one_by_one:
            begin = time.perf_counter()
            found = [measured(1, "one_after_the_other", folder, label)[0] for label in range(N_CLASSES)]
            whole = time.perf_counter() - begin
            peak = max(f["MB"] for f in found)
            row("one class at a time", N_CLASSES, whole, sum(f["seconds"] for f in found), peak)
        for size in (1, 2):
            begin = time.perf_counter()
            found = measured(size, "one_job", Path(folder) / f"job{size}")
            whole = time.perf_counter() - begin
            row("one job", size, whole, max(f["seconds"] for f in found), max(f["MB"] for f in found))
        same = [
            torch.equal(
                *(Subspaces.load(f"{folder}/job{n}/subspaces/{label}.safetensors").basis for n in (1, 2))
            )
            for label in range(N_CLASSES)
        ]
        print(f"\nclasses whose subspaces have the same bits on 1 and 2 ranks: {sum(same)} of {N_CLASSES}")


def streams_table(n_samples: int, n_features: int) -> None:
    size = 2 * n_samples * n_features * 4 / 2**20
    print(
        f"N = {n_samples}, D = {n_features}: {size:.0f} MB of pairs; imports alone {idle_memory():.0f} MB\n"
    )
    print("| solver | pairs | seconds | MB | objective |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        store = PairStore(folder)
        whole = planted(n_samples, n_features)
        for begin in range(0, n_samples, 1000):
            store.append(Pairs(whole.a[begin : begin + 1000], whole.c[begin : begin + 1000]))
        del whole
        for name in ("drsa, 15 iterations", "prca"):
            for memory in (0, 2**28, 2**26):
                (found,) = measured(1, "fit_files", folder, memory, name)
                how = f"from files, {memory >> 20} MB" if memory else "in memory"
                shown = "" if found["objective"] is None else f"{found['objective']:.5f}"
                print(
                    f"| {name.upper()} | {how} | {found['seconds']:.1f} | {found['MB']:.0f} | {shown} |",
                    flush=True,
                )


def do(what: str, arguments: list[str]) -> None:
    """The part of a process that was started for a table."""
    torch.set_num_threads(1)
    if what == "nothing":
        report()
    elif what == "fit_on_ranks":
        fit_on_ranks(int(arguments[0]), int(arguments[1]), SOLVERS[arguments[2]]())
    elif what == "fit_files":
        fit_files(arguments[0], int(arguments[1]), SOLVERS[arguments[2]]())
    elif what == "one_job":
        one_job(arguments[0])
    elif what == "one_after_the_other":
        one_after_the_other(arguments[0], int(arguments[1]))
    elif what == "constants":
        constants(int(arguments[0]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="?", choices=("ranks", "classes", "streams", "constants"))
    parser.add_argument("--samples", type=int, help="pairs (default: 10 000; streams: 30 000)")
    parser.add_argument("--features", type=int, default=512, help="D (default: 512)")
    parser.add_argument("--jobs-only", action="store_true", help="classes: without the one-by-one row")
    parser.add_argument("--do", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.do:
        do(args.do[0], args.do[1:])
    elif args.table == "ranks":
        ranks_table(args.samples or 10_000, args.features)
    elif args.table == "classes":
        classes_table(not args.jobs_only)
    elif args.table == "streams":
        streams_table(args.samples or 30_000, args.features)
    elif args.table == "constants":
        for key, value in measured(1, "constants", args.features)[0].items():
            print(f"{key}: {value}")
    else:
        parser.error("which table?")


if __name__ == "__main__":
    main()
