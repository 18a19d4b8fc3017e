"""DRSA's default solver against the paper's loop, by start, K, D and N; PRCA against one eigh.

    python tests/benchmarks/bench_drsa.py --pairs one.npz two.npz --seeds 0 1 2 --goals goals.json
    python tests/benchmarks/bench_drsa.py --pairs one.npz two.npz --goals goals.json --measure 30
    python tests/benchmarks/bench_drsa.py --synthetic 2000 128 --iterations 500
    python tests/benchmarks/bench_drsa.py --synthetic 10000 512 --sizes

Files of pairs hold arrays a and c, (N, D). `--collect` makes one from a folder of photographs of one class:

    … --collect load.py:VGG16Pets vgg16_pets.safetensors features.22 train/235_german_shepherd pets_235.npz

(200 positions of each photograph, LRP with the rules that suit the network, seed 0.)

The yardstick is the paper's loop: gradient ascent with step 1 and U (UᵀU)^-½, 5 000 iterations from a random
start. Timed is the default solver with the same seed and all of its reduced starts: how long it takes to have
a basis with the loop's objective, and how long the whole fit takes. One loop takes ten minutes and more. So
its objectives are kept in the file of `--goals`, which a run without `--measure` fills; with `--measure` only
so many iterations are run, for their time, and 5 000 times that is what the solver is held against. Run it on
an idle machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from drsa_core import PRCA
from drsa_core.objective import Objective
from drsa_core.optimizers import Budget, Result, coarse_to_fine, gradient_ascent
from drsa_core.pairs import normalise
from drsa_core.prca import block_sizes, random_orthogonal
from torch import Tensor


def timed(
    solver: Callable[..., Result], objective: Objective, start: Tensor, iterations: int
) -> tuple[Result, list[float]]:
    """Result and the seconds after each iteration."""
    seconds = [0.0]
    begin = time.perf_counter()
    result = solver(objective, start, iterations, 0.0, lambda _: seconds.append(time.perf_counter() - begin))
    return result, seconds


def synthetic(n_samples: int, n_features: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sparse activations in four planted subspaces, with contexts that agree in part."""
    generator = torch.Generator().manual_seed(seed)
    basis = random_orthogonal(n_features, seed).float().view(n_features, 4, -1)
    which = torch.randint(4, (n_samples,), generator=generator)
    inside = torch.randn(n_samples, basis.shape[2], generator=generator)
    a = torch.empty(n_samples, n_features)
    for k in range(4):
        a[which == k] = inside[which == k] @ basis[:, k].T
    a = (a + 0.3 * torch.randn(n_samples, n_features, generator=generator) * a.std()).clamp(min=0)
    c = a * torch.rand(n_samples, n_features, generator=generator)
    return a, c + 0.3 * c.std() * torch.randn(n_samples, n_features, generator=generator)


class Goals:
    """Objectives of the paper's loop, in a JSON file: {"name K=4 seed 0, 5000 iterations": objective}."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.values: dict[str, float] = json.loads(file.read_text()) if file and file.exists() else {}

    def add(self, key: str, value: float) -> None:
        """Keep one, on disk at once."""
        self.values[key] = value
        if self.file is not None:
            self.file.write_text(json.dumps(self.values, indent=1) + "\n")


def objective_of(a: Tensor, c: Tensor, n_subspaces: int) -> Objective:
    """The paper's objective with q = 0.5 and K equal blocks."""
    return Objective(normalise(a), normalise(c), block_sizes(a.shape[1], n_subspaces, None), 0.5)


def loop_seconds(objective: Objective, start: Tensor, iterations: int) -> tuple[float, Result]:
    """Seconds per iteration of the paper's loop, once it is warm, and where it got."""
    timed(gradient_ascent, objective, start, 1)
    result, seconds = timed(gradient_ascent, objective, start, iterations)
    return seconds[-1] / result.n_iter, result


def default_fit(objective: Objective, seed: int) -> tuple[list[tuple[float, float]], float, float]:
    """J and the seconds after each iteration in full, the objective, and the seconds of it all."""
    reached: list[tuple[float, float]] = []
    begin = time.perf_counter()

    def note(value: float) -> None:
        reached.append((value, time.perf_counter() - begin))

    runs, _ = coarse_to_fine(objective, None, Budget(500, 3e-6, np.random.default_rng(seed), note))
    return reached, max(result.objective for result in runs), time.perf_counter() - begin


def compare(sets: dict[str, tuple[Tensor, Tensor]], options: argparse.Namespace) -> None:
    """Time to the objective of the paper's loop, and of a whole default fit, for each set and start."""
    goals = Goals(options.goals)
    how = f"5 000 × the mean of {options.measure}" if options.measure else "measured"
    print(f"\n{torch.get_num_threads()} threads, {options.iterations} iterations of the loop ({how})\n")
    print("| pairs | N | D | K | start | loop, s | its J | to that J, s | × | whole fit, s | × | J |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for name, (a, c) in sets.items():
        objective, found = objective_of(a, c, options.subspaces), []
        keys = [
            f"{name} N={len(a)} K={options.subspaces} seed {seed}, {options.iterations} iterations"
            for seed in options.seeds
        ]
        for key, seed in zip(keys, options.seeds, strict=True):
            start = random_orthogonal(a.shape[1], seed).to(a)
            each, loop = loop_seconds(objective, start, options.measure or options.iterations)
            whole_loop = each * options.iterations
            if not options.measure:
                goals.add(key, loop.objective)
            goal = goals.values.get(key)
            iterations, best, seconds = default_fit(objective, seed)
            found.append(best)
            reached = None
            if goal is not None:
                reached = next((s for value, s in iterations if value >= goal * (1 - 1e-6)), None)
            to_goal = ("–", "–") if reached is None else (f"{reached:.2f}", f"{whole_loop / reached:.0f}")
            print(
                f"| {name} | {len(a)} | {a.shape[1]} | {options.subspaces} | {seed} | {whole_loop:.0f} | "
                f"{'–' if goal is None else f'{goal:.4f}'} | {to_goal[0]} | {to_goal[1]} | {seconds:.1f} | "
                f"{whole_loop / seconds:.0f} | {best:.4f} |",
                flush=True,
            )
        known = [goals.values[key] for key in keys if key in goals.values]
        if known:
            print(
                f"\n{name}: best of {len(known)} loops {max(known):.4f}, fits from {min(found):.4f} to "
                f"{max(found):.4f}\n"
            )


def by_size(sets: dict[str, tuple[Tensor, Tensor]], options: argparse.Namespace) -> None:
    """A whole default fit against one loop for other K and N, on parts of the first set, and for larger D."""
    name, (a, c) = next(iter(sets.items()))
    cases = [(name, a, c, k) for k in (2, 8, 16)]
    cases += [(name, a[:: len(a) // n], c[:: len(a) // n], 4) for n in (len(a) // 4, len(a) // 2)]
    cases += [(name, a[:240], c[:240], 4)]
    for n, d in options.wide or []:
        cases.append(("synthetic", *synthetic(n, d), 4))
    print("\n| pairs | N | D | K | loop, s | whole fit, s | × | J |\n|---|---|---|---|---|---|---|---|")
    for label, activations, contexts, k in cases:
        objective = objective_of(activations, contexts, k)
        n, d = activations.shape
        start = random_orthogonal(d, 0).to(activations)
        each, _ = loop_seconds(objective, start, 3 if d > 1000 else 10)
        _, best, seconds = default_fit(objective, 0)
        whole = each * options.iterations
        print(
            f"| {label} | {n} | {d} | {k} | {whole:.0f} | {seconds:.1f} | {whole / seconds:.0f} | "
            f"{best:.4f} |",
            flush=True,
        )


def collect_pairs(network: str, weights: str, layer: str, folder: str, out: str) -> None:
    """200 pairs of each photograph of a folder <class index>_<name>, with Zennit."""
    from drsa_audit import load_network
    from drsa_audit.images import photo_files

    from zennit_drsa import collect

    loaded = load_network(network, weights)
    images = loaded.load(photo_files(Path(folder)))
    target = loaded.output_of(int(Path(folder).name.split("_")[0]))
    a, c = collect(
        loaded.model, loaded.composite(layer), layer, images.split(10), target, positions=200, random_state=0
    )
    np.savez(out, a=a.numpy(), c=c.numpy())
    print(f"{len(a)} pairs in {a.shape[1]} dimensions from {len(images)} photographs")


def prca(a: Tensor, c: Tensor) -> None:
    """PRCA against one eigenproblem of the same size."""
    matrix = (a.double().T @ c.double()) / len(a)
    matrix = matrix + matrix.T
    times: dict[str, float] = {}
    for name, run in {
        "eigh": lambda: torch.linalg.eigh(matrix),
        "PRCA": lambda: PRCA().fit(a, c).basis_,
    }.items():
        run()
        begin = time.perf_counter()
        for _ in range(5):
            run()
        times[name] = (time.perf_counter() - begin) / 5
    ratio = times["PRCA"] / times["eigh"]
    print(
        f"\nPRCA {1e3 * times['PRCA']:.0f} ms, eigh of its matrix {1e3 * times['eigh']:.0f} ms: {ratio:.1f}×"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=Path, nargs="+", default=[], help="npz files with a and c, (N, D)")
    parser.add_argument("--synthetic", type=int, nargs=2, metavar=("N", "D"), help="made-up pairs as well")
    parser.add_argument(
        "--collect", nargs=5, metavar=("NETWORK", "WEIGHTS", "LAYER", "FOLDER", "OUT"), help="make a file"
    )
    parser.add_argument(
        "--take", type=int, metavar="N", help="only so many pairs of each file, evenly spread"
    )
    parser.add_argument("--subspaces", type=int, default=4, help="K (default: %(default)s)")
    parser.add_argument(
        "--iterations", type=int, default=5000, help="of the paper's loop (default: %(default)s)"
    )
    parser.add_argument(
        "--measure", type=int, help="run only so many iterations of the loop, and extrapolate its time"
    )
    parser.add_argument("--goals", type=Path, help="JSON file with objectives of the loop; see above")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="random starts (default: 0)")
    parser.add_argument("--sizes", action="store_true", help="also other K and N")
    parser.add_argument(
        "--wide", type=int, nargs=2, action="append", metavar=("N", "D"), help="synthetic rows of --sizes"
    )
    parser.add_argument("--only-sizes", action="store_true", help="--sizes without the first table")
    options = parser.parse_args()
    if options.collect:
        collect_pairs(*options.collect)
        return
    sets: dict[str, tuple[Tensor, Tensor]] = {}
    for file in options.pairs:
        with np.load(file) as arrays:
            a, c = (torch.as_tensor(arrays[name]).float() for name in ("a", "c"))
        every = max(1, len(a) // options.take) if options.take else 1
        sets[file.stem] = (a[::every], c[::every])
    if options.synthetic or not sets:
        sets["synthetic"] = synthetic(*(options.synthetic or (2000, 128)))
    if not options.only_sizes:
        compare(sets, options)
        prca(*next(iter(sets.values())))
    if options.sizes or options.only_sizes:
        by_size(sets, options)


if __name__ == "__main__":
    main()
