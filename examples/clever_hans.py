"""Clever Hans: find the concept with which a network cheats, and take it out of the prediction (section 6.1).

A small network is trained on the spot that cheats with a planted watermark. The strategy is detected with
DRSA and with SpRAy, and the network without it is compared with deep feature reweighting on poisoned data.
`carton_watermark.py` does the same to networks for photographs.

    python examples/clever_hans.py --out clever_hans
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from pathlib import Path

import planted_watermark as planted
import torch
from drsa_core import DRSA
from drsa_core.plot import concept_maps
from drsa_core.refine import ProjectedModel, excess_relevance
from study.backends import relevance_at
from study.clever_hans import (
    SpRAy,
    auroc,
    confusion_matrix,
    deep_feature_reweighting,
    poison,
    rectified_relevance,
    roc_curve,
)
from study.plots import confusion_matrices, roc_curves
from torch import Tensor, nn
from tqdm.auto import tqdm
from zennit.attribution import Attributor, Gradient
from zennit.canonizers import SequentialMergeBatchNorm
from zennit.core import Composite

from zennit_drsa import ConvNetGamma, DisentangledAttributor


class Concepts:
    """Concepts of one class, learned from images `x`: their maps and their relevance, by Zennit's LRP."""

    def __init__(
        self,
        model: nn.Module,
        composite: Composite,
        layer: str,
        x: Tensor,
        target: int,
        seed: int,
        dims: Sequence[int] | None = None,
        balance: float = 0.0,
    ) -> None:
        solver = DRSA(4, dims, balance=balance, random_state=seed, progress=True)
        self.gradient = Gradient(model, composite)
        self.attributor = DisentangledAttributor(self.gradient, layer)
        self.pairs = self.attributor.collect(x.split(16), target, random_state=seed)
        self.attributor.subspaces = solver.fit(self.pairs).subspaces_
        self.subspaces, self.target, self.layer = solver.subspaces_, target, layer

    def relevance(self, x: Tensor, target: int) -> Tensor:
        """R_k, shape (N, K): what `RefinedModel` asks for."""
        return self.attributor.concept_relevance(x, target)

    def totals(self, x: Tensor) -> Tensor:
        """R_k of many images, shape (N, K)."""
        return torch.cat([self.relevance(batch, self.target) for batch in x.split(16)])

    def draw(self, photo: Tensor, x: Tensor, file: Path, pool: int = 1) -> None:
        """The maps of one image (1, 3, H, W) and what they leave over."""
        rest = not self.subspaces.is_complete
        attributor = DisentangledAttributor(self.gradient, self.layer, self.subspaces, residual=rest)
        names = [*self.subspaces.names, *(["residual"] if rest else [])]
        concept_maps(photo, self.maps(x, attributor)[0], names, pool=pool).savefig(file, dpi=80)

    def maps(self, x: Tensor, attributor: Attributor | None = None) -> Tensor:
        """R_pk, shape (N, K, 3, H, W); with Zennit's own attributor R_p, shape (N, 3, H, W)."""
        attributor = attributor or self.attributor
        batches = tqdm(x.split(8), desc="maps", unit="batch")
        return torch.cat([attributor(batch, relevance_at(self.target))[1] for batch in batches]).detach()


def detect(
    concepts: Concepts,
    x: Tensor,
    marked: Tensor,
    others: Tensor,
    labels: Tensor,
    options: argparse.Namespace,
    pool: int,
) -> int:
    """Print and draw how well concepts and SpRAy's clusters tell watermarked images; return the concept.

    `x` are the images from which the concepts were learned, `marked` says which carry the watermark, as
    `labels` does of the others. The concept is chosen on `x`, where a person would look at its maps.
    """
    learned = concepts.totals(x)
    scores = rectified_relevance(
        concepts.maps(others) if options.scores == "input" else concepts.totals(others)
    )
    concept = max(range(scores.shape[1]), key=lambda k: auroc(learned[:, k], marked))
    curves = {f"DRSA S{concept + 1}": roc_curve(scores[:, concept], labels)}
    print(f"concept of the watermark, chosen on the learning images: S{concept + 1}")
    for k in range(scores.shape[1]):
        print(f"  S{k + 1}: AUROC {auroc(scores[:, k], labels):.3f}")
    if options.spray:
        whole_maps = concepts.maps(others, concepts.gradient)
        curves["whole map"] = roc_curve(rectified_relevance(whole_maps[:, None])[:, 0], labels)
        print(f"  whole map: AUROC {curves['whole map'].auroc:.3f}")
        spray = SpRAy(scores.shape[1], pool=pool, random_state=0).fit(concepts.maps(x, concepts.gradient))
        for k, distance in enumerate(spray.distances(whole_maps).T):
            # As in Note J.1 a cluster may stand for either kind: the better sign counts.
            sign = 1 if auroc(distance, labels) >= 0.5 else -1
            curves[f"SpRAy {k + 1}{'' if sign > 0 else '*'}"] = roc_curve(sign * distance, labels)
            print(f"  SpRAy cluster {k + 1}: AUROC {auroc(sign * distance, labels):.3f}")
    roc_curves(curves, "which images carry the watermark?").savefig(options.out / "roc.png", dpi=110)
    return concept


def small(options: argparse.Namespace) -> None:
    """A small network trained on the spot: detection, refinement, deep feature reweighting."""
    seed = options.seed
    images, labels, marked = planted.shapes(options.train, 1000 * seed, watermarked=0.5)
    model = planted.train(images, labels, seed, options.epochs)
    low, high = torch.full((1, 3, 32, 32), -0.5), torch.full((1, 3, 32, 32), 0.5)
    box = labels == planted.BOX
    x = images[box][:300] - 0.5
    layer = "1"
    # γ = 0 above the layer, as in the paper: there the context is not a multiple of the activation.
    composite = ConvNetGamma(0.25, low=low, high=high, layer=layer, canonizers=[SequentialMergeBatchNorm()])
    dims = [options.dims] * 4 if options.dims else None
    concepts = Concepts(model, composite, layer, x, planted.BOX, seed, dims, options.balance)

    # Detect: which of the boxes carry the watermark?
    others, other_labels, other_marked = planted.shapes(options.test, 1000 * seed + 1, watermarked=0.5)
    boxes = other_labels == planted.BOX
    others = others[boxes]
    concept = detect(concepts, x, marked[box][:300], others - 0.5, other_marked[boxes], options, pool=4)

    # Mitigate: accuracy on clean and poisoned data, with each concept taken out, and with a new last layer.
    learned = concepts.totals(x)
    usual, usual_clean = learned.mean(0), learned[~marked[box][:300]].mean(0)
    # Where f − max(0, R_k − E[R_k]) takes too much or too little, set activations back instead. References
    # are the other shapes, which never carry the watermark.
    with torch.no_grad():
        reference = model[: int(layer) + 1](images[~box][:600] - 0.5).movedim(1, -1).flatten(0, 2)
    models: dict[str, nn.Module] = {
        f"S{concept + 1} set back where it stands out": ProjectedModel(
            model, layer, concepts.subspaces, [concept], concepts.pairs.c.mean(0), reference, options.quantile
        )
    }
    for rate in (0.25, 0.5):
        models[f"last layer retrained at {rate:.0%}"] = retrained(model, options.train, rate, seed)
    images, labels, _ = planted.shapes(options.test, 1000 * seed + 2)
    generator = torch.Generator().manual_seed(seed)
    marks = [lambda image: planted.add_watermark(image, generator)]
    # What makes a box of another shape?
    shapes, poisoned = poison(images, labels, marks, 1.0, planted.BOX, seed)
    shown = shapes[poisoned][[int(concepts.totals(shapes[poisoned][:100] - 0.5)[:, concept].argmax())]]
    concepts.draw(shown[0], shown - 0.5, options.out / "maps.png")
    matrices: dict[tuple[float, str], Tensor] = {}
    for rate in (0.0, 0.25, 0.5):
        inputs = poison(images, labels, marks, rate, planted.BOX, seed)[0] - 0.5
        found = predictions(models, model, concepts, inputs, concept, usual, usual_clean)
        for name, predicted in found.items():
            matrices[rate, name] = confusion_matrix(labels, predicted, len(planted.NAMES))
    print(f"accuracy on {len(labels)} test images         clean  25 % poisoned  50 % poisoned")
    for name in dict.fromkeys(name for _, name in matrices):
        right = [float(matrices[r, name].diagonal().sum() / len(labels)) for r in (0.0, 0.25, 0.5)]
        print(f"  {name:<36} {right[0]:6.3f} {right[1]:10.3f} {right[2]:14.3f}")
    draw_matrices(matrices, next(name for _, name in matrices if "watermark" in name), options.out)


def predictions(
    models: dict[str, nn.Module],
    model: nn.Module,
    concepts: Concepts,
    x: Tensor,
    concept: int,
    usual: Tensor,
    usual_clean: Tensor,
) -> dict[str, Tensor]:
    """Predicted classes (N,) of the original, of refined models, and of other models.

    What `RefinedModel` does is written out here, as relevance is computed once for all of them.
    """
    relevance = concepts.totals(x)
    with torch.no_grad():
        output = model(x)
        found = {"original": output.argmax(1)}
        refined = {
            f"without S{k + 1}" + (" (the watermark)" if k == concept else ""): (k, usual)
            for k in range(relevance.shape[1])
        }
        refined[f"without S{concept + 1}, E of clean boxes"] = (concept, usual_clean)
        for name, (k, mean) in refined.items():
            changed = output.clone()
            changed[:, planted.BOX] -= excess_relevance(relevance, mean)[:, k]
            found[name] = changed.argmax(1)
        for name, candidate in models.items():
            found[name] = torch.cat([candidate(batch).argmax(1) for batch in x.split(100)])
    return found


def draw_matrices(matrices: dict[tuple[float, str], Tensor], refined: str, folder: Path) -> None:
    """Confusion matrices of the original and of the refined network, for two rates."""
    for poisoned in (0.25, 0.5):
        shown = {
            f"{name.split(' (')[0]}, {f'{rate:.0%} poisoned' if rate else 'clean'}": matrices[rate, name]
            for rate in (0.0, poisoned)
            for name in ("original", refined)
        }
        figure = confusion_matrices(shown, planted.NAMES)
        figure.savefig(folder / f"confusion_{poisoned * 100:.0f}.png", dpi=110)


def retrained(model: nn.Module, n_images: int, rate: float, seed: int) -> nn.Module:
    """Deep feature reweighting: a copy with a last layer trained on images poisoned at a rate."""
    features = model[:-1]  # type: ignore[index]  # a Sequential
    generator = torch.Generator().manual_seed(seed)
    sets = []
    for number in (3, 4):  # to train on, and to choose the weight decay on
        images, labels, _ = planted.shapes(n_images // 2, 1000 * seed + number, watermarked=0.5)
        marks = [lambda image: planted.add_watermark(image, generator)]
        images, _ = poison(images, labels, marks, rate, planted.BOX, seed)
        with torch.no_grad():
            sets += [features(images - 0.5), labels]
    layer, _ = deep_feature_reweighting(sets[0], sets[1], sets[2], sets[3], len(planted.NAMES))
    new: nn.Module = copy.deepcopy(model)
    new[-1] = layer  # type: ignore[operator]
    return new


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("clever_hans"), help="folder for the figures")
    parser.add_argument(
        "--scores",
        choices=["layer", "input"],
        default="layer",
        help="rectify the relevance R_k of a concept, or its pixels as in Note J.1, which needs all maps",
    )
    parser.add_argument(
        "--no-spray",
        dest="spray",
        action="store_false",
        help="leave out SpRAy, whose maps take most of the time",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--train", type=int, default=3000, help="training images (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--test", type=int, default=1000, help="test images (default: %(default)s)")
    parser.add_argument("--dims", type=int, default=0, help="of each concept (default: all shared out)")
    parser.add_argument("--balance", type=float, default=1.0, help="of DRSA (default: %(default)s)")
    parser.add_argument(
        "--quantile", type=float, default=0.99, help="of `ProjectedModel` (default: %(default)s)"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    small(options)
    print(f"wrote figures to {options.out} after {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
