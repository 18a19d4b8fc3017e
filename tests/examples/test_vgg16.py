"""The example of the paper's setting runs as a user runs it, on a small VGG with random weights."""

from __future__ import annotations

import re

import pytest

from .running import run

FACTORY = """
import torch
from torch import nn

class SmallVGG(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(8),
            nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(8, 3))

    def forward(self, x):
        return self.classifier(self.features(x))

def factory():
    torch.manual_seed(0)
    return SmallVGG()
"""


def test_concepts_of_a_vgg(tmp_path) -> None:
    for package in ("skimage", "zennit", "matplotlib"):
        pytest.importorskip(package)
    from photographs import find_photo, random_crops

    (tmp_path / "models.py").write_text(FACTORY)
    (tmp_path / "train").mkdir()
    for n, crop in enumerate(random_crops(find_photo("coffee"), 3)):
        crop.save(tmp_path / "train" / f"{n}.png")
    figure, model = tmp_path / "vgg.png", f"{tmp_path / 'models.py'}:factory"
    options = ("--layer", "features.4", "--pairs", "60", "--concepts", "2", "--figure", figure)
    printed = run("vgg16.py", "--model", model, "--train", tmp_path / "train", *options)
    assert "features.4, 3 images to learn from" in printed
    error = re.search(r"against the whole map: off by ([\d.e-]+)", printed)
    assert error is not None
    assert float(error[1]) < 1e-5  # float32, as in the design's table
    assert figure.stat().st_size > 10_000
