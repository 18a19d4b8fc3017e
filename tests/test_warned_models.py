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
from tests.toys import Around, vectors
from zennit_drsa import DisentangledAttributor

SPLIT = Subspaces(torch.eye(8), [4, 4])


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x)[0]


class Centred(nn.Module):
    """Takes the mean of its batch away."""

    def forward(self, x: Tensor) -> Tensor:
        return -x.mean(0, keepdim=True).expand_as(x)


def network(middle: nn.Module) -> nn.Sequential:
    """With `middle` in a branch above the layer "1"."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Around(middle), nn.Linear(8, 3))


WRAPPERS: dict[str, Any] = {
    "zennit": lambda model: DisentangledAttributor(Gradient(model), "1", SPLIT),
    "captum": lambda model: DisentangledAttribution(InputXGradient(model), "1", SPLIT),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "make",
    [lambda: StochasticDepth(0.5, "row"), nn.RReLU, lambda: SelfAttention(8, 2, dropout=0.5)],
    ids=["StochasticDepth", "RReLU", "MultiheadAttention"],
)
def test_modules_that_are_random_in_training_mode(make: Any, wrapper: str) -> None:
    model = network(make()).train()
    with pytest.warns(UserWarning, match=r"'2.inner' \(\w+\) is in training mode"):
        WRAPPERS[wrapper](model).explain(vectors(), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        WRAPPERS[wrapper](model.eval()).explain(vectors(), 1)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_batch_norms_without_statistics(wrapper: str) -> None:
    model = network(nn.BatchNorm1d(8, track_running_stats=False)).eval()
    with pytest.warns(UserWarning, match="'2.inner' .* statistics of the batch, in evaluation mode too"):
        WRAPPERS[wrapper](model).explain(vectors(), 1)


@pytest.mark.parametrize("method", [IntegratedGradients, ShapleyValueSampling])
def test_contexts_that_are_found_example_by_example(method: Any) -> None:
    run = DisentangledAttribution(method(network(Centred())), "1", SPLIT)
    with pytest.warns(UserWarning, match="another score in its batch than among copies of itself"):
        run.concept_relevance(vectors(), 1)


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum((2, 3))


def test_what_goes_around_in_half_precision() -> None:
    """12 288 gradients of 64 sum to more than float16 can hold: the share was 0, without a warning."""
    shares = []
    for dtype in (torch.float32, torch.float16):
        model = nn.Sequential(nn.Conv2d(3, 8, 1), Around(nn.Conv2d(8, 8, 1)), nn.Conv2d(8, 2, 1), Total()).to(
            dtype
        )
        for parameter in model.eval().parameters():
            parameter.data.fill_(1.0)
        run = DisentangledAttribution(InputXGradient(model), "1.inner", SPLIT)
        with pytest.warns(RelevanceLossWarning, match="goes around layer"):
            found = run.explain(torch.full((1, 3, 64, 64), 1e-3, dtype=dtype), 0, whole=False)
        shares.append(found.losses.around_the_layer)
    # All gradients are small whole numbers, exact in both precisions.
    assert shares[0] == shares[1] == pytest.approx(1 / 9)
