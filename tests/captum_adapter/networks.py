"""Small networks with known parts, and subspaces for them."""

from __future__ import annotations

import torch
from drsa_core import RandomSubspaces, Subspaces
from torch import Tensor, nn


def subspaces(n_features: int, n_subspaces: int = 3, dtype: torch.dtype = torch.float32) -> Subspaces:
    """Complete random subspaces."""
    return (
        RandomSubspaces(n_subspaces, random_state=0).fit(torch.zeros(1, n_features, dtype=dtype)).subspaces_
    )


class ConvNet(nn.Module):
    """Convolutions, pooling, in-place ReLU, two nonlinear layers above `layer`. Flattens by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1),
            nn.ReLU(inplace=True),
        )
        self.top = nn.Sequential(nn.Conv2d(8, 10, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(10, 5)

    def forward(self, x: Tensor):
        return self.classifier(self.top(self.features(x)).flatten(1))


class TwoInputs(nn.Module):
    """Two inputs, a scale as a tensor argument and a power as a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(3, 6)
        self.layer = nn.ReLU()
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor, scale: Tensor | None = None, power: int = 1):
        a = self.layer(self.one(x) + self.two(y))
        if scale is not None:
            a = a * scale[:, None]
        return self.out(a) ** power


class Tokens(nn.Module):
    """Activations (N, T, D): features along the last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.layer = nn.ReLU()
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor):
        return self.head(self.mix(self.layer(self.embed(x))).relu().mean(1))


def conv_net(seed: int = 0) -> ConvNet:
    torch.manual_seed(seed)
    return ConvNet().eval()


def images(n: int = 2, size: int = 12, seed: int = 1) -> Tensor:
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed))
