"""Concepts of a table: how does a small network know a wine?

The data are scikit-learn's wine set: 178 wines from three cultivars, 13 measurements each. A network of two
hidden layers learns to tell the cultivars apart; DRSA finds K concepts in its first hidden layer, from the
wines that it learned from. Each prediction then splits twice: by measurement, and by concept.

    python examples/tabular.py --figure tabular.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from captum.attr import IntegratedGradients
from drsa_core import DRSA, plot
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from captum_drsa import DisentangledAttribution

LAYER = "1"


def load(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], list[str]]:
    """Standardised measurements and labels to learn from, others to look at, and the measurements' names."""
    data = load_wine()
    split = train_test_split(data.data, data.target, test_size=0.3, random_state=seed, stratify=data.target)
    x, x_test = (torch.as_tensor(part, dtype=torch.float32) for part in split[:2])
    y, y_test = (torch.as_tensor(part) for part in split[2:])
    mean, deviation = x.mean(0), x.std(0)
    return ((x - mean) / deviation, y), ((x_test - mean) / deviation, y_test), list(data.feature_names)


def train(x: Tensor, y: Tensor, seed: int, steps: int) -> nn.Module:
    """A small network, trained with weight decay."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = (nn.Linear(x.shape[1], 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))
        model = nn.Sequential(*layers)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concepts", type=int, default=3, help="number K of concepts (default: %(default)s)")
    parser.add_argument(
        "--cultivar", type=int, choices=range(3), default=0, help="which to explain (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of split, network and DRSA (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=150, help="training steps (default: %(default)s)")
    parser.add_argument("--figure", type=Path, help="where to draw the bars")
    options = parser.parse_args()

    (x, y), (x_test, y_test), names = load(options.seed)
    model = train(x, y, options.seed, options.steps)
    right = model(x_test).argmax(1) == y_test
    print(f"{len(x)} wines to learn from, {len(x_test)} others: {float(right.float().mean()):.1%} right")

    def score(logits: Tensor) -> Tensor:
        """How much more the network sees the cultivar than the others."""
        others = [c for c in range(3) if c != options.cultivar]
        return logits[:, options.cultivar] - logits[:, others].mean(1)

    explainer = DisentangledAttribution(IntegratedGradients(model), LAYER)
    of_cultivar = x[y == options.cultivar]
    solver = DRSA(options.concepts, random_state=options.seed)
    explainer.fit([of_cultivar], score, solver, positions=None, progress=False)

    wines = x_test[right & (y_test == options.cultivar)]
    explanation = explainer.explain(wines, score, n_steps=200)
    print(f"\n{len(wines)} other wines of cultivar {options.cultivar}\n{explanation.certificate()}")
    exact = explainer.exact_totals(wines, score)
    off = (explanation.maps.sum(2) - exact).abs().max() / exact.abs().max()
    print(f"the bars of a concept add up to its exact total (Note B.3) up to {float(off):.1e} of the largest")
    share = explanation.concept_relevance.mean(0) / explanation.concept_relevance.sum(1).mean()
    for k in range(options.concepts):
        mean = explanation.maps[:, k].mean(0)
        best = mean.abs().topk(3).indices.tolist()
        print(
            f"S{k + 1}: {float(share[k]):.0%} of the relevance; "
            + ", ".join(f"{names[i]} {float(mean[i]):+.2f}" for i in best)
        )
    if options.figure:
        title = f"how a small network knows wines of cultivar {options.cultivar}, by measurement and concept"
        figure = plot.concept_bars(explanation.maps, names, title=title, n_features=None)
        figure.savefig(options.figure, dpi=100)
        print(f"wrote {options.figure}")


if __name__ == "__main__":
    main()
