"""Does `choose_k` find the number of planted concepts, and none where contexts are shuffled?

A network is trained for each seed to tell which of eight patterns a scene shows, two to six of them at random
places. What is explained is the sum of the scores of 3, 4, 5 or 6 patterns on scenes that show these: every
pattern has to be found by itself, so that there are so many concepts. (In a network that is trained on *sets*
of patterns, as in `examples/known_concepts.py`, it is not so: it may look for two of them together, and DRSA
with the planted K then does not tell them apart either. --oracle counts the patterns that it does.)

The criterion of `choose_k` was fixed on seeds 0 to 4; the table is meant for others.

    python tests/benchmarks/bench_choose_k.py --cache DIR --seeds 10 11 12 13 14 15 16 17 18 19 --oracle
    python tests/benchmarks/bench_choose_k.py --cache DIR --seeds 10 11 12 --shuffled
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from drsa_core import DRSA, Pairs, choose_k
from drsa_core.stability import with_shuffled_contexts
from safetensors.torch import load_file, save_file
from study.synthetic import PATTERN_NAMES, PlantedConcepts, Scenes, match_masks
from torch import Tensor, nn
from zennit.attribution import Gradient

from zennit_drsa import DisentangledAttributor, collect

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import known_concepts

N_PATTERNS, N_IMAGES, STEPS = len(PATTERN_NAMES), 200, 250


class Planted:
    """Scenes with some of the patterns, and a network that finds each pattern.

    Parameters
    ----------
    n_shown, seed : int
        How many patterns; which ones, the scenes and the network depend on the seed.
    cache : path
        Where networks and pairs are kept.
    """

    def __init__(self, n_shown: int, seed: int, cache: Path) -> None:
        cache.mkdir(parents=True, exist_ok=True)
        self.model = trained(seed, cache / f"network_seed{seed}.safetensors")
        task = PlantedConcepts((1.0,) * N_PATTERNS, n_shown)
        generator = torch.Generator().manual_seed(1000 * n_shown + seed)
        label = int(torch.randint(len(task.classes), (1,), generator=generator))
        self.shown = list(task.classes[label])
        self.learn: Scenes = task.sample(N_IMAGES, generator, label)
        self.test: Scenes = task.sample(60, generator, label)
        file = cache / f"planted{n_shown}_seed{seed}.safetensors"
        if not file.exists():
            pairs = collect(
                self.model,
                known_concepts.composite(),
                known_concepts.LAYER,
                self.learn.images.split(100),
                self.score,
                random_state=seed,
                progress=False,
            )
            pairs.save(file)
        self.pairs = Pairs.load(file)

    @property
    def score(self) -> Callable[[Tensor], Tensor]:
        """What is explained: the sum of the outputs for the patterns that are shown."""
        return lambda output: output[:, self.shown].sum(1)

    def recovered(self) -> tuple[int, float]:
        """DRSA with the planted K: patterns that own a map, and the share of relevance in the right mask."""
        found = DRSA(len(self.shown), balance=1.0, random_state=0).fit(self.pairs).subspaces_
        gradient = Gradient(self.model, known_concepts.composite())
        attributor = DisentangledAttributor(gradient, known_concepts.LAYER, found)
        maps = attributor.explain(self.test.images, self.score, whole=False).maps
        result = match_masks(maps, self.test.masks[:, self.shown])
        return result.covered, result.score


def trained(seed: int, file: Path) -> nn.Module:
    """A network with an output for each pattern: is it there?"""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = known_concepts.Network(N_PATTERNS)
    if file.exists():
        model = network.folded()
        model.load_state_dict(load_file(file))
        return model
    tasks = [PlantedConcepts((1.0,) * N_PATTERNS, n_shown) for n_shown in range(2, 7)]

    def sample(n: int) -> tuple[Tensor, Tensor]:
        parts = [task.sample(n, generator) for task in tasks]
        is_there = torch.cat([part.masks for part in parts]).flatten(2).any(2)
        return torch.cat([part.images for part in parts]), is_there

    optimiser = torch.optim.AdamW(network.parameters(), lr=5e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=STEPS)
    for _ in range(STEPS):
        images, is_there = sample(13)
        loss = nn.functional.binary_cross_entropy_with_logits(network(images), is_there.float())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    model = network.folded()
    images, is_there = sample(100)
    accuracy = float(((model(images) > 0) == is_there).float().mean())
    print(f"network of seed {seed}: {accuracy:.4f} of the outputs right", file=sys.stderr)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, file)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(tempfile.gettempdir()) / "drsa_planted"
    parser.add_argument("--planted", type=int, nargs="+", default=[3, 4, 5, 6], help="default: 3 4 5 6")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10, 20)), help="default: 10 to 19")
    parser.add_argument("--largest", type=int, default=8, help="largest K to try (default: %(default)s)")
    parser.add_argument(
        "--from-planted",
        action="store_true",
        help="try no K below the planted one: the same hits in half the time, as the largest K counts",
    )
    parser.add_argument("--bootstraps", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--shuffled", action="store_true", help="shuffle contexts: the answer is then none")
    parser.add_argument("--oracle", action="store_true", help="also see what DRSA with the planted K finds")
    parser.add_argument("--cache", type=Path, default=default, help="for networks (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="print the table of every choice")
    options = parser.parse_args()

    chosen: dict[int, list[int | None]] = {}
    for seed in options.seeds:
        for n_planted in options.planted:
            planted = Planted(n_planted, seed, options.cache)
            pairs = planted.pairs
            if options.shuffled:
                pairs = with_shuffled_contexts(pairs, np.random.default_rng(10_000 + seed))
            begin = time.perf_counter()
            tried = range(n_planted if options.from_planted else 2, options.largest + 1)
            choice = choose_k(pairs, tried, n_bootstraps=options.bootstraps, progress=False)
            chosen.setdefault(n_planted, []).append(choice.n_subspaces)
            seconds = (time.perf_counter() - begin) / len(choice.candidates)
            text = f"planted {n_planted}, seed {seed}: {choice.n_subspaces}; {seconds:.1f} s for each K"
            if options.oracle:
                covered, score = planted.recovered()
                text += f"; DRSA({n_planted}) tells {covered} patterns apart, {score:.2f} in the right mask"
            print(f"{text}\n{choice}" if options.verbose else text, flush=True)

    print("\n| planted | as it should be | chosen, with how often |\n|---|---|---|")
    for n_planted, found in chosen.items():
        truth = None if options.shuffled else n_planted
        counts = ", ".join(f"{k}: {n}" for k, n in sorted(Counter(map(str, found)).items()))
        print(f"| {n_planted} | {found.count(truth)} of {len(found)} | {counts} |")


if __name__ == "__main__":
    main()
