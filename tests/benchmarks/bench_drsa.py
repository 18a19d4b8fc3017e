"""DRSA's default solver against the paper's loop, and PRCA against one eigh.

    python tests/benchmarks/bench_drsa.py --pairs pairs.npz            # arrays a and c, (N, D)
    python tests/benchmarks/bench_drsa.py --pairs pairs.npz --measure 200 --history loop.npy
    python tests/benchmarks/bench_drsa.py --synthetic 2000 128 --iterations 500

The yardstick is the objective that the paper's loop (gradient ascent, step 1, U (UᵀU)^-½) reaches in so many
iterations from a random start of the paper's. Timed is how long the default solver takes, with the same seed
and all of its reduced starts, to get there, and to the end. `--measure` runs only some iterations of the loop
beside it: its time is then extrapolated, and the goal is that of a stored run or, failing that, of the
quasi-Newton solver from the same start. The output says which. Run it on an idle machine.
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
from drsa_core.solvers.paper_loop import Callback, Result, gradient_ascent
from drsa_core.solvers.quasi_newton import quasi_newton
from drsa_core.solvers.search import Search, Solve, random_orthogonal
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


class TimedSearch(Search):
    """A search that notes J and the seconds since `begin` after each iteration in full."""

    begin: float
    n_features: int
    reached: list[tuple[float, float]]

    def run(self, solve: Solve, objective: Objective, start: Tensor, title: str, tol: float) -> Result:
        """One run, watched if it is in full."""

        def watched(
            problem: Objective, basis: Tensor, max_iter: int, tol: float, callback: Callback
        ) -> Result:
            def note(value: float) -> None:
                if problem.n_features == self.n_features:
                    self.reached.append((value, time.perf_counter() - self.begin))
                callback(value)

            return solve(problem, basis, max_iter, tol, note)

        return super().run(watched, objective, start, title, tol)


def compare(a: Tensor, c: Tensor, n_subspaces: int, seed: int, options: argparse.Namespace) -> None:
    """Time to the objective of the paper's loop, and of a whole default fit."""
    objective = Objective(normalise(a), normalise(c), block_sizes(a.shape[1], n_subspaces, None), 0.5)
    start = random_orthogonal(a.shape[1], seed).to(a)
    timed(gradient_ascent, objective, start, 2)  # warm the caches
    loop, loop_seconds = timed(gradient_ascent, objective, start, options.measure or options.iterations)
    goal, source = loop.objective, f"{loop.n_iter} iterations of the loop"
    whole_loop = loop_seconds[-1] / loop.n_iter * options.iterations
    if options.history is not None:
        history = np.load(options.history)
        goal, source = float(history[-1]), f"a stored run of {len(history) - 1} iterations"
    elif options.measure:
        goal, source = timed(quasi_newton, objective, start, 500)[0].objective, "quasi-newton, same start"

    search = TimedSearch(500, 3e-6, np.random.default_rng(seed), "DRSA", False)
    search.reached, search.n_features, search.begin = [], a.shape[1], time.perf_counter()
    runs = search.coarse_to_fine(objective, None)
    best = max(result.objective for result in runs)
    fit_seconds = time.perf_counter() - search.begin
    to_goal = next((seconds for value, seconds in search.reached if value >= goal * (1 - 1e-6)), None)
    measured = "extrapolated" if options.measure else "measured"
    print(
        f"\nN = {len(a)}, D = {a.shape[1]}, K = {n_subspaces}, start {seed}, "
        f"{torch.get_num_threads()} threads\n"
    )
    print(f"loop, {options.iterations} iterations: {whole_loop:.1f} s ({measured} from {loop.n_iter})")
    print(f"goal {goal:.4f}, from {source}")
    reached = "not reached" if to_goal is None else f"{to_goal:.2f} s, {whole_loop / to_goal:.0f}×"
    print(f"default solver to the goal: {reached}")
    print(
        f"default fit, {len(search.reduced)} reduced starts, {len(runs)} in full: {fit_seconds:.2f} s, "
        f"{whole_loop / fit_seconds:.0f}×, objective {best:.4f}"
    )


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
    parser.add_argument(
        "--measure", type=int, help="run only so many iterations of the loop, and extrapolate its time"
    )
    parser.add_argument(
        "--history", type=Path, help="npy file with J along a loop run before: its last entry is the goal"
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
        compare(a, c, options.subspaces, seed, options)
    prca(a, c)
    if options.growth:
        growth(options.subspaces)


if __name__ == "__main__":
    main()
