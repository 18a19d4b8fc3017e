"""Models that work in place on their additional forward arguments: each forward pass has its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import (
    LRP,
    DeepLift,
    FeatureAblation,
    InputXGradient,
    IntegratedGradients,
    KernelShap,
    LayerDeepLift,
    LayerIntegratedGradients,
    NoiseTunnel,
    ShapleyValueSampling,
)
from torch import Tensor, nn

from captum_drsa import DisentangledAttribution
from tests.captum_adapter.networks import subspaces


class Masked(nn.Module):
    """Halves its mask, in place or not; the mask may come in a dictionary."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below, self.act, self.head = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)
        self.in_place = in_place
        self.eval()

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        mask = mask["mask"] if isinstance(mask, dict) else mask
        mask = mask.mul_(0.5) if self.in_place else mask * 0.5
        scores: Tensor = self.head(self.act(self.below(x * mask)))
        return scores


def vectors() -> Tensor:
    return torch.rand(3, 6, generator=torch.Generator().manual_seed(1)) + 0.1


def masks(with_rows: bool) -> Tensor:
    return torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 6).clone() if with_rows else torch.full((6,), 2.0)


def explained(
    method, in_place: bool, with_rows: bool, target: Any, is_function: bool = False
) -> list[Tensor]:
    model, mask = Masked(in_place), masks(with_rows)
    forward = (lambda x, mask: model(x, mask)) if is_function else model
    torch.manual_seed(0)
    run = DisentangledAttribution(method(forward), model.act, subspaces(8))
    found = run.explain(vectors(), target, additional_forward_args=mask)
    assert torch.equal(mask, masks(with_rows))
    whole = [] if found.whole is None else [found.whole]
    return [found.maps, found.concept_relevance, found.score, *whole]


def in_tunnel(forward) -> NoiseTunnel:
    return NoiseTunnel(InputXGradient(forward))


METHODS: list[Any] = [LRP, DeepLift, FeatureAblation, InputXGradient, IntegratedGradients, KernelShap]
METHODS += [ShapleyValueSampling, in_tunnel]
#: Method, whether the mask has rows, whether the forward function is no module (which some need). Without
#: rows Captum itself fails with the others: it repeats every tensor as if it had a row for each example.
CASES = [
    *[(method, True, False) for method in METHODS],
    *[(method, True, True) for method in METHODS if method not in (LRP, DeepLift)],
    *[(method, False, False) for method in (LRP, FeatureAblation, InputXGradient, ShapleyValueSampling)],
]


@pytest.mark.filterwarnings("ignore:Setting forward", "ignore:.*sits on zero", "ignore:You are providing")
@pytest.mark.parametrize("target", [1, lambda output: output[:, 1] - output[:, 2]], ids=["index", "function"])
@pytest.mark.parametrize(("method", "with_rows", "is_function"), CASES)
def test_all_methods(method, with_rows: bool, is_function: bool, target: Any) -> None:
    pairs = zip(
        explained(method, True, with_rows, target, is_function),
        explained(method, False, with_rows, target, is_function),
        strict=True,
    )
    for here, there in pairs:
        assert torch.equal(here, there)


def test_contexts_and_layer_methods() -> None:
    def found(in_place: bool) -> list[Tensor]:
        model, mask = Masked(in_place), masks(True)
        layer = DisentangledAttribution(
            InputXGradient(model), "act", subspaces(8), LayerDeepLift(model, model.act)
        )
        below = DisentangledAttribution(LayerIntegratedGradients(model, model.below), "act", subspaces(8))
        lrp = DisentangledAttribution(InputXGradient(model), "act", subspaces(8), "lrp")
        results = [
            layer.context(vectors(), 1, mask)[1],
            below.attribute(vectors(), target=1, additional_forward_args=mask),
            lrp.context(vectors(), 1, mask)[1],
            lrp.exact_totals(vectors(), 1, additional_forward_args=mask),
        ]
        assert torch.equal(mask, masks(True))
        return results

    for here, there in zip(found(True), found(False), strict=True):
        assert torch.equal(here, there)


def test_tensors_in_dictionaries() -> None:
    def maps(in_place: bool) -> Tensor:
        model, mask = Masked(in_place), masks(False)
        run = DisentangledAttribution(InputXGradient(model), "act", subspaces(8))
        found: Tensor = run.attribute(vectors(), target=1, additional_forward_args=({"mask": mask},))
        assert torch.equal(mask, masks(False))
        return found

    assert torch.equal(maps(True), maps(False))
