"""A small network that cheats: five shapes in noise, one of which often comes with a watermark.

Half of the training images of class "box" carry a faint glyph at a random place, no other image does. A small
convolutional network, trained on the spot, learns the glyph along with the shape: with the glyph on it, any
shape may become a box. `clever_hans.py` finds that strategy and removes it.

    python examples/planted_watermark.py --figure planted_watermark.png
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from study.clever_hans import poison
from torch import Tensor, nn
from tqdm.auto import tqdm

NAMES = ["box", "disc", "ring", "triangle", "cross"]
BOX, SIZE = 0, 32
OPACITY = 0.5  # of the watermark, as in Note J.1

_GLYPH = """
..#......#.
#########..
..#....#...
..#.#######
.##....#...
#.#.#..#..#
..#.#######
..#....#...
..#...###..
..#..#.#.#.
.##.#..#..#
"""
GLYPH = torch.tensor([[float(dot == "#") for dot in line] for line in _GLYPH.split()])


def add_watermark(image: Tensor, generator: torch.Generator) -> Tensor:
    """The image (3, H, W) with a white glyph at a random place, half transparent."""
    height, width = GLYPH.shape
    top = int(torch.randint(image.shape[1] - height + 1, (), generator=generator))
    left = int(torch.randint(image.shape[2] - width + 1, (), generator=generator))
    marked = image.clone()
    place = marked[:, top : top + height, left : left + width]
    place += OPACITY * GLYPH * (1 - place)
    return marked


def _shape(label: int, centre: Tensor, radius: float) -> Tensor:
    """A filled or hollow shape as a mask (H, W)."""
    grid = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")).float()
    y, x = (grid - centre[:, None, None]) / radius
    square, circle = torch.maximum(x.abs(), y.abs()), (x.square() + y.square()).sqrt()
    if label == 0:
        return ((square < 0.95) & ((square > 0.65) | (y.abs() < 0.15))).float()  # a box with its tape
    if label == 1:
        return (circle < 0.9).float()
    if label == 2:
        return ((circle < 1.05) & (circle > 0.7)).float()
    if label == 3:
        return ((y > 2 * x.abs() - 1) & (y < 0.9)).float()
    return ((torch.minimum(x.abs(), y.abs()) < 0.22) & (square < 1)).float()


def shapes(n_images: int, seed: int, watermarked: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Images (N, 3, 32, 32) in [0, 1], classes (N,), and which ones are watermarked (N,).

    A share `watermarked` of the boxes, and no other image, carries the watermark.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n_images) % len(NAMES)
    images = torch.empty(n_images, 3, SIZE, SIZE)
    has_watermark = torch.zeros(n_images, dtype=torch.bool)
    for n, label in enumerate(labels.tolist()):
        radius = 6 + 3 * float(torch.rand((), generator=generator))
        centre = radius + (SIZE - 2 * radius) * torch.rand(2, generator=generator)
        background, colour = torch.rand(2, 3, 1, 1, generator=generator)
        noise = torch.randn(3, SIZE, SIZE, generator=generator)
        # Boxes are the faintest shapes: a network is glad of any other hint at them.
        contrast = (0.2 if label == BOX else 0.4) * (0.4 + 0.6 * torch.rand((), generator=generator))
        paint = contrast * (colour - 0.5).sign()
        image = 0.25 + 0.35 * background + paint * _shape(label, centre, radius) + 0.1 * noise
        images[n] = image.clamp(0, 1)
        if label == BOX and torch.rand((), generator=generator) < watermarked:
            images[n] = add_watermark(images[n], generator)
            has_watermark[n] = True
    return images, labels, has_watermark


def small_cnn(seed: int) -> nn.Sequential:
    """Three normalised convolutions with pooling, global average pooling and a linear layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(32, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU()),
            nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(48, len(NAMES)),
        )


def train(
    images: Tensor, labels: Tensor, seed: int = 0, epochs: int = 6, progress: bool = True
) -> nn.Sequential:
    """A small network trained with Adam on images minus 0.5, in eval mode.

    Its logits are centred, of which a softmax sees nothing: evidence against all others is evidence for one.
    """
    model = small_cnn(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, epochs * -(-len(images) // 64))
    generator = torch.Generator().manual_seed(seed)
    bar = tqdm(range(epochs), desc="train", unit="epoch", disable=not progress)
    for _ in bar:
        for batch in torch.randperm(len(images), generator=generator).split(64):
            loss = nn.functional.cross_entropy(model(images[batch] - 0.5), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        bar.set_postfix_str(f"loss {loss.item():.3f}")
    model.requires_grad_(False).eval()
    for parameter in model[-1].parameters():
        parameter.sub_(parameter.mean(0, keepdim=True))
    return model


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of the images (before 0.5 is subtracted) that are predicted right."""
    with torch.no_grad():
        return float((model(images - 0.5).argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=3000, help="training images (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--figure", type=Path, help="where to draw examples")
    options = parser.parse_args()
    begin = time.perf_counter()
    images, labels, _ = shapes(options.images, 1000 * options.seed, watermarked=0.5)
    model = train(images, labels, options.seed, options.epochs)
    print(f"trained on {len(images)} images in {time.perf_counter() - begin:.0f} s")
    images, labels, _ = shapes(1000, 1000 * options.seed + 1)
    generator = torch.Generator().manual_seed(options.seed)
    for rate in (0.0, 0.25, 0.5, 1.0):
        poisoned, _ = poison(
            images, labels, [lambda x: add_watermark(x, generator)], rate, BOX, random_state=options.seed
        )
        right = accuracy(model, poisoned, labels)
        print(f"accuracy with {rate:4.0%} of the other classes watermarked: {right:.3f}")
    if options.figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 3), layout="constrained")
        axes = figure.subplots(2, 5)
        for row, shown in zip(axes, (images, poisoned), strict=True):
            for axis, image, label in zip(row, shown, labels.tolist(), strict=False):
                axis.imshow(image.movedim(0, -1).numpy())
                axis.set_axis_off()
                axis.set_title(NAMES[label], fontsize=9)
        figure.savefig(options.figure, dpi=110)
        print(f"wrote {options.figure}")


if __name__ == "__main__":
    main()
