"""Do the methods find concepts that are known? Planted patterns, and small CNNs that tell them apart.

A class is a set of four of six patterns, which lie at random places; the maps of its four concepts should
be the four patterns. Maps are matched to the masks one to one, and the share of positive relevance inside
the right mask is reported for DRSA, DSA, the first PRCA and PCA components, random subspaces, and for what
one might take instead: NMF, ICA, k-means, a sparse dictionary, single channels (`study.peers`).

The five networks are those of known_concepts.safetensors beside this file, so that every machine has the
same ones. Other settings, or `--train`, train them on the spot.

    python examples/known_concepts.py                           # the table, and known_concepts.png
    python examples/known_concepts.py --when                    # when do subspaces share a concept?
    python examples/known_concepts.py --train --keep FILE.safetensors
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from drsa_core import DRSA, DSA, PCA, PRCA, Pairs, RandomSubspaces, Subspaces
from safetensors.torch import load_file, save_file
from study.peers import ICA, NMF, Channels, Directions, KMeansDirections, SparseDictionary
from study.plots import known_concepts
from study.synthetic import PATTERN_NAMES, Matching, PlantedConcepts, Scenes, match_masks
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from tqdm import tqdm
from zennit.attribution import Gradient
from zennit.composites import EpsilonGammaBox, MixedComposite, NameMapComposite
from zennit.core import Composite
from zennit.rules import Gamma

from zennit_drsa import DisentangledAttributor, collect

LAYER, N_FEATURES = "stage3", 48
STEPS = 250
WEIGHTS = Path(__file__).with_suffix(".safetensors")


class Network(nn.Sequential):
    """Four convolutions, global pooling and a classifier; concepts are looked for at "stage3"."""

    def __init__(self, n_classes: int, pooling: str = "mean") -> None:
        super().__init__()
        pool = nn.AdaptiveAvgPool2d(1) if pooling == "mean" else nn.AdaptiveMaxPool2d(1)
        sizes = [(1, 16, 5), (16, 32, 3), (32, N_FEATURES, 3), (N_FEATURES, 48, 3)]
        for i, (n_in, n_out, kernel) in enumerate(sizes, start=1):
            self.add_module(f"conv{i}", nn.Conv2d(n_in, n_out, kernel, padding="same"))
            self.add_module(f"norm{i}", nn.BatchNorm2d(n_out))
            self.add_module(f"stage{i}", nn.ReLU())
            if i <= 2:
                self.add_module(f"halve{i}", nn.MaxPool2d(2))
        self.add_module("pool", pool)
        self.add_module("flat", nn.Flatten())
        self.add_module("classifier", nn.Linear(48, n_classes))

    def folded(self) -> nn.Sequential:
        """The network for evaluation, its norms made part of the convolutions: plain layers for LRP."""
        parts: dict[str, Any] = dict(self.eval().named_children())
        for i in range(1, 5):
            parts[f"conv{i}"] = fuse_conv_bn_eval(parts[f"conv{i}"], parts.pop(f"norm{i}"))
        result = nn.Sequential()
        for name, part in parts.items():
            result.add_module(name, part)
        return result.requires_grad_(False)


def train(task: PlantedConcepts, seed: int, pooling: str, steps: int) -> tuple[nn.Module, float]:
    """A network that tells the classes apart, and its accuracy on new scenes.

    Machines and numbers of threads round differently, and the network is another one.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = Network(len(task.classes), pooling)
    optimiser = torch.optim.AdamW(network.parameters(), lr=5e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=steps)
    for _ in tqdm(range(steps), desc=f"training, seed {seed}", leave=False):
        scenes = task.sample(64, generator)
        loss = nn.functional.cross_entropy(network(scenes.images), scenes.labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    model = network.folded()
    return model, accuracy_of(model, task, generator)


def kept(models: list[nn.Module], file: Path) -> None:
    """Write networks in half precision; `stored` reads them."""
    tensors = {f"{i}.{name}": v.half() for i, m in enumerate(models) for name, v in m.state_dict().items()}
    save_file(tensors, file)


def stored(seed: int, file: Path = WEIGHTS) -> nn.Module:
    """The network of a seed, as it was trained once."""
    model = Network(len(PlantedConcepts().classes)).folded()
    own = {n.partition(".")[2]: v.float() for n, v in load_file(file).items() if n.startswith(f"{seed}.")}
    model.load_state_dict(own)
    return model


def accuracy_of(model: nn.Module, task: PlantedConcepts, generator: torch.Generator) -> float:
    """Share of new scenes that the network is right about."""
    test = task.sample(1000, generator)
    return float((model(test.images).argmax(1) == test.labels).float().mean())


def composite(gamma_above: float = 0.25) -> Composite:
    """z^B at the input, LRP-γ at convolutions, with a γ of its own above the concepts, LRP-ε in the head."""
    # The first composite that knows a module decides.
    above = NameMapComposite([(["conv4"], Gamma(gamma_above))])
    return MixedComposite([above, EpsilonGammaBox(low=-1.0, high=1.0, gamma=0.25)])


def explain(model: nn.Module, rules: Composite, subspaces: Subspaces, images: Tensor, label: int) -> Tensor:
    """Maps of a class on the pixels, shape (N, K, H, W)."""
    attributor = DisentangledAttributor(Gradient(model, rules), LAYER, subspaces)
    return attributor.explain(images, label, whole=False).maps.sum(2)


def lines(vectors: Tensor, n: int = 4) -> Subspaces:
    """The first n columns as subspaces of one dimension."""
    return Subspaces(vectors[:, :n], [1] * n)


Method = Callable[[Pairs], Subspaces]


def methods(seed: int) -> dict[str, Method]:
    """What is compared: each gives four subspaces."""
    return {
        "DRSA": lambda p: DRSA(4, random_state=seed).fit(p).subspaces_,
        "DRSA, balance 1": lambda p: DRSA(4, random_state=seed, balance=1.0).fit(p).subspaces_,
        "DSA": lambda p: DSA(4, random_state=seed).fit(p).subspaces_,
        "PRCA 1–4": lambda p: lines(PRCA().fit(p).basis_),
        "PCA 1–4": lambda p: lines(PCA().fit(p).basis_),
        "random": lambda p: RandomSubspaces(4, random_state=seed).fit(p).subspaces_,
        "DRSA, d = 1 each": lambda p: DRSA(dims=[1] * 4, random_state=seed).fit(p).subspaces_,
        "NMF (CRAFT)": peer(NMF(4, random_state=seed)),
        "ICA": peer(ICA(4, random_state=seed)),
        "k-means (ACE)": peer(KMeansDirections(4, random_state=seed)),
        "sparse dictionary": peer(SparseDictionary(4, random_state=seed)),
        "channels (CRP)": peer(Channels(4)),
    }


def peer(solver: Directions) -> Method:
    """The four directions of another method, without their residual."""
    return lambda p: solver.fit(p).subspaces_.select(range(4))


def by_relevance(pairs: Pairs, positions: int, seed: int) -> Pairs:
    """Pairs drawn with probability proportional to their positive relevance, as many from each image."""
    n_images = int(pairs.image.max()) + 1
    weights = (pairs.a * pairs.c).sum(1).clamp(min=1e-12).view(n_images, -1)
    chosen = torch.multinomial(weights, positions, generator=torch.Generator().manual_seed(seed))
    rows = (chosen + torch.arange(n_images)[:, None] * weights.shape[1]).flatten()
    return Pairs(pairs.a[rows], pairs.c[rows], pairs.image[rows])


def dealt_out(directions: Tensor, n_subspaces: int = 4) -> Tensor:
    """An orthogonal start whose blocks get the given directions (D, M) in turn, then a completion."""
    n_features = len(directions)
    filler = torch.randn(n_features, n_features, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(torch.cat([directions, filler], dim=1)).Q
    return torch.cat([basis[:, k::n_subspaces] for k in range(n_subspaces)], dim=1)


def true_directions(pairs: Pairs, masks: Tensor) -> Tensor:
    """First PRCA component of the positions inside each of the masks (N, M, H, W), shape (D, M)."""
    side = round((len(pairs) // len(masks)) ** 0.5)
    inside = nn.functional.adaptive_avg_pool2d(masks.float(), side).flatten(2) > 0.5
    rows = inside.movedim(1, 2).flatten(0, 1)  # (positions of all images, M)
    found = [PRCA().fit(pairs.a[r], pairs.c[r]).basis_[:, 0] for r in rows.T]
    return torch.stack(found, dim=1)


Fit = Callable[[Pairs, Pairs, Tensor], DRSA]


def suspects(seed: int) -> dict[str, Fit]:
    """One change to the paper's setting in each row: what decides whether subspaces share a concept?

    Each is a function of the sampled pairs, the pairs of all positions, and the masks of the training scenes.
    """

    def drsa(**changes: object) -> DRSA:
        return DRSA(**({"n_subspaces": 4, "random_state": seed} | changes))  # type: ignore[arg-type]

    def by_evidence(p: Pairs, every: Pairs, masks: Tensor) -> DRSA:
        chosen = by_relevance(every, 20, seed)
        return drsa().fit(chosen)

    return {
        "paper (q = 0.5, K = 4)": lambda p, every, masks: drsa().fit(p),
        "10 starts": lambda p, every, masks: drsa(n_init=10).fit(p),
        "start from PRCA": lambda p, every, masks: drsa().fit(p, init=dealt_out(PRCA().fit(p).basis_)),
        "start from the truth": lambda p, every, masks: drsa().fit(
            p, init=dealt_out(true_directions(every, masks))
        ),
        "q = 0": lambda p, every, masks: drsa(q=0.0).fit(p),
        "q = 1": lambda p, every, masks: drsa(q=1.0).fit(p),
        "q = 2": lambda p, every, masks: drsa(q=2.0).fit(p),
        "4 dimensions each": lambda p, every, masks: drsa(dims=[4] * 4).fit(p),
        "K = 6": lambda p, every, masks: drsa(n_subspaces=6).fit(p),
        "positions by relevance": by_evidence,
        "balance = 0.5": lambda p, every, masks: drsa(balance=0.5).fit(p),
        "balance = 1": lambda p, every, masks: drsa(balance=1.0).fit(p),
    }


def evidence(model: nn.Module, rules: Composite, scenes: Scenes, masks: Tensor, label: int) -> list[float]:
    """Share of the positive relevance of the standard map that lies inside each mask."""
    whole = Subspaces(torch.eye(N_FEATURES), [N_FEATURES])
    return match_masks(explain(model, rules, whole, scenes.images, label), masks).inside[0].tolist()


def matched(maps: Tensor, result: Matching) -> Tensor:
    """The maps of one image in the order of the concepts, zeros where none is assigned, shape (M, H, W)."""
    empty = torch.zeros_like(maps[0])
    return torch.stack([maps[k] if k >= 0 else empty for k in result.subspace_of])


def table(title: str, results: dict[str, list[tuple[float, int]]]) -> None:
    """Mean and standard error over seeds of the score, and the mean number of concepts covered."""
    print(f"\n| {title} | share inside the right mask | concepts covered, of 4 |\n|---|---|---|")
    for name, values in results.items():
        scores = torch.tensor([score for score, _ in values])
        error = f" ± {float(scores.std() / len(scores) ** 0.5):.2f}" if len(scores) > 1 else ""
        covered = sum(n for _, n in values) / len(values)
        print(f"| {name} | {float(scores.mean()):.2f}{error} | {covered:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="networks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training (default: %(default)s)")
    parser.add_argument("--images", type=int, default=200, help="scenes to learn from (default: %(default)s)")
    parser.add_argument("--pooling", choices=["mean", "max"], default="mean", help="default: %(default)s")
    parser.add_argument(
        "--weak", type=float, default=1.0, help="contrast of every second pattern (default: %(default)s)"
    )
    parser.add_argument(
        "--gamma-above", type=float, default=0.0, help="γ above the concepts (default: %(default)s)"
    )
    parser.add_argument("--train", action="store_true", help="train, although there are stored networks")
    parser.add_argument("--keep", type=Path, help="where to keep the networks that were trained")
    parser.add_argument("--when", action="store_true", help="vary DRSA's settings instead of the method")
    parser.add_argument("--json", type=Path, help="where to write the table's numbers")
    parser.add_argument(
        "--figure",
        type=Path,
        default=Path("known_concepts.png"),
        help="where to draw the maps of the first seed (default: %(default)s)",
    )
    options = parser.parse_args()

    task = PlantedConcepts(strengths=(1.0, options.weak) * 3)
    rules = partial(composite, options.gamma_above)
    is_usual = (options.steps, options.pooling, options.weak) == (STEPS, "mean", 1.0) and options.seeds <= 5
    results: dict[str, list[tuple[float, int]]] = {}
    gains: dict[str, list[float]] = {}
    models: list[nn.Module] = []
    for seed in range(options.seeds):
        begin = time.perf_counter()
        label = 3 * seed % len(task.classes)
        shown = list(task.classes[label])
        if is_usual and not options.train:
            model = stored(seed)
            accuracy = accuracy_of(model, task, torch.Generator().manual_seed(500 + seed))
        else:
            model, accuracy = train(task, seed, options.pooling, options.steps)
        models.append(model)
        seconds = time.perf_counter() - begin
        generator = torch.Generator().manual_seed(1000 + seed)
        learn, test = task.sample(options.images, generator, label), task.sample(60, generator, label)
        masks = test.masks[:, shown]
        shares = evidence(model, rules(), test, masks, label)
        print(
            f"seed {seed}: accuracy {accuracy:.3f} after {seconds:.0f} s; "
            f"class {label}, evidence of "
            + ", ".join(f"{PATTERN_NAMES[m]} {share:.2f}" for m, share in zip(shown, shares, strict=True)),
            flush=True,
        )
        batches = learn.images.split(100)
        pairs = collect(model, rules(), LAYER, batches, label, random_state=seed, progress=False)
        pictures: dict[str, Tensor] = {}

        def score(name: str, subspaces: Subspaces) -> None:
            maps = explain(model, rules(), subspaces, test.images, label)  # noqa: B023 (this round only)
            result = match_masks(maps, masks)  # noqa: B023
            results.setdefault(name, []).append((result.score, result.covered))
            pictures[name] = matched(maps[0], result)  # noqa: B023

        if options.when:
            every = collect(model, rules(), LAYER, batches, label, None, progress=False)
            reference = None
            for name, fit in tqdm(suspects(seed).items(), leave=False):
                solver = fit(pairs, every, learn.masks[:, shown])
                score(name, solver.subspaces_)
                reference = reference or solver.objective_
                if name in ("10 starts", "start from PRCA", "start from the truth"):
                    gains.setdefault(name, []).append(solver.objective_ / reference - 1)
        else:
            for name, method in tqdm(methods(seed).items(), leave=False):
                score(name, method(pairs))
        if seed == 0:
            names = [PATTERN_NAMES[m] for m in shown]
            known_concepts(test.images[0], masks[0], pictures, names).savefig(options.figure, dpi=80)
            print(f"wrote {options.figure}")
    if options.keep:
        kept(models, options.keep)
    if options.json:
        options.json.write_text(json.dumps({"gamma_above": options.gamma_above, "scores": results}, indent=1))
    table("DRSA with" if options.when else "method", results)
    for name, values in gains.items():
        gain = ", ".join(f"{100 * value:+.1f} %" for value in values)
        print(f"objective relative to the paper's setting, {name}: {gain}")


if __name__ == "__main__":
    main()
