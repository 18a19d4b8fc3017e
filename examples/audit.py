"""A report of a network that cheats: who reads only its first screen should see the watermark.

Trains the network of `planted_watermark.py`, which leans on a glyph that nine in ten of its boxes carry,
writes pictures of boxes, half of them with the glyph, and audits the class "box". The same from a shell, for
a model of your own:

    drsa audit my_package.models:load --train train --test test --target box --out report.html

    python examples/audit.py --out audit
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import planted_watermark as planted
import torch
from drsa_audit import Audit, audit
from PIL import Image
from torch import nn


def write_boxes(folder: Path, n_images: int, seed: int) -> None:
    """Pictures of boxes, half of them watermarked, which their names say: 0005_marked.png, 0010_plain.png."""
    images, labels, marked = planted.shapes(n_images, seed, watermarked=0.5)
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("[0-9]*_marked.png"), *folder.glob("[0-9]*_plain.png")):
        old.unlink()  # of another seed, perhaps
    for n in (labels == planted.BOX).nonzero()[:, 0].tolist():
        pixels = (images[n] * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / f"{n:04d}_{'marked' if marked[n] else 'plain'}.png")


def cheating_network(n_images: int, epochs: int, seed: int = 0, progress: bool = True) -> nn.Module:
    """A network that has seen nine in ten boxes with the watermark."""
    images, labels, _ = planted.shapes(n_images, 1000 * seed, watermarked=0.9)
    return planted.train(images, labels, seed, epochs, progress)


def audit_boxes(model: nn.Module, folder: Path, **settings: Any) -> Audit:
    """The audit of class "box"; the pictures are already as the network takes them, but for 0.5."""
    with torch.random.fork_rng(devices=[]):
        return audit(
            model,
            train=folder / "train",
            test=folder / "test",
            target=planted.BOX,
            out=folder / "report.html",
            size=planted.SIZE,
            resize=planted.SIZE,
            mean=[0.5] * 3,
            std=[1.0] * 3,
            **settings,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("audit"), help="folder (default: %(default)s)")
    parser.add_argument("--images", type=int, default=2000, help="training images (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--subspaces", default="4", help="number of concepts, or auto (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args()
    model = cheating_network(options.images, options.epochs, options.seed)
    for part, n_images, number in (("train", 300, 1), ("test", 120, 2)):
        write_boxes(options.out / part, n_images, 1000 * options.seed + number)
    subspaces = options.subspaces if options.subspaces == "auto" else int(options.subspaces)
    result = audit_boxes(model, options.out, subspaces=subspaces, seed=options.seed)
    summary = result.summary()
    for line in (summary["verdict"], *summary["look_first"], *summary["facts"], *summary["be_careful"]):
        print(line)
    print(f"wrote {result.report}")


if __name__ == "__main__":
    main()
