"""Models whose examples depend on chance or on each other: there is a warning, in both adapters."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from captum.attr import InputXGradient, IntegratedGradients, ShapleyValueSampling
from drsa_core import RelevanceLossWarning, Subspaces
from torch import Tensor, nn
from torchvision.ops import StochasticDepth
from zennit.attribution import Gradient

from captum_drsa import DisentangledAttribution
from zennit_drsa import DisentangledAttributor


class Residual(nn.Module):
    """`middle` in a branch above the layer `act`."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.middle, self.head = nn.Linear(4, 8), nn.ReLU(), middle, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        scores: Tensor = self.head(x + self._branch(x))
        return scores

    def _branch(self, x: Tensor) -> Tensor:
        attends = isinstance(self.middle, nn.MultiheadAttention)
        return self.middle(x, x, x)[0] if attends else self.middle(x)


def split() -> Subspaces:
    return Subspaces(torch.eye(8), [4, 4])


def vectors(n: int = 6) -> Tensor:
    return torch.rand(n, 4, generator=torch.Generator().manual_seed(0))


METHODS: dict[str, Any] = {
    "zennit": lambda model: DisentangledAttributor(Gradient(model), "act", split()),
    "captum": lambda model: DisentangledAttribution(InputXGradient(model), "act", split()),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "middle",
    [
        lambda: StochasticDepth(0.5, "row"),
        lambda: nn.RReLU(),
        lambda: nn.MultiheadAttention(8, 2, dropout=0.5),
    ],
    ids=["StochasticDepth", "RReLU", "MultiheadAttention"],
)
def test_modules_that_are_random_in_training_mode(middle: Any, method: str) -> None:
    model = Residual(middle()).train()
    with pytest.warns(UserWarning, match=r"'middle' \(\w+\) is in training mode"):
        METHODS[method](model).explain(vectors(), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        METHODS[method](model.eval()).explain(vectors(), 1)


@pytest.mark.parametrize("method", METHODS)
def test_batch_norms_without_statistics(method: str) -> None:
    model = Residual(nn.BatchNorm1d(8, track_running_stats=False)).eval()
    with pytest.warns(UserWarning, match="'middle' .* statistics of the batch, in evaluation mode too"):
        METHODS[method](model).explain(vectors(), 1)


class Centred(nn.Module):
    """Takes the mean of its batch away."""

    def forward(self, x: Tensor) -> Tensor:
        return -x.mean(0, keepdim=True).expand_as(x)


@pytest.mark.parametrize("method", [IntegratedGradients, ShapleyValueSampling])
def test_contexts_that_are_found_example_by_example(method: Any) -> None:
    da = DisentangledAttribution(method(Residual(Centred())), "act", split())
    with pytest.warns(UserWarning, match="another score in its batch than among copies of itself"):
        da.concept_relevance(vectors(), 1)


def test_what_goes_around_in_half_precision() -> None:
    """12 288 gradients of 64 sum to more than float16 can hold: the share was 0, without a warning."""
    shares = []
    for dtype in (torch.float32, torch.float16):
        model: Any = nn.Sequential(nn.Conv2d(3, 8, 1), Around(), nn.Conv2d(8, 2, 1), Total()).to(dtype).eval()
        for parameter in model.parameters():
            parameter.data.fill_(1.0)
        da = DisentangledAttribution(InputXGradient(model), "1.inner", split())
        with pytest.warns(RelevanceLossWarning, match="goes around layer"):
            found = da.explain(torch.full((1, 3, 64, 64), 1e-3, dtype=dtype), 0, whole=False)
        shares.append(found.losses.around_the_layer)
    # All gradients are small whole numbers, exact in both precisions.
    assert shares[0] == shares[1] == pytest.approx(1 / 9)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum((2, 3))
