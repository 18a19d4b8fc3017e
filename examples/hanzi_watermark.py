"""The Hanzi watermark of ImageNet's cartons (package `imagenet-w`) on photographs from packages or folders.

Prints the rank that EfficientNet-Lite0 gives to class 478, carton, without and with the watermark.

    python examples/hanzi_watermark.py --figure hanzi_watermark.png [--images FOLDER]
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
import skimage.data
import torch
from drsa_audit import Network, load_network, photo_files
from photographs import foolbox_files
from PIL import Image
from study.clever_hans import ranks
from torch import Tensor

CARTON = 478


def class_of(file: Path) -> int | None:
    """The class with whose number the name of a photograph's folder begins (281_tabby), or else its own."""
    number = re.match(r"(\d+)_", file.absolute().parent.name) or re.match(r"(\d+)_", file.name)
    return None if number is None else int(number[1])


def labelled_photos(
    network: Network, folder: Path | None = None, limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """Photographs (N, 3, 224, 224) and ImageNet classes (N,): of a folder, or the 20 that foolbox carries.

    Classes are those of `class_of`; −1 where there is none.
    """
    if folder is None:
        files = list(foolbox_files())[:limit]
        if not files:
            raise SystemExit("foolbox is not installed; give photographs with --images FOLDER")
        labels = [int(file.stem.split("_")[-1]) for file in files]
    else:
        files = photo_files(folder)[:limit]
        found = [class_of(file) for file in files]
        labels = [-1 if label is None else label for label in found]
    return torch.stack([network.to_input(Image.open(file)) for file in files]), torch.tensor(labels)


def photos_to_learn_from(network: Network, folder: Path | None = None) -> list[Tensor]:
    """Photographs (1, 3, H, W) of a folder, or scikit-image's own, as the network expects them."""
    if folder is not None:
        return list(network.load(photo_files(folder), 256).split(1))
    data = skimage.data
    arrays = [data.astronaut(), data.chelsea(), data.coffee(), data.rocket(), *data.stereo_motorcycle()[:2]]
    arrays += [data.camera(), data.brick(), data.grass(), data.gravel()]
    photos = [torch.from_numpy(np.array(Image.fromarray(array).convert("RGB"))) for array in arrays]
    return [network.preprocessing.to_inputs(p.permute(2, 0, 1)[None].float() / 255) for p in photos]


def crops(photos: list[Tensor], n_crops: int, seed: int) -> Tensor:
    """Random square crops of the photographs in turn, half of them mirrored, shape (n_crops, 3, 224, 224)."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for n in range(n_crops):
        photo = photos[n % len(photos)]
        height, width = photo.shape[-2:]
        size = int(min(height, width) * (0.5 + 0.5 * torch.rand((), generator=generator)))
        top = int(torch.randint(height - size + 1, (), generator=generator))
        left = int(torch.randint(width - size + 1, (), generator=generator))
        crop = photo[..., top : top + size, left : left + size]
        crop = crop if torch.rand((), generator=generator) < 0.5 else crop.flip(-1)
        found.append(torch.nn.functional.interpolate(crop, (224, 224), mode="bilinear", antialias=True))
    return torch.cat(found)


def add_hanzi(network: Network, x: Tensor) -> Tensor:
    """The Hanzi watermark, half transparent, over the middle of images (N, 3, 224, 224)."""
    from imagenet_w import AddWatermark

    add = AddWatermark(224)
    return network.preprocessing.to_inputs(torch.stack([add(image) for image in network.to_picture(x)]))


def median_rank(outputs: Tensor) -> float:
    """Median of the ranks of carton; of an even number of images the mean of the two in the middle."""
    return float(ranks(outputs, CARTON).double().quantile(0.5))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, help="photographs (default: foolbox's)")
    parser.add_argument("--limit", type=int, help="use so many photographs")
    parser.add_argument("--figure", type=Path, help="where to draw a photograph without and with watermark")
    options = parser.parse_args()
    network = load_network("efficientnet_lite0")
    x, labels = labelled_photos(network, options.images, options.limit)
    for name, images in (("clean", x), ("watermarked", add_hanzi(network, x))):
        with torch.no_grad():
            output = torch.cat([network.model(batch) for batch in images.split(16)])
        known = labels >= 0
        right = (output.argmax(1) == labels)[known].float()
        rank = median_rank(output)
        top = f"top-1 {float(right.mean()):.3f} on {len(right)}" if len(right) else "no class is known"
        print(f"{name:<12} median rank of carton {rank:g}, {top}")
    if options.figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 2.6), layout="constrained")
        for axis, image in zip(figure.subplots(1, 2), (x[0], add_hanzi(network, x[:1])[0]), strict=True):
            axis.imshow(network.to_picture(image).movedim(0, -1).numpy())
            axis.set_axis_off()
        figure.savefig(options.figure, dpi=110)
        print(f"wrote {options.figure}")


if __name__ == "__main__":
    main()
