"""Modules that run more than once in a forward pass: right, or refused; never wrong in silence."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zennit.attribution import Gradient, IntegratedGradients, Occlusion, SmoothGrad
from zennit.composites import EpsilonPlus, GuidedBackprop, LayerMapComposite
from zennit.core import Composite
from zennit.rules import Pass

from tests.model_state import model_state
from tests.toys import subspaces
from zennit_drsa import ConvNetGamma, DisentangledAttributor, doctor
from zennit_drsa.rules import PositiveGamma, ZeroRule


class Tied(nn.Module):
    """A linear layer that runs three times, or three copies of it; one ReLU serves all."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below, self.relu, self.middle = nn.Linear(6, 6), nn.ReLU(), nn.ReLU()
        self.last, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.inner = nn.Linear(6, 6)
        for layer in (self.below, self.inner, self.last, self.head):
            nn.init.uniform_(layer.weight, -0.1, 0.5)  # so that no map is zero
        others = [self.inner if is_tied else copy.deepcopy(self.inner) for _ in range(2)]
        self.chain = nn.ModuleList([self.inner, *others])
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.below(x))
        for layer in self.chain:
            x = self.relu(layer(x))
        x = checkpoint(self._top, x, use_reentrant=False) if self.checkpointed else self._top(x)
        scores: Tensor = self.head(x)
        return scores

    def _top(self, x: Tensor) -> Tensor:
        result: Tensor = self.middle(self.last(x))
        return result


def vectors() -> Tensor:
    return torch.rand(3, 6, generator=torch.Generator().manual_seed(1)) + 0.1


def of_linear(rule) -> Composite:
    return LayerMapComposite([(nn.ReLU, Pass()), (nn.Linear, rule)])


@pytest.mark.parametrize(
    "composite", [EpsilonPlus, lambda: of_linear(PositiveGamma()), lambda: of_linear(ZeroRule())]
)
@pytest.mark.parametrize("attributor", [Gradient, IntegratedGradients, SmoothGrad, Occlusion])
def test_rules_that_remember_one_run_are_refused(composite, attributor) -> None:
    model, x = Tied(True).eval(), vectors()
    before = model_state(model)
    run = DisentangledAttributor(attributor(model, composite()), "middle", subspaces(8))
    for call in (run.context, run.concept_relevance, run.explain):
        with pytest.raises(ValueError, match=r"'inner' \(Linear\) runs more than once .* wrong\. Give each"):
            call(x, 1)
    with pytest.raises(ValueError, match="runs more than once"):
        run(x, torch.eye(5)[[1] * 3])
    assert model_state(model) == before
    untied = DisentangledAttributor(attributor(Tied(False).eval(), composite()), "middle", subspaces(8))
    assert untied.explain(x, 1).maps.shape == (3, 3, 6)


@pytest.mark.parametrize(
    "composite", [lambda: ConvNetGamma(0.25, canonizers=[]), lambda: None, GuidedBackprop]
)
def test_rules_that_remember_nothing_are_right(composite) -> None:
    x = vectors()
    models = Tied(True).eval(), Tied(False).eval()
    tied, untied = (
        DisentangledAttributor(Gradient(model, composite()), "middle", subspaces(8)).explain(x, 1)
        for model in models
    )
    torch.testing.assert_close(tied.maps, untied.maps)
    assert tied.maps.abs().max() > 0


def test_a_run_without_a_graph_does_harm_only_behind_one_with_a_graph() -> None:
    class Twice(nn.Module):
        def __init__(self, is_first: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.act, self.head = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)
            self.is_first = is_first

        def forward(self, x: Tensor) -> Tensor:
            if self.is_first:
                with torch.no_grad():
                    self.layer(x * 2)
            result = self.head(self.act(self.layer(x)))
            if not self.is_first:
                with torch.no_grad():
                    self.layer(x * 2)
            return result

    def explain(is_first: bool) -> Tensor:
        run = DisentangledAttributor(Gradient(Twice(is_first).eval(), EpsilonPlus()), "act", subspaces(8))
        return run.explain(vectors(), 1).maps

    assert explain(True).shape == (3, 3, 6)
    with pytest.raises(ValueError, match=r"'layer' .* more than once"):
        explain(False)


def test_doctor_finds_them() -> None:
    model = Tied(True).eval()
    before = model_state(model)
    diagnosis = doctor(model, EpsilonPlus(), vectors(), 1, verbose=False)
    assert diagnosis.reused == ["inner (Linear: Epsilon)"]
    assert not diagnosis.ok
    assert "inner (Linear: Epsilon) runs more than once" in diagnosis.findings
    assert "| modules that run more than once | 1: inner (Linear: Epsilon) |" in str(diagnosis)
    assert "copy.deepcopy" in str(diagnosis.suggestion)
    assert model_state(model) == before
    assert doctor(Tied(False).eval(), EpsilonPlus(), vectors(), 1, verbose=False).ok
