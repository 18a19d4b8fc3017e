"""Concept ablation, with both wrappers: literal, exact where the network is linear above, model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import InputXGradient, IntegratedGradients
from drsa_core import PRCA, ProvenanceWarning, RandomSubspaces, Subspaces
from drsa_core.evaluation import ConceptAblation, compare_ablations, concept_ablation
from torch import Tensor, nn
from zennit.attribution import Gradient
from zennit.canonizers import SequentialMergeBatchNorm
from zennit.composites import EpsilonPlus

from captum_drsa import DisentangledAttribution
from zennit_drsa import DisentangledAttributor

from .model_state import model_state


class Above(nn.Module):
    """Convolution and ReLU, then a layer that sees the activation and, around it, the input."""

    def __init__(self, nonlinear: bool) -> None:
        super().__init__()
        self.below = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU())
        self.mix = nn.Conv2d(6, 5, 3, padding=1, bias=False)
        self.bend = nn.ReLU() if nonlinear else nn.Identity()
        self.flat = nn.Flatten()
        self.head = nn.Linear(5 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.flat(self.bend(self.mix(self.below(x)))))
        return y


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(1))


def model(nonlinear: bool) -> Above:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Above(nonlinear).eval()


def blocks() -> Subspaces:
    return RandomSubspaces(dims=[2, 3, 1], random_state=0).fit(torch.randn(2, 6)).subspaces_


def wrappers(network: nn.Module) -> list[DisentangledAttribution | DisentangledAttributor]:
    return [
        DisentangledAttribution(InputXGradient(network), "below", blocks()),
        DisentangledAttribution(IntegratedGradients(network), "below", blocks()),
        DisentangledAttributor(Gradient(network), "below", blocks()),
    ]


def test_drop_is_relevance_where_the_network_is_linear_above(x: Tensor) -> None:
    """y = wᵀa + b above the layer: c = w, and taking block k out lowers y by (U_kᵀa)ᵀ(U_kᵀw) = R_k."""
    for wrapper in wrappers(model(nonlinear=False)):
        result = concept_ablation(wrapper, x, 1, batch_size=2)
        torch.testing.assert_close(result.drop, result.relevance, rtol=1e-4, atol=1e-5)
        assert result.correlation == pytest.approx(1, abs=1e-6)
        assert result.correlation_within_images == pytest.approx(1, abs=1e-6)
        assert result.names == ("S1", "S2", "S3")


def test_many_subspaces_at_a_time_are_as_each_alone(x: Tensor) -> None:
    network = model(nonlinear=True)
    others = RandomSubspaces(2, random_state=1).fit(torch.randn(2, 6)).subspaces_
    before = model_state(network)
    for wrapper in wrappers(network):
        together = compare_ablations(wrapper, x, 1, [blocks(), others])
        for found, subspaces in zip(together, (blocks(), others), strict=True):
            alone = concept_ablation(wrapper, x, 1, subspaces)
            for name in ("relevance", "drop", "score"):
                # Other batch sizes sum in another order.
                torch.testing.assert_close(getattr(found, name), getattr(alone, name), rtol=1e-4, atol=1e-5)
            assert found.names == alone.names
    assert model_state(network) == before


def test_drop_is_the_literal_one(x: Tensor) -> None:
    """Image by image, position by position: a − U_kU_kᵀa, or a − U_kU_kᵀ(a − ā), and the layers above."""
    network, subspaces = model(nonlinear=True), blocks()
    target = [0, 2, 1, 1, 0]
    mean = torch.rand(6)
    for reference in (None, mean):
        expected = torch.zeros(5, 3)
        for i, label in enumerate(target):
            a = network.below(x[i : i + 1])[0]
            for k, basis in enumerate(subspaces.blocks):
                without = a.clone()
                for row in range(4):
                    for column in range(4):
                        vector = a[:, row, column] - (0 if reference is None else reference)
                        without[:, row, column] -= basis @ basis.T @ vector
                after = [
                    network.head(network.flat(network.bend(network.mix(v[None]))))[0] for v in (a, without)
                ]
                expected[i, k] = (after[0] - after[1])[label].detach()
        for wrapper in wrappers(network):
            result = concept_ablation(wrapper, x, target, reference=reference, batch_size=3)
            if reference is not None:
                of_array = concept_ablation(wrapper, x, target, reference=reference.numpy(), batch_size=3)
                assert torch.equal(of_array.drop, result.drop)
            torch.testing.assert_close(result.drop, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(result.relevance, wrapper.concept_relevance(x, target))
            torch.testing.assert_close(result.score, network(x)[range(5), target].detach())


def test_paths_around_the_layer_stay(x: Tensor) -> None:
    """A residual sum: what goes around the layer is in both scores and falls out of the drop."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.Conv2d(2, 2, 1)
            self.head = nn.Linear(2 * 16, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head((x + self.branch(x)).flatten(1))
            return y

    network = Residual().eval()
    whole = Subspaces(torch.eye(2), [2])
    wrapper = DisentangledAttribution(InputXGradient(network), "branch", whole)
    with pytest.warns(match="around"):
        result = concept_ablation(wrapper, x, 0)
    torch.testing.assert_close(result.drop[:, 0], (network(x) - network.head(x.flatten(1)))[:, 0].detach())


def normed() -> nn.Sequential:
    """A batch norm that does much, between the layer and its ReLU."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 4, 3)
        ).eval()
        norm = network[1]
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        with torch.no_grad():
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.1, 3)
            norm.weight.uniform_(0.5, 3)
            norm.bias.normal_()
    return network


def test_concepts_are_ablated_in_the_activation_that_they_are_of(x: Tensor) -> None:
    """A canonizer merges the batch norm into the layer: the activation of LRP is that of both."""
    network, subspaces = normed(), blocks()
    before = model_state(network)
    composite = EpsilonPlus(canonizers=[SequentialMergeBatchNorm()])
    wrapper = DisentangledAttributor(Gradient(network, composite), "0", subspaces)
    with torch.no_grad():
        a = network[:2](x)
        whole = network[2:](a)[:, 1]
        drops = [whole - network[2:](a - subspaces.project(a, k))[:, 1] for k in range(3)]
    expected = torch.stack(drops, 1)
    for found in (concept_ablation(wrapper, x, 1), compare_ablations(wrapper, x, 1, [subspaces])[0]):
        torch.testing.assert_close(found.drop, expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found.score, whole, rtol=1e-3, atol=1e-4)
    assert model_state(network) == before
    with wrapper:
        torch.testing.assert_close(concept_ablation(wrapper, x, 1).drop, expected, rtol=1e-3, atol=1e-4)
    assert model_state(network) == before


@pytest.mark.parametrize("backend", ["captum", "zennit"])
def test_own_subspaces_of_something_else_are_not_used_in_silence(backend: str, x: Tensor) -> None:
    def wrapper(layer: str, **options: Any) -> DisentangledAttribution | DisentangledAttributor:
        network = normed()
        if backend == "captum":
            return DisentangledAttribution(InputXGradient(network), layer, **options)
        return DisentangledAttributor(Gradient(network), layer, **options)

    learned = wrapper("0").fit([x], 1, PRCA(2)).subspaces
    assert learned is not None
    with pytest.raises(ValueError, match="layer: '0' there, '2' here"):
        concept_ablation(wrapper("2", subspaces=learned, strict=True), x, 1)
    with pytest.warns(ProvenanceWarning, match="target: 1 there, 0 here") as caught:
        concept_ablation(wrapper("0", subspaces=learned), x, 0)
    assert {warning.filename for warning in caught} == {__file__}
    # As they were learned, counted from the end or not, and those that are given on purpose: no complaint.
    own = wrapper("0", subspaces=learned, strict=True)
    with torch.no_grad():
        n_outputs = normed()(x).shape[1]
    assert torch.equal(concept_ablation(own, x, 1 - n_outputs).drop, concept_ablation(own, x, 1).drop)
    with pytest.raises(ValueError, match="target: 1 there, 0 here"):
        concept_ablation(own, x, -n_outputs)
    concept_ablation(wrapper("2", strict=True), x, 1, learned)


def test_correlations_by_hand() -> None:
    relevance = torch.tensor([[1.0, 2.0], [11.0, 12.0]])
    drop = torch.tensor([[2.0, 1.0], [12.0, 11.0]])
    result = ConceptAblation(relevance, drop, torch.zeros(2), ("a", "b"))
    # Across images they rise together (Σxy = 98, Σx² = 101 with means off), inside each they are opposed.
    assert result.correlation == pytest.approx((101 - 1 - 1) / 101, abs=1e-9)
    assert result.correlation_within_images == pytest.approx(-1)
    constant = ConceptAblation(relevance, torch.ones(2, 2), torch.zeros(2), ("a", "b"))
    assert constant.correlation != constant.correlation  # NaN: nothing to correlate with


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (r"shape \(6,\), got \(5,\)", {"reference": torch.zeros(5)}),
        ("NaN", {"reference": torch.full((6,), torch.nan)}),
        ("D = 4 features", {"subspaces": Subspaces(torch.eye(4), [4])}),
        ("3 entries", {"target": [0, 1, 2]}),
    ],
)
def test_bad_input_is_named(message: str, options: dict[str, Any], x: Tensor) -> None:
    wrapper = DisentangledAttribution(InputXGradient(model(True)), "below", blocks())
    with pytest.raises(ValueError, match=message):
        concept_ablation(wrapper, x, **{"target": 0, **options})
