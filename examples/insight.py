"""Insight: which visual concepts tell related classes apart, and which do they share? (section 6.2)

Photographs of several classes teach a network's concepts; each class is matched with the concepts that are
specific to it. Concepts are fitted again on bootstraps of the photographs: one that does not come back gets
no name, only its number in brackets. A folder holds one folder for each class, whose name begins with the
class's ImageNet index (`281_tabby`), or `train` and `val` with such folders. Without a folder, crops of
foolbox's photographs of animals stand in for classes: enough to see how it works, not to learn about animals.

    python examples/insight.py --images FOLDER --out insight
    python examples/insight.py --network examples/keras_resnet50.py:network --weights FILE --layer layer3 …
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from drsa_audit import Network, load_network
from drsa_core import DRSA, stability
from drsa_core.plot import concept_maps
from hanzi_watermark import crops, labelled_photos
from study.classes import class_folders
from study.matching import ClassConceptTable, match_concepts
from study.plots import relevance_boxes, relevance_scatter
from torch import Tensor
from tqdm.auto import tqdm
from zennit.attribution import Gradient

from zennit_drsa import DisentangledAttributor

ANIMALS = {243: "bull mastiff", 251: "dalmatian", 22: "bald eagle", 99: "goose", 305: "dung beetle"}


def load_classes(network: Network, folder: Path, limit: int | None) -> tuple[Tensor, Tensor, dict[int, str]]:
    """Photographs (N, 3, 224, 224), the outputs of their classes (N,), and the names of the classes."""
    found = class_folders(folder)
    if len(found) < 2:
        raise SystemExit(f"{folder} must hold at least two folders of photographs, one for each class")
    outputs = [network.output_of(one.index) for one in found]
    images = [network.load(one.files[:limit]) for one in found]
    labels = [torch.full((len(x),), output) for x, output in zip(images, outputs, strict=True)]
    names = {output: one.label for output, one in zip(outputs, found, strict=True)}
    return torch.cat(images), torch.cat(labels), names


def animals(network: Network, n_crops: int, seed: int) -> tuple[Tensor, Tensor, dict[int, str]]:
    """Random crops of foolbox's photographs of animals, each photograph being its class."""
    photos, labels = labelled_photos(network)
    chosen = [n for n, label in enumerate(labels.tolist()) if label in ANIMALS]
    images = [crops([photos[n : n + 1]], n_crops, seed + n) for n in chosen]
    outputs = torch.tensor([network.output_of(int(labels[n])) for n in chosen])
    names = {network.output_of(index): name for index, name in ANIMALS.items()}
    return torch.cat(images), outputs.repeat_interleave(n_crops), names


def data(
    network: Network, options: argparse.Namespace
) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[int, str]]:
    """Images and labels to learn from, images and labels to look at, names of the classes."""
    folder, limit, seed = options.images, options.limit, options.seed
    if folder is None:
        x, labels, names = animals(network, limit or 20, seed)
        other, other_labels, _ = animals(network, limit or 20, seed + 1000)
        return x, labels, other, other_labels, names
    if (folder / "train").is_dir() and (folder / "val").is_dir():
        x, labels, names = load_classes(network, folder / "train", limit)
        other, other_labels, _ = load_classes(network, folder / "val", limit)
        return x, labels, other, other_labels, names
    x, labels, names = load_classes(network, folder, limit)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    one, two = order[::2], order[1::2]
    return x[one], labels[one], x[two], labels[two], names


def three_axes(table: ClassConceptTable, is_stable: Sequence[bool]) -> tuple[int, int, int]:
    """Three concepts to draw: stable ones with evidence for a class, shared ones, then by their margin."""
    margin = ((table.class_quantiles - table.overall_quantiles) / table.overall_quantiles.abs()).amax(0)
    n_classes = table.specific.sum(0)

    def rank(k: int) -> tuple[bool, bool, int, float]:
        return not is_stable[k], float(table.overall_quantiles[k]) <= 0, -int(n_classes[k]), -float(margin[k])

    first, second, third = sorted(range(len(margin)), key=rank)[:3]
    return first, second, third


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, help="folder of classes (default: crops of foolbox's animals)")
    parser.add_argument("--limit", type=int, help="use so many images of each class")
    parser.add_argument("--network", default="efficientnet_lite0", help="as of drsa (default: %(default)s)")
    parser.add_argument("--weights", type=Path, help="of the network, a .safetensors file")
    parser.add_argument("--layer", default="blocks.4", help="layer to split (default: %(default)s)")
    parser.add_argument("--positions", type=int, default=20, help="pairs of an image (default: %(default)s)")
    parser.add_argument("--concepts", type=int, default=8, help="number of concepts (default: %(default)s)")
    parser.add_argument("--balance", type=float, default=0.0, help="of DRSA (default: %(default)s)")
    parser.add_argument(
        "--bootstraps", type=int, default=5, help="fits on bootstraps of the images (default: %(default)s)"
    )
    parser.add_argument("--no-prototypes", dest="prototypes", action="store_false", help="draw no photograph")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("insight"), help="folder for the figures")
    options = parser.parse_args()
    if options.concepts < 3:
        parser.error("--concepts must be at least 3, for the axes of the scatter plot")
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    network = load_network(options.network, options.weights)
    x, labels, other, other_labels, names = data(network, options)
    print(f"{len(names)} classes, {len(x)} images to learn from, {len(other)} to look at")

    # Learn the concepts of all classes together, each image being explained for its own class.
    attributor = DisentangledAttributor(
        Gradient(network.model, network.composite(options.layer)), options.layer
    )
    pairs = attributor.collect(x.split(4), labels, positions=options.positions, random_state=options.seed)
    found = stability(
        pairs,
        options.concepts,
        solver=DRSA(balance=options.balance),
        n_bootstraps=options.bootstraps,
        random_state=options.seed,
    )
    print(found)
    attributor.subspaces = found.subspaces
    concept_names = [f"S{k + 1}" if stable else f"({k + 1})" for k, stable in enumerate(found.is_stable)]
    parts = zip(other.split(4), other_labels.split(4), strict=True)
    relevance = torch.cat(
        [
            attributor.concept_relevance(part, classes)
            for part, classes in tqdm(list(parts), desc="relevance", unit="batch")
        ]
    )
    table = match_concepts(relevance, other_labels)
    class_names = [names[label] for label in table.classes]
    print(f"Q{table.alpha:g} of each class; * where it is above Q{table.beta:g} of all:")
    print(table.to_text(class_names))
    for label, name in zip(table.classes, class_names, strict=True):
        print(
            f"{name}: "
            + (", ".join(concept_names[k] for k in table.concepts_of(label)) or "no concept of its own")
        )
    if not table.shared:
        print("no concept is shared")
    for k in table.shared:
        print(
            f"{concept_names[k]} is shared by " + " and ".join(names[label] for label in table.classes_of(k))
        )
    n_specific = sum(len(table.classes_of(k)) == 1 for k in range(options.concepts))
    print(
        f"{sum(found.is_stable)} of {options.concepts} concepts are stable; {len(table.shared)} are shared, "
        f"{n_specific} belong to one class, {options.concepts - n_specific - len(table.shared)} to none"
    )

    figure = relevance_boxes(relevance, other_labels, table, class_names, concept_names)
    figure.savefig(options.out / "boxes.png", dpi=110)
    axes = three_axes(table, found.is_stable)
    figure = relevance_scatter(relevance, other_labels, axes, names, concept_names)
    figure.savefig(options.out / "scatter.png", dpi=110)
    for label, n in table.prototypes(relevance, other_labels).items() if options.prototypes else ():
        maps = attributor.explain(other[n : n + 1], label, whole=False).maps
        own = table.concepts_of(label)
        titles = [f"{name} *" if k in own else name for k, name in enumerate(concept_names)]
        figure = concept_maps(network.to_picture(other[n]), maps[0], titles, pool=4)
        figure.savefig(options.out / f"prototype_{names[label].replace(' ', '_')}.png", dpi=70)
        print(f"prototype of {names[label]}: image {n}")
    print(f"wrote figures to {options.out} after {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
