"""Toy networks, inputs and subspaces that many tests share."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from drsa_core import RandomSubspaces, Subspaces
from torch import Tensor, nn
from torchvision.models import resnet18, vgg11, vgg11_bn
from zennit.core import Composite


def subspaces(n_features: int, n_subspaces: int = 3, dims: list[int] | None = None) -> Subspaces:
    """Random complete subspaces in float64, or those of the given sizes."""
    data = torch.zeros(1, n_features, dtype=torch.float64)
    return RandomSubspaces(n_subspaces, dims, random_state=0).fit(data).subspaces_


class Skip(nn.Module):
    """Convolutions with in-place ReLUs, batch norm, pooling, a path around `inner`; 6 features throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.inner = nn.Conv2d(6, 6, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.middle = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(6 * 16, 5)
        self.unused = nn.ReLU()

    def lower(self, x: Tensor) -> Tensor:
        """The output of `pool`."""
        x = self.stem(x)
        x = x + self.inner(x)
        pooled: Tensor = self.pool(self.relu(x))
        return pooled

    def upper(self, a: Tensor) -> Tensor:
        output: Tensor = self.head(self.act(self.middle(a)).flatten(1))
        return output

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(self.lower(x))


def small_model(dtype: torch.dtype = torch.float64) -> Skip:
    torch.manual_seed(0)
    model = Skip()
    randomise_batch_norm(model)
    return model.to(dtype).eval()


def small_input(n: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    """Inputs (N, 3, 8, 8) of `Skip`."""
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=dtype)


def vectors(n: int = 3, n_features: int = 6) -> Tensor:
    """Positive inputs (N, D)."""
    return torch.rand(n, n_features, generator=torch.Generator().manual_seed(1)) + 0.1


class Around(nn.Module):
    """x + inner(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = x + self.inner(x)
        return total


def randomise_batch_norm(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = torch.randn(module.num_features) / 10
            module.running_var = torch.rand(module.num_features) + 0.5
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
    return model


def torchvision_model(name: str) -> nn.Module:
    """A torchvision network in eval mode with random batch norm, and a small head in place of VGG's."""
    torch.manual_seed(0)
    model: nn.Module
    if name == "resnet18":
        model = resnet18(weights=None, num_classes=10)
    else:
        model = {"vgg11": vgg11, "vgg11_bn": vgg11_bn}[name](weights=None, init_weights=False, num_classes=10)
        model.classifier = nn.Sequential(
            nn.Linear(512 * 49, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, 10)
        )
    return randomise_batch_norm(model).eval()


def arriving_at(
    model: nn.Module, composite: Composite | None, layer: str, input: Tensor, start: Any
) -> tuple[Tensor, Tensor]:
    """Activation at a layer, and what arrives there below every hook of the composite on it.

    `start` is a tensor, or a function of the output.
    """
    kept: list[Tensor] = []

    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        kept.append(output)

    # Before the composite: its hooks, the filter's among them, come after this one.
    handle = model.get_submodule(layer).register_forward_hook(hook)
    try:
        with nullcontext() if composite is None else composite.context(model):
            output = model(input.clone().requires_grad_())
            activation = kept[-1].detach().clone()
            start = start(output) if callable(start) else start
            (arriving,) = torch.autograd.grad(output, kept[-1], start)
    finally:
        handle.remove()
    return activation, arriving
