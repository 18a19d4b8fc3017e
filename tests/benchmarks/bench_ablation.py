"""Does taking a concept out lower the output by what the explanation says? DRSA beside four baselines.

For each class of a folder, subspaces are learned from its training photographs, and each concept is taken out
of the activation of its validation photographs. Printed is the correlation of R_k with the drop of the
output, over images and concepts, mean ± standard error over classes; in brackets the correlation after each
image's mean is taken off.

    python tests/benchmarks/bench_ablation.py --data DIR                                 # EfficientNet-Lite0
    python tests/benchmarks/bench_ablation.py --data DIR --model FILE.safetensors --layer features.22
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from drsa_audit import load_images, load_network
from drsa_core import DRSA, DSA, PCA, PRCA, Pairs, RandomSubspaces, Subspaces
from drsa_core.evaluation import ConceptAblation, concept_ablation
from study.classes import find_classes
from zennit.attribution import Gradient

from zennit_drsa import DisentangledAttributor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from study.curves import ablation_scatter


def methods(k: int) -> dict[str, Callable[[Pairs], Subspaces]]:
    """Each gives K subspaces: blocks of D/K dimensions, or the K first components."""

    def lines(vectors: torch.Tensor) -> Subspaces:
        return Subspaces(vectors[:, :k], [1] * k)

    return {
        "DRSA": lambda p: DRSA(k, random_state=0).fit(p).subspaces_,
        "DSA": lambda p: DSA(k, random_state=0).fit(p).subspaces_,
        "PRCA": lambda p: lines(PRCA().fit(p).basis_),
        "PCA": lambda p: lines(PCA().fit(p).basis_),
        "random": lambda p: RandomSubspaces(k, random_state=0).fit(p).subspaces_,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with train/<index>_<name>/ and val/…"
    )
    parser.add_argument("--model", default="efficientnet_lite0", help="default: %(default)s")
    parser.add_argument("--layer", help="default: the network's own")
    parser.add_argument("--subspaces", type=int, default=4, help="number K (default: %(default)s)")
    parser.add_argument("--train-images", type=int, default=50, help="per class (default: %(default)s)")
    parser.add_argument("--val-images", type=int, default=20, help="per class (default: %(default)s)")
    parser.add_argument(
        "--mean", action="store_true", help="replace blocks by their mean over training pairs"
    )
    parser.add_argument("--figure", type=Path, help="where to draw the first class")
    options = parser.parse_args()

    network = load_network(options.model)
    layer = network.layer_or(options.layer)
    results: dict[str, list[ConceptAblation]] = {}
    for images in find_classes(options.data, None, options.train_images, options.val_images):
        target = network.output_of(images.index)
        train, val = (
            network.preprocessing.to_inputs(load_images(files, network.size)[0])
            for files in (images.train, images.val)
        )
        wrapper = DisentangledAttributor(Gradient(network.model, network.composite(layer)), layer)
        pairs = wrapper.collect(train.split(4), target, random_state=0, progress=False)
        reference = pairs.a.mean(0) if options.mean else None
        for name, fit in methods(options.subspaces).items():
            found = concept_ablation(wrapper, val, target, fit(pairs), reference=reference, batch_size=10)
            results.setdefault(name, []).append(found)
            print(f"{images.name} {name}: {found.correlation:.3f}", flush=True)

    print("\n| method | correlation of R_k with the drop | mean R_k | mean drop |\n|---|---|---|---|")
    for name, found_ones in results.items():
        across = torch.tensor([r.correlation for r in found_ones])
        within = torch.tensor([r.correlation_within_images for r in found_ones])
        error = float(across.std() / len(across) ** 0.5) if len(across) > 1 else float("nan")
        relevance = torch.cat([r.relevance for r in found_ones]).mean()
        drop = torch.cat([r.drop for r in found_ones]).mean()
        print(
            f"| {name} | {float(across.mean()):.2f} ± {error:.2f} ({float(within.mean()):.2f}) | "
            f"{float(relevance):.2f} | {float(drop):.2f} |"
        )
    if options.figure:
        ablation_scatter({name: found[0] for name, found in results.items()}).savefig(options.figure, dpi=80)
        print(f"wrote {options.figure}")


if __name__ == "__main__":
    main()
