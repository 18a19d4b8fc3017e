"""Clever Hans: find the concept with which a network cheats, and take it out of the prediction (section 6.1).

`--network small` trains a small network that cheats with a planted watermark, detects the strategy with DRSA
and with SpRAy, and compares the refined network with deep feature reweighting on poisoned data.
`--network lite0` puts the Hanzi watermark of ImageNet's cartons on photographs: does a concept of
EfficientNet-Lite0 single it out, and does removing that concept bring the rank of "carton" back?

    python examples/clever_hans.py --network small --out clever_hans
    python examples/clever_hans.py --network lite0 --out clever_hans [--images FOLDER] [--learn FOLDER]
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from pathlib import Path

import planted_watermark as planted
import torch
from drsa_audit import load_network, relevance_at
from drsa_core import DRSA
from drsa_core.plot import concept_maps, confusion_matrices, roc_curves
from drsa_core.showcases.clever_hans import (
    RefinedModel,
    SpRAy,
    auroc,
    confusion_matrix,
    deep_feature_reweighting,
    mean_relevance,
    poison,
    ranks,
    rectified_relevance,
    roc_curve,
)
from torch import Tensor, nn
from tqdm.auto import tqdm
from zennit.attribution import Attributor, Gradient
from zennit.canonizers import SequentialMergeBatchNorm
from zennit.composites import EpsilonGammaBox
from zennit.core import Composite

from zennit_drsa import DisentangledAttributor

CARTON = 478


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
    ) -> None:
        solver = DRSA(4, dims, random_state=seed, progress=True)
        self.gradient = Gradient(model, composite)
        self.attributor = DisentangledAttributor(self.gradient, layer)
        self.attributor.fit(x.split(16), target, solver, random_state=seed)
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


# ---------------------------------------------------------------------- (a) a planted watermark


def small(options: argparse.Namespace) -> None:
    """A small network trained on the spot: detection, refinement, deep feature reweighting."""
    seed = options.seed
    images, labels, marked = planted.shapes(options.train, 1000 * seed, watermarked=0.5)
    model = planted.train(images, labels, seed, options.epochs)
    low, high = torch.full((1, 3, 32, 32), -0.5), torch.full((1, 3, 32, 32), 0.5)
    box = labels == planted.BOX
    x = images[box][:300] - 0.5
    composite = EpsilonGammaBox(low, high, canonizers=[SequentialMergeBatchNorm()])
    # Two dimensions for each concept of this layer's 32: with all of them shared out, the evidence of other
    # shapes against a box would fall to the concepts as well.
    concepts = Concepts(model, composite, "1", x, planted.BOX, seed, dims=[2] * 4)

    # Detect: which of the boxes carry the watermark?
    others, other_labels, other_marked = planted.shapes(options.test, 1000 * seed + 1, watermarked=0.5)
    boxes = other_labels == planted.BOX
    others = others[boxes]
    concept = detect(concepts, x, marked[box][:300], others - 0.5, other_marked[boxes], options, pool=4)

    # Mitigate: accuracy on clean and poisoned data, with each concept taken out, and with a new last layer.
    usual = mean_relevance(concepts.relevance, x.split(64), planted.BOX, progress=False)
    clean = x[~marked[box][:300]]
    usual_clean = mean_relevance(concepts.relevance, clean.split(64), planted.BOX, progress=False)
    models: dict[str, nn.Module] = {"original": model}
    for k in range(concepts.subspaces.n_subspaces):
        refined = RefinedModel(model, concepts.relevance, planted.BOX, [k], usual)
        models[f"without S{k + 1}" + (" (the watermark)" if k == concept else "")] = refined
    by_clean = RefinedModel(model, concepts.relevance, planted.BOX, [concept], usual_clean)
    models[f"without S{concept + 1}, E of clean boxes"] = by_clean
    for rate in (0.25, 0.5, 0.75, 1.0):
        models[f"last layer retrained at {rate:.0%}"] = retrained(model, options.train, rate, seed)
    images, labels, _ = planted.shapes(options.test, 1000 * seed + 2)
    generator = torch.Generator().manual_seed(seed)
    marks = [lambda image: planted.add_watermark(image, generator)]
    data = {rate: poison(images, labels, marks, rate, planted.BOX, seed)[0] for rate in (0.0, 0.25, 0.5)}
    # What makes a box of another shape?
    shapes, poisoned = poison(images, labels, marks, 1.0, planted.BOX, seed)
    shown = shapes[poisoned][[int(concepts.totals(shapes[poisoned] - 0.5)[:, concept].argmax())]]
    concepts.draw(shown[0], shown - 0.5, options.out / "maps.png")
    print(f"accuracy on {len(labels)} test images      clean  25 % poisoned  50 % poisoned")
    matrices = {}
    n_classes = len(planted.NAMES)
    for name, candidate in models.items():
        accuracies = []
        for rate, candidates in data.items():
            with torch.no_grad():
                predicted = torch.cat([candidate(batch).argmax(1) for batch in (candidates - 0.5).split(100)])
            matrix = confusion_matrix(labels, predicted, n_classes)
            accuracies.append(float(matrix.diagonal().sum() / matrix.sum()))
            if name == "original" or "watermark" in name:
                short = "original" if name == "original" else f"without S{concept + 1}"
                matrices[rate, f"{short}, {f'{rate:.0%} poisoned' if rate else 'clean'}"] = matrix
        print(f"  {name:<32} {accuracies[0]:6.3f} {accuracies[1]:10.3f} {accuracies[2]:14.3f}")
    for rate in (0.25, 0.5):
        shown_matrices = {title: matrix for (r, title), matrix in matrices.items() if r in (0.0, rate)}
        figure = confusion_matrices(shown_matrices, planted.NAMES)
        figure.savefig(options.out / f"confusion_{rate:.0%}.png".replace("%", ""), dpi=110)


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


# ---------------------------------------------------------------------- (b) the Hanzi watermark


def lite0(options: argparse.Namespace) -> None:
    """EfficientNet-Lite0 and photographs with the Hanzi watermark, class 478, carton."""
    from hanzi_watermark import add_hanzi, crops, labelled_photos, photos_to_learn_from

    network = load_network("efficientnet_lite0")
    model = network.model
    x, labels = labelled_photos(network, options.images, options.limit)
    y = crops(photos_to_learn_from(network, options.learn), options.crops, options.seed)
    learned_marked = torch.arange(len(y)) % 2 == 0  # half of the crops, as about half of the cartons in J.1
    y[learned_marked] = add_hanzi(network, y[learned_marked])
    print(f"{len(y)} crops to learn from, {len(x)} photographs to test on, each without and with watermark")
    concepts = Concepts(model, network.composite(options.layer), options.layer, y, CARTON, options.seed)

    both, marked = torch.cat([x, add_hanzi(network, x)]), torch.arange(2 * len(x)) >= len(x)
    with torch.no_grad():
        before = torch.cat([model(batch) for batch in both.split(16)])
    print(f"AUROC of the logit of carton itself: {auroc(before[:, CARTON], marked):.3f}")
    concept = detect(concepts, y, learned_marked, both, marked, options, pool=8)
    without, with_watermark = concepts.totals(both)[:, concept].chunk(2)
    most = int((with_watermark - without).argmax())  # where the watermark says most
    shown = both[[len(x) + (most if options.show is None else options.show)]]
    concepts.draw(network.to_picture(shown[0]), shown, options.out / "maps.png", pool=4)

    print("median rank of carton, its mean logit, and top-1 accuracy")
    report("original", before, labels)
    for name, reference in (("all learning images", y), ("those without watermark", y[~learned_marked])):
        usual = mean_relevance(concepts.relevance, reference.split(16), CARTON, progress=False)
        refined = RefinedModel(model, concepts.relevance, CARTON, [concept], usual)
        with torch.no_grad():
            after = torch.cat([refined(batch) for batch in tqdm(both.split(16), desc="refined model")])
        report(f"without S{concept + 1}, usual relevance of {name}", after, labels)


def report(name: str, outputs: Tensor, labels: Tensor) -> None:
    """Print what a model makes of photographs without and with watermark."""
    print(f"  {name}")
    for kind, part in zip(("clean", "watermarked"), outputs.chunk(2), strict=True):
        known = labels >= 0
        right = float((part.argmax(1) == labels)[known].float().mean())
        rank = int(ranks(part, CARTON).median())
        print(
            f"    {kind:<12} rank {rank:4d}   logit {float(part[:, CARTON].mean()):6.2f}   top-1 {right:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=["small", "lite0"], default="small", help="default: %(default)s")
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
    group = parser.add_argument_group("small")
    group.add_argument("--train", type=int, default=3000, help="training images (default: %(default)s)")
    group.add_argument("--epochs", type=int, default=6, help="default: %(default)s")
    group.add_argument("--test", type=int, default=1000, help="test images (default: %(default)s)")
    group = parser.add_argument_group("lite0")
    group.add_argument("--images", type=Path, help="photographs to test on (default: foolbox's)")
    group.add_argument("--learn", type=Path, help="photographs to learn from (default: scikit-image's)")
    group.add_argument("--crops", type=int, default=80, help="crops to learn from (default: %(default)s)")
    group.add_argument("--limit", type=int, help="use so many photographs to test on")
    group.add_argument("--show", type=int, help="number of the photograph to draw (default: chosen)")
    group.add_argument("--layer", default="blocks.6", help="layer to split (default: %(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    {"small": small, "lite0": lite0}[options.network](options)
    print(f"wrote figures to {options.out} after {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
