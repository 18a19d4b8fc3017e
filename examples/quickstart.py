"""Four concepts of one prediction: EfficientNet-Lite0 on a photograph of a cat, with Zennit's LRP.

Everything comes with packages: ImageNet weights, the photograph (scikit-image's cat), the method. The
concepts are learned from random crops of the photograph, or from a folder with photographs of one class.

    python examples/quickstart.py --figure quickstart.png
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import skimage.data
import torch
from drsa_core import DRSA
from drsa_core.plot import concept_maps
from efficientnet_lite0 import composite_for, load_model, load_photo
from torch import Tensor
from zennit.attribution import Gradient

from zennit_drsa import DisentangledAttributor, collect


def cat(n_crops: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """scikit-image's cat as the network sees it, (1, 3, 224, 224), and random crops of it, (n_crops, …)."""
    photo = (torch.from_numpy(np.array(skimage.data.chelsea())).permute(2, 0, 1)[None].float() - 127) / 128
    photo = photo[..., :300, 75:375]  # the square around its head
    generator = torch.Generator().manual_seed(seed)
    crops = []
    for _ in range(n_crops):
        size = int(torch.randint(160, 300, (1,), generator=generator))
        top, left = torch.randint(0, 300 - size, (2,), generator=generator).tolist()
        crop = photo[..., top : top + size, left : left + size]
        crops.append(crop if torch.rand(1, generator=generator) < 0.5 else crop.flip(-1))
    resized = [
        torch.nn.functional.interpolate(x, (224, 224), mode="bilinear", antialias=True)
        for x in (photo, *crops)
    ]
    return resized[0], torch.cat(resized[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, help="photographs of one class; the first is explained")
    parser.add_argument("--layer", default="blocks.4", help="layer to split (default: %(default)s)")
    parser.add_argument("--concepts", type=int, default=4, help="number of concepts (default: %(default)s)")
    parser.add_argument("--crops", type=int, default=24, help="crops to learn from (default: %(default)s)")
    parser.add_argument("--figure", type=Path, default=Path("quickstart.png"), help="default: %(default)s")
    options = parser.parse_args()
    begin = time.perf_counter()

    model = load_model()
    if options.images:
        files = sorted(f for f in options.images.iterdir() if f.suffix.lower() in {".jpg", ".jpeg", ".png"})
        if not files:
            parser.error(f"no photographs (.jpg, .jpeg, .png) in {options.images}")
        images = torch.stack([load_photo(file) for file in files])
        x = images[:1]
    else:
        x, images = cat(options.crops)
    with torch.no_grad():
        target = int(model(x).argmax())
    print(f"predicted class: {target}")

    # 1. Pairs of activations and contexts. 2. Subspaces. 3. One map for each concept.
    composite = composite_for(x)
    a, c = collect(model, composite, options.layer, images.split(8), target, random_state=0)
    subspaces = DRSA(options.concepts, random_state=0, progress=True).fit(a, c).subspaces_
    one_hot = torch.nn.functional.one_hot(torch.tensor([target]), 1000)
    with DisentangledAttributor(Gradient(model, composite), options.layer, subspaces) as attributor:
        _, maps = attributor(x, lambda output: output * one_hot)

    shares = (maps[0].sum((1, 2, 3)) / maps.sum()).tolist()
    print("share of each concept:", ", ".join(f"{share:.0%}" for share in shares))
    concept_maps((x[0] * 128 + 127) / 255, maps[0], subspaces.names, pool=4).savefig(options.figure, dpi=80)
    print(f"wrote {options.figure} after {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
