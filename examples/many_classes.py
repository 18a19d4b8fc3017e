"""Subspaces of many classes in one job, on one process or on many.

    python examples/many_classes.py --out classes
    torchrun --nproc-per-node 2 examples/many_classes.py --out classes
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        examples/many_classes.py --data imagenet/train --model resnet50 --layer layer3 --out classes

One pass over the images fills one store of pairs for each class; then each class gets its fit. Ranks share
the batches of the pass, then the classes. Kill it at any time and start it again, also with another number
of ranks: what is done is not done again. OUT/index.json lists the results, OUT/subspaces holds them.

Without --data it takes small random images and a small network of its own, and needs a few seconds. With
--data FOLDER it takes the photographs in FOLDER/<class>/, class folders in the order of the outputs, and a
network of timm with its weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from drsa_core import DRSA, fit_many, joined_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from zennit.attribution import Gradient

from zennit_drsa import ConvNetGamma, DisentangledAttributor

N_CLASSES, IMAGES_PER_CLASS = 6, 8


def small_network() -> nn.Module:
    """Two convolutions and a linear layer, without training: enough to see a job run."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, N_CLASSES),
    ).eval()


def small_images() -> Dataset[Any]:
    """Random images with a brighter patch in another place for each class."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N_CLASSES * IMAGES_PER_CLASS, 3, 32, 32, generator=generator)
    labels = torch.arange(N_CLASSES).repeat_interleave(IMAGES_PER_CLASS)
    for image, label in zip(x, labels, strict=True):
        image[:, 4 * int(label) : 4 * int(label) + 8, 8:24] += 2
    return TensorDataset(x, labels)


def photographs(folder: Path, config: dict[str, Any]) -> tuple[Dataset[Any], dict[int, str]]:
    """The photographs in folders of classes, as the network takes them, and the names of the classes."""
    from timm.data import create_transform
    from torchvision.datasets import ImageFolder

    images = ImageFolder(str(folder), create_transform(**config))
    return images, dict(enumerate(images.classes))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the job")
    parser.add_argument("--data", type=Path, help="photographs in a folder for each class")
    parser.add_argument(
        "--model", default="resnet50", help="network of timm, with --data (default: resnet50)"
    )
    parser.add_argument("--layer", default="layer3", help="its layer, with --data (default: layer3)")
    parser.add_argument("--subspaces", type=int, default=4, help="concepts of each class (default: 4)")
    parser.add_argument("--batch", type=int, default=4, help="images of a batch (default: 4)")
    args = parser.parse_args()

    with joined_ranks() as ranks:  # those of torchrun, or this process alone
        names: dict[int, str] = {}
        if args.data is None:
            # Gradient × Input: such a network needs no rules.
            model, layer, composite = small_network(), "3", None
            images = small_images()
        else:
            import timm

            model, layer = timm.create_model(args.model, pretrained=True).eval(), args.layer
            config = timm.data.resolve_data_config({}, model=model)
            composite = ConvNetGamma(mean=config["mean"], std=config["std"], layer=layer)
            images, names = photographs(args.data, config)
        model.to(ranks.device)
        explainer = DisentangledAttributor(Gradient(model, composite), layer)
        loader = DataLoader(images, batch_size=args.batch, num_workers=0 if args.data is None else 4)
        solver = DRSA(args.subspaces, random_state=0)
        index = fit_many(explainer, loader, args.out, solver, names=names, ranks=ranks)
        if ranks.is_first:
            for label, entry in index.classes.items():
                fit = entry["solver"]
                print(
                    f"class {label}: {entry['n_images']} images, {fit['n_samples']} pairs, objective "
                    f"{fit['objective']:.4f} after {fit['n_iter']} iterations, {entry['fit_seconds']:.2f} s"
                )
            for label, why in index.failed.items():
                print(f"class {label} failed: {why}")


if __name__ == "__main__":
    main()
