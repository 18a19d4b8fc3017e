"""Models in half precision: maps are as good as their activations are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from captum.attr import (
    LRP,
    DeepLift,
    DeepLiftShap,
    FeatureAblation,
    KernelShap,
    Occlusion,
    ShapleyValueSampling,
)
from torch import Tensor, nn

from captum_drsa import DisentangledAttribution, patch_mask
from tests.captum_adapter.networks import subspaces

pytestmark = pytest.mark.filterwarnings("ignore:Setting forward, backward hooks", "ignore:.*zero activations")
HALF = (torch.bfloat16, torch.float16)


class Pooled(nn.Module):
    """A small patch changes the score, a mean over 1024 positions, by little."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.relu, self.head = nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Linear(32, 3)

    def forward(self, x: Tensor):
        return self.head(self.relu(self.conv(x)).mean((2, 3)))


def half_and_same_in_float32(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A model, and one with the very same weights that computes in float32."""
    half = Pooled().eval().to(dtype)
    return half, copy.deepcopy(half).float()


def images() -> Tensor:
    return torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FeatureAblation, {"feature_mask": patch_mask(images(), 4)}),
        (Occlusion, {"sliding_window_shapes": (3, 4, 4), "strides": (3, 4, 4)}),
        (ShapleyValueSampling, {"feature_mask": patch_mask(images(), 8), "n_samples": 5}),
        (KernelShap, {"feature_mask": patch_mask(images()[:1], 8), "n_samples": 40}),
    ],
)
def test_differences_of_relevance_are_not_taken_in_half_precision(
    dtype: torch.dtype, method, options: dict[str, Any]
) -> None:
    """R̂_k of an image and of one without a patch agree in the digits that half precision has."""
    half, single = half_and_same_in_float32(dtype)
    x = images()[:1].to(dtype)
    maps = []
    for model, inputs in ((half, x), (single, x.float())):
        torch.manual_seed(2)
        da = DisentangledAttribution(method(model), "conv", subspaces(32, 2), context_method="gradient")
        maps.append(da.attribute(inputs, target=1, **options).float())
    # Activations and contexts have one rounding or two, of up to 2⁻⁹ or 2⁻¹² each. It was 0.11 and 0.018.
    tolerance = 0.015 if dtype == torch.bfloat16 else 0.002
    torch.testing.assert_close(maps[0], maps[1], rtol=0, atol=tolerance * float(maps[1].abs().max()))


@pytest.mark.parametrize("method", [FeatureAblation, Occlusion])
def test_nor_inside_of_autocast(method) -> None:
    """There the activations of this layer are float32, and so are the sums."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 3)

        def forward(self, x: Tensor):
            return self.head(torch.relu(self.norm(x)))

    model, x = Normed().eval(), torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"sliding_window_shapes": (8,)} if method is Occlusion else {}
    u = subspaces(64, 2)
    da = DisentangledAttribution(method(model), "norm", u, context_method=lambda r: (r.activation(), context))
    context = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    expected = da.attribute(x, target=1, **options)
    with torch.autocast("cpu", torch.bfloat16):
        maps = da.attribute(x, target=1, **options)
    assert maps.dtype == torch.float32
    torch.testing.assert_close(maps, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("method", [DeepLift, LRP])
def test_convergence_delta_is_the_difference_that_there_is(dtype: torch.dtype, method) -> None:
    half, _ = half_and_same_in_float32(dtype)
    da = DisentangledAttribution(method(half), "relu", subspaces(32, 2))
    maps, delta = da.attribute(images().to(dtype), target=1, return_convergence_delta=True)
    pixels = maps.double().sum((2, 3, 4))
    if method is LRP:
        expected = da.concept_relevance(images().to(dtype), 1).double() - pixels
    else:
        expected = pixels - da.exact_totals(images().to(dtype), 1).double()
    # Sums of float32 numbers; the rounding of totals to half precision was a hundred times as large.
    torch.testing.assert_close(delta.double(), expected, rtol=0, atol=1e-5 * float(pixels.abs().max()))


@pytest.mark.parametrize("method", [DeepLift, DeepLiftShap])
def test_deep_lift_in_float16_has_no_nan(method) -> None:
    """Captum's eps of 1e-10 is 0 in float16, where an input that does not change has the slope 0 / 0."""
    half, single = half_and_same_in_float32(torch.float16)
    x = images().half()
    reference = x.flip(0)
    reference[:, :, :16] = x[:, :, :16]
    maps = []
    for model, dtype in ((half, torch.float16), (single, torch.float32)):
        da = DisentangledAttribution(method(model), "relu", subspaces(32, 2), context_method="gradient")
        maps.append(da.attribute(x.to(dtype), target=1, baselines=reference.to(dtype)).float())
    # Some ten roundings of 2⁻¹¹ or less.
    torch.testing.assert_close(maps[0], maps[1], rtol=0, atol=0.005 * float(maps[1].abs().max()))
