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
from drsa_core.collection import collect_pairs
from torch import Tensor, nn
from zennit.attribution import Gradient, Occlusion
from zennit.attribution import IntegratedGradients as ZennitIntegratedGradients
from zennit.composites import EpsilonPlus

from captum_drsa import DisentangledAttribution
from tests.model_state import model_state
from zennit_drsa import DisentangledAttributor

SUBSPACES = Subspaces(torch.eye(4), [2, 2])


class Tokens(nn.Module):
    """Tokens (N, T, 4), of which `inner` gets (T, N, 4), or windows (2N, T/2, 4)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.below, self.inner, self.act, self.head = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.ReLU(),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        x = self.below(x)
        x = x.transpose(0, 1) if self.kind == "sequence first" else x.reshape(2 * n, t // 2, d)
        x = self.inner(x)
        x = x.transpose(0, 1) if self.kind == "sequence first" else x.reshape(n, t, d)
        scores: Tensor = self.head(self.act(x).mean(1))
        return scores


def tokens() -> Tensor:
    return torch.rand(2, 6, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["sequence first", "windows"])
@pytest.mark.parametrize(
    "method",
    [
        lambda model: Gradient(model, EpsilonPlus()),
        ZennitIntegratedGradients,
        lambda model: Occlusion(model, window=2, stride=2),
        InputXGradient,
        IntegratedGradients,
        LRP,
        ShapleyValueSampling,
        lambda model: LayerIntegratedGradients(model, model.below),
    ],
)
def test_other_axes_are_refused_by_every_method(method, kind: str) -> None:
    model, x = Tokens(kind).eval(), tokens()
    before = model_state(model)
    attributor = method(model)
    is_captum = type(attributor).__module__.startswith("captum")
    adapter: Any = DisentangledAttribution if is_captum else DisentangledAttributor
    run = adapter(attributor, "inner", SUBSPACES, channel_dim=-1)
    shape = r"\(6, 2, 4\).*batch_first=True" if kind == "sequence first" else r"\(4, 3, 4\)"
    for call in (run.context, run.concept_relevance, run.explain):
        with pytest.raises(ValueError, match=rf"examples, 2 here, but layer 'inner' gives shape {shape}"):
            call(x, 1)
    with pytest.raises(ValueError, match="'inner' gives shape"):
        run.fit([x], 1, solver=RandomSubspaces(2, random_state=0))
    assert model_state(model) == before


@pytest.mark.parametrize("kind", ["sequence first", "windows"])
def test_layers_around_them_serve(kind: str) -> None:
    model, x = Tokens(kind).eval(), tokens()
    for layer in ("below", "act"):
        zennit = DisentangledAttributor(Gradient(model), layer, SUBSPACES, channel_dim=-1)
        captum = DisentangledAttribution(InputXGradient(model), layer, SUBSPACES, channel_dim=-1)
        torch.testing.assert_close(zennit.explain(x, 1).maps * x[:, None], captum.explain(x, 1).maps)


def test_a_layer_below_must_have_the_examples_first_too() -> None:
    method = LayerIntegratedGradients(model := Tokens("sequence first").eval(), model.inner)
    run = DisentangledAttribution(method, "act", SUBSPACES, channel_dim=-1)
    with pytest.raises(ValueError, match="'inner' gives shape"):
        run.attribute(tokens(), target=1)


def test_contexts_of_a_function_must_have_the_examples_first() -> None:
    def context(inputs: Any, target: Any) -> tuple[Tensor, Tensor]:
        return torch.rand(6, 2, 4), torch.rand(6, 2, 4)

    origin: dict[str, Any] = {"backend": "own", "method": "own", "layer": "inner", "model": None}
    with pytest.raises(ValueError, match=r"context of 2 examples .* \(6, 2, 4\)"):
        collect_pairs(context, [tokens()], 0, channel_dim=-1, **origin)


class Rows(nn.Module):
    """Images (N, 3, 8, 8) as Swin has them: patches with their features last, (N, 4, 4, 6)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.block, self.head = nn.Conv2d(3, 6, 2, 2), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.block(self.patches(x).movedim(1, -1)).mean((1, 2)))
        return scores


@pytest.mark.parametrize("backend", ["captum", "zennit"])
def test_features_behind_rows_and_columns(backend: str) -> None:
    """By default the four rows would be the features, and nothing would say so."""
    model, x = Rows().eval(), torch.rand(2, 3, 8, 8)

    def pairs(layer: str, **options: Any) -> Any:
        run: Any
        if backend == "captum":
            run = DisentangledAttribution(InputXGradient(model), layer, **options)
        else:
            run = DisentangledAttributor(Gradient(model), layer, **options)
        return run.collect([x], 1, positions=None)

    with pytest.warns(UserWarning, match=r"of 6 features.*set channel_dim=-1"):
        pairs("block")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pairs("block", channel_dim=-1).a.shape == (2 * 4 * 4, 6)
        assert pairs("patches").a.shape == (2 * 4 * 4, 6)  # a convolution has them first


@pytest.mark.parametrize(
    "method",
    [
        lambda model: DisentangledAttribution(InputXGradient(model), "act", SUBSPACES, channel_dim=-1),
        lambda model: DisentangledAttribution(IntegratedGradients(model), "act", SUBSPACES, channel_dim=-1),
        lambda model: DisentangledAttribution(ShapleyValueSampling(model), "act", SUBSPACES, channel_dim=-1),
        lambda model: DisentangledAttribution(LRP(model), "act", SUBSPACES, channel_dim=-1),
        lambda model: DisentangledAttributor(Gradient(model), "act", SUBSPACES, channel_dim=-1),
        lambda model: DisentangledAttributor(
            Gradient(model, EpsilonPlus()), "act", SUBSPACES, channel_dim=-1
        ),
    ],
)
def test_outputs_that_have_other_things_first_are_refused(method) -> None:
    """Of outputs (T, N, 3) the index (1, 2) is that of example 1 alone: the maps of all others were zero."""

    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.act, self.head = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.below(x))).transpose(0, 1)

    run = method(SequenceFirst().eval())
    for use in (run.explain, run.context, run.concept_relevance):
        with pytest.raises(ValueError, match=r"one row for each of the 2 examples, got shape \(6, 2, 3\)"):
            use(tokens(), (1, 2))
