"""Does `choose_k` find the number of planted concepts, and none where contexts are shuffled?

Networks are trained on scenes with 3 to 6 planted patterns (`examples/known_concepts.py`), one for each seed,
and their pairs are kept in --cache. The criterion of `choose_k` was fixed on seeds 100 to 102; the table
is meant for others.

    python tests/benchmarks/bench_choose_k.py --cache DIR --seeds 0 1 2 3 4 5 6 7 8 9
    python tests/benchmarks/bench_choose_k.py --cache DIR --seeds 0 1 2 3 4 5 6 7 8 9 --planted 4 --shuffled
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from drsa_core import Pairs, choose_k
from drsa_core.solvers.resampling import with_shuffled_contexts

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


def planted_pairs(planted: int, seed: int, cache: Path) -> Pairs:
    """Pairs of a class with so many planted patterns, of a network trained with that seed."""
    file = cache / f"planted{planted}_seed{seed}.safetensors"
    if not file.exists():
        import known_concepts
        import torch
        from drsa_core.synthetic import PlantedConcepts

        from zennit_drsa import collect

        # Six patterns for three or four, eight for more: with all but one shown, a network would look for
        # the one that is missing.
        task = PlantedConcepts((1.0,) * (6 if planted < 5 else 8), n_shown=planted)
        model, accuracy = known_concepts.train(task, seed, "mean", 250)
        print(f"trained for {planted} concepts, seed {seed}: accuracy {accuracy:.3f}", file=sys.stderr)
        label = 3 * seed % len(task.classes)
        scenes = task.sample(200, torch.Generator().manual_seed(1000 + seed), label)
        pairs = collect(
            model,
            known_concepts.composite(),
            known_concepts.LAYER,
            scenes.images.split(100),
            label,
            random_state=seed,
            progress=False,
        )
        cache.mkdir(parents=True, exist_ok=True)
        pairs.save(file)
    return Pairs.load(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(tempfile.gettempdir()) / "drsa_planted"
    parser.add_argument("--planted", type=int, nargs="+", default=[3, 4, 5, 6], help="default: 3 4 5 6")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)), help="default: 0 to 9")
    parser.add_argument("--largest", type=int, default=8, help="largest K to try (default: %(default)s)")
    parser.add_argument("--bootstraps", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--shuffled", action="store_true", help="shuffle contexts: the answer is then none")
    parser.add_argument("--cache", type=Path, default=default, help="for pairs (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="print the table of every choice")
    options = parser.parse_args()

    chosen: dict[int, list[int | None]] = {}
    for seed in options.seeds:
        for planted in options.planted:
            pairs = planted_pairs(planted, seed, options.cache)
            if options.shuffled:
                pairs = with_shuffled_contexts(pairs, np.random.default_rng(10_000 + seed))
            begin = time.perf_counter()
            choice = choose_k(
                pairs, range(2, options.largest + 1), n_bootstraps=options.bootstraps, progress=False
            )
            chosen.setdefault(planted, []).append(choice.n_subspaces)
            seconds = (time.perf_counter() - begin) / len(choice.candidates)
            text = f"planted {planted}, seed {seed}: {choice.n_subspaces}; {seconds:.1f} s for each K"
            print(f"{text}\n{choice}" if options.verbose else text, flush=True)

    print("\n| planted | as it should be | chosen, with how often |\n|---|---|---|")
    for planted, found in chosen.items():
        truth = None if options.shuffled else planted
        counts = ", ".join(f"{k}: {n}" for k, n in sorted(Counter(map(str, found)).items()))
        print(f"| {planted} | {found.count(truth)} of {len(found)} | {counts} |")


if __name__ == "__main__":
    main()
