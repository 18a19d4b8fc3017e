"""A tiny network and pictures for it: what a command needs, in a second."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from PIL import Image
from torch import nn

SIZE = 24
CLASSES = ("0_blobs", "1_bars", "2_noise")
MODEL = "tests.command.tiny:network"
#: What every command needs to know of the network.
INPUT = ("--size", str(SIZE), "--resize", str(SIZE), "--mean", "0.5", "--std", "0.25")
GXI = ("--backend", "gxi")
FIT = ("--layer", "4", "--target", "0", "--subspaces", 2, "--no-stability")


def network() -> nn.Sequential:
    """Two convolutions with fixed random weights; it tells nothing apart, but has all that a map needs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 3),
        ).eval()


def other_network() -> nn.Module:
    """The same with other weights."""
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def one_output() -> nn.Module:
    """One logit, for or against a class; here against it, for every picture."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        last = nn.Linear(16, 1)
    nn.init.constant_(last.bias, -5.0)
    return nn.Sequential(*list(network())[:-1], last).eval()


def cube() -> nn.Sequential:
    """Layer "2" gives as many features as rows and columns, whatever the size of the inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(512, 3)
        ).eval()


def transformer() -> nn.Module:
    """A ViT of nine patches and a class token."""
    from timm.models.vision_transformer import VisionTransformer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        return VisionTransformer(SIZE, 8, num_classes=3, embed_dim=16, depth=2, num_heads=2).eval()


class Gated(nn.Module):
    """A product of two paths, for which LRP has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.features = network()[:5]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)  # fixed, as in `network`
            self.gate = nn.Conv2d(16, 16, 1)
            self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.features(x)
        out: torch.Tensor = self.head((features * torch.sigmoid(self.gate(features))).mean((2, 3)))
        return out


def failing() -> NoReturn:
    """A factory that fails."""
    raise RuntimeError("the checkpoint\nis gone")


def pictures(folder: Path, n_images: int = 6, classes: tuple[str, ...] = CLASSES, seed: int = 0) -> Path:
    """One folder of PNG files for each class: blobs, bars, noise."""
    generator = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(n_images):
            pixels = generator.integers(60, 120, (SIZE, SIZE, 3))
            row, column = generator.integers(2, SIZE - 8, 2)
            if "blobs" in name:
                pixels[row : row + 7, column : column + 7] += np.array([120, 20, 0])
            elif "bars" in name:
                pixels[:, column : column + 3] += np.array([0, 100, 100])
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i:02d}.png")
    return folder
