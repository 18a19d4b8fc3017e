"""The first axis of activations and outputs runs over the examples, or they are refused, in both adapters."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from captum.attr import (
    LRP,
    InputXGradient,
    IntegratedGradients,
    LayerIntegratedGradients,
    ShapleyValueSampling,
)
from drsa_core import RandomSubspaces, Subspaces
from torch import Tensor, nn
from zennit.attribution import Gradient, Occlusion
from zennit.attribution import IntegratedGradients as ZennitIntegratedGradients
from zennit.composites import EpsilonPlus

from captum_drsa import DisentangledAttribution
from tests.model_state import model_state
from zennit_drsa import DisentangledAttributor

pytestmark = pytest.mark.filterwarnings("ignore:.*sits on zero activations")
SUBSPACES = Subspaces(torch.eye(4), [2, 2])


class Tokens(nn.Module):
    """Tokens (N, T, 4), of which `inner` gets (T, N, 4), or windows (2N, T/2, 4)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.below, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act, self.head = nn.ReLU(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        x = self.below(x)
        x = x.transpose(0, 1) if self.kind == "sequence first" else x.reshape(2 * n, t // 2, d)
        x = self.inner(x)
        x = x.transpose(0, 1) if self.kind == "sequence first" else x.reshape(n, t, d)
        scores: Tensor = self.head(self.act(x).mean(1))
        return scores


def tokens(n: int = 2) -> Tensor:
    return torch.rand(n, 6, 4, generator=torch.Generator().manual_seed(0))


METHODS: dict[str, Any] = {
    "zennit LRP": lambda model: Gradient(model, EpsilonPlus()),
    "zennit gradient": Gradient,
    "zennit path": ZennitIntegratedGradients,
    "zennit occlusion": lambda model: Occlusion(model, window=2, stride=2),
    "captum gradient": InputXGradient,
    "captum path": IntegratedGradients,
    "captum LRP": LRP,
    "captum shapley": ShapleyValueSampling,
    "captum layer": lambda model: LayerIntegratedGradients(model, model.below),
}


def wrapped(method: str, model: nn.Module, layer: str) -> Any:
    adapter: Any = DisentangledAttributor if method.startswith("zennit") else DisentangledAttribution
    return adapter(METHODS[method](model), layer, SUBSPACES, channel_dim=-1)


@pytest.mark.parametrize("kind", ["sequence first", "windows"])
@pytest.mark.parametrize("method", METHODS)
def test_other_axes_are_refused_by_every_method(method: str, kind: str) -> None:
    model, x = Tokens(kind).eval(), tokens()
    before, run = model_state(model), wrapped(method, model, "inner")
    for call in (run.context, run.concept_relevance, run.explain):
        with pytest.raises(ValueError, match="examples, 2 here, but layer 'inner' gives shape"):
            call(x, 1)
    with pytest.raises(ValueError, match="'inner' gives shape"):
        run.fit([x], 1, solver=RandomSubspaces(2, random_state=0))
    assert model_state(model) == before


@pytest.mark.parametrize("method", METHODS)
def test_as_many_tokens_as_examples(method: str) -> None:
    """(T, N, D) with T = N looks as (N, T, D): examples and tokens were swapped, 124 % off."""
    model, x = Tokens("sequence first").eval(), tokens(6)
    run = wrapped(method, model, "inner")
    for call in (run.context, run.concept_relevance, run.explain):
        with pytest.raises(ValueError, match=r"1 here, but layer 'inner' gives .*\(6, 1, 4\).*batch_first"):
            call(x, 1)
    # Where the examples do come first, their number does not matter.
    good = wrapped(method, model, "act")
    together = good.concept_relevance(x, 1)
    alone = torch.cat([good.concept_relevance(x[i : i + 1], 1) for i in range(6)])
    tolerance = 0.2 if method == "captum shapley" else 1e-5  # which draws samples
    torch.testing.assert_close(together, alone, rtol=tolerance, atol=tolerance * float(alone.abs().max()))


@pytest.mark.parametrize("kind", ["sequence first", "windows"])
def test_layers_around_them_serve(kind: str) -> None:
    model, x = Tokens(kind).eval(), tokens()
    for layer in ("below", "act"):
        zennit = wrapped("zennit gradient", model, layer).explain(x, 1)
        captum = wrapped("captum gradient", model, layer).explain(x, 1)
        torch.testing.assert_close(zennit.maps * x[:, None], captum.maps)


def test_a_layer_below_must_have_the_examples_first_too() -> None:
    method = LayerIntegratedGradients(model := Tokens("sequence first").eval(), model.inner)
    run = DisentangledAttribution(method, "act", SUBSPACES, channel_dim=-1)
    with pytest.raises(ValueError, match="'inner' gives shape"):
        run.attribute(tokens(), target=1)


class Rows(nn.Module):
    """Images (N, 3, 8, 8) as Swin has them: patches with their features last, (N, 4, 4, 6)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.block, self.head = nn.Conv2d(3, 6, 2, 2), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.block(self.patches(x).movedim(1, -1)).mean((1, 2)))
        return scores


@pytest.mark.parametrize("adapter", ["captum", "zennit"])
def test_features_behind_rows_and_columns(adapter: str) -> None:
    """By default the four rows would be the features, and nothing would say so."""
    model, x = Rows().eval(), torch.rand(2, 3, 8, 8)

    def pairs(layer: str, **options: Any) -> Any:
        run: Any
        if adapter == "captum":
            run = DisentangledAttribution(InputXGradient(model), layer, **options)
        else:
            run = DisentangledAttributor(Gradient(model), layer, **options)
        return run.collect([x], 1, positions=None)

    with pytest.warns(UserWarning, match=r"tokens of 6 features.*set channel_dim=-1"):
        pairs("block")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pairs("block", channel_dim=-1).a.shape == (2 * 4 * 4, 6)
        assert pairs("patches").a.shape == (2 * 4 * 4, 6)  # a convolution has them first


class SequenceFirst(Tokens):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.below(x))).transpose(0, 1)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "captum layer"])
def test_outputs_that_have_other_things_first_are_refused(method: str) -> None:
    """Of outputs (T, N, 3) the index (1, 2) is that of example 1 alone: the maps of all others were zero."""
    run = wrapped(method, SequenceFirst("").eval(), "act")
    for use in (run.explain, run.context, run.concept_relevance):
        with pytest.raises(ValueError, match=r"one row for each of the 2 examples, got shape \(6, 2, 3\)"):
            use(tokens(), (1, 2))
