"""DRSA's default solver against the paper's loop, from the same start, and PRCA against one eigh.

    python tests/benchmarks/bench_drsa.py --pairs pairs.npz            # arrays a and c, (N, D)
    python tests/benchmarks/bench_drsa.py --synthetic 2000 128 --iterations 500

The yardstick is the objective that the paper's loop (gradient ascent, step 1, U (UᵀU)^-½) reaches in so many
iterations; timed is how long each solver takes to get there. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from drsa_core import PRCA
from drsa_core.pairs import normalise
from drsa_core.solvers.drsa import block_sizes
from drsa_core.solvers.objective import Objective
from drsa_core.solvers.paper_loop import Result, gradient_ascent
from drsa_core.solvers.quasi_newton import quasi_newton
from drsa_core.solvers.search import random_orthogonal
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
    a = torch.einsum("dnk,nk->nd", basis[:, which], inside)
    a = (a + 0.3 * torch.randn(n_samples, n_features, generator=generator) * a.std()).clamp(min=0)
    c = a * torch.rand(n_samples, n_features, generator=generator)
    return a, c + 0.3 * c.std() * torch.randn(n_samples, n_features, generator=generator)


def compare(a: Tensor, c: Tensor, n_subspaces: int, seed: int, iterations: int) -> None:
    """Time to the objective of the paper's loop."""
    objective = Objective(normalise(a), normalise(c), block_sizes(a.shape[1], n_subspaces, None), 0.5)
    start = random_orthogonal(a.shape[1], seed).to(a)
    timed(gradient_ascent, objective, start, 2)  # warm the caches
    fast, fast_seconds = timed(quasi_newton, objective, start, 500)
    paper, paper_seconds = timed(gradient_ascent, objective, start, iterations)
    print(
        f"\nN = {len(a)}, D = {a.shape[1]}, K = {n_subspaces}, start {seed}, "
        f"{torch.get_num_threads()} threads\n"
    )
    print("| objective | paper's loop | default solver | faster |")
    print("|---|---|---|---|")
    for fraction in (0.95, 0.99, 1.0):
        goal = fraction * paper.objective
        row = [f"{goal:.4f} ({fraction:.0%} of the paper's after {iterations})"]
        times = []
        for result, seconds in ((paper, paper_seconds), (fast, fast_seconds)):
            step = next((i for i, value in enumerate(result.history) if value >= goal), None)
            times.append(None if step is None else seconds[step])
            row.append("not reached" if step is None else f"{seconds[step]:.2f} s, {step} iterations")
        row.append(f"{times[0] / times[1]:.0f}×" if times[0] and times[1] else "–")
        print("| " + " | ".join(row) + " |")
    print(f"\nfinal objective: paper {paper.objective:.4f}, default {fast.objective:.4f} ({fast.reason})")


def growth(n_subspaces: int) -> None:
    """Milliseconds per iteration against N, D and K."""
    print("\n| N | D | K | default solver, ms per iteration | paper's loop, ms per iteration |")
    print("|---|---|---|---|---|")
    for n, d, k in [(2500, 256, 4), (5000, 256, 4), (10_000, 256, 4), (5000, 128, 4), (5000, 512, 4),
                    (5000, 256, 2), (5000, 256, 8), (5000, 256, 16)]:  # fmt: skip
        a, c = synthetic(n, d)
        objective = Objective(normalise(a), normalise(c), block_sizes(d, k, None), 0.5)
        start = random_orthogonal(d, 0).float()
        fast, fast_seconds = timed(quasi_newton, objective, start, 60)
        paper, paper_seconds = timed(gradient_ascent, objective, start, 20)
        fast_ms = 1e3 * fast_seconds[-1] / fast.n_iter
        print(f"| {n} | {d} | {k} | {fast_ms:.1f} | {1e3 * paper_seconds[-1] / paper.n_iter:.1f} |")


def prca(a: Tensor, c: Tensor) -> None:
    """PRCA against one eigenproblem of the same size."""
    matrix = (a.double().T @ c.double()) / len(a)
    matrix = matrix + matrix.T
    times: dict[str, float] = {}
    for name, run in {
        "eigh": lambda: torch.linalg.eigh(matrix),
        "PRCA": lambda: PRCA().fit(a, c).components_,
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
    parser.add_argument("--pairs", type=Path, help="npz file with arrays a and c, shape (N, D)")
    parser.add_argument("--synthetic", type=int, nargs=2, metavar=("N", "D"), help="made-up pairs instead")
    parser.add_argument("--subspaces", type=int, default=4, help="K (default: %(default)s)")
    parser.add_argument(
        "--iterations", type=int, default=5000, help="of the paper's loop (default: %(default)s)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="random starts (default: 1)")
    parser.add_argument("--growth", action="store_true", help="also the cost against N, D and K")
    options = parser.parse_args()
    if options.pairs:
        with np.load(options.pairs) as arrays:
            a, c = (torch.as_tensor(arrays[name]).float() for name in ("a", "c"))
    else:
        a, c = synthetic(*(options.synthetic or (2000, 128)))
    for seed in options.seeds:
        compare(a, c, options.subspaces, seed, options.iterations)
    prca(a, c)
    if options.growth:
        growth(options.subspaces)


if __name__ == "__main__":
    main()
