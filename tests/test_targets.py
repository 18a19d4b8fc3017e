"""One target for each example: every sequence of them is treated as a list, in both adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import LRP, IntegratedGradients
from drsa_core import Subspaces
from torch import Tensor, nn
from zennit.attribution import Gradient
from zennit.attribution import IntegratedGradients as ZennitIntegratedGradients
from zennit.composites import EpsilonPlus

from captum_drsa import DisentangledAttribution
from zennit_drsa import DisentangledAttributor


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 5)).eval()


def vectors() -> Tensor:
    return torch.rand(4, 6, generator=torch.Generator().manual_seed(0))


def in_place(output: Tensor) -> Tensor:
    """The second score, with the others overwritten."""
    output[:, 2:] = 0
    return output.sub_(1)[:, 1]


def one_hot_in_place(output: Tensor) -> Tensor:
    """What Zennit starts from for the second score."""
    output.zero_()
    output[:, 1] = 1
    return output


METHODS: list[Any] = [
    lambda: DisentangledAttributor(Gradient(network()), "1"),
    lambda: DisentangledAttributor(ZennitIntegratedGradients(network()), "1"),
    lambda: DisentangledAttribution(IntegratedGradients(network()), "1"),
]


@pytest.mark.parametrize("method", METHODS)
def test_a_range_is_a_list(method) -> None:
    x = vectors()
    expected = method().context(x, [0, 1, 2, 3])[1]
    assert torch.equal(method().context(x, range(4))[1], expected)
    run = method()
    run.subspaces = Subspaces(torch.eye(4), [2, 2])
    assert torch.equal(run.explain(x, range(4)).score, run.explain(x, [0, 1, 2, 3]).score)
    listed = method().collect([x[:2], x[2:]], [0, 1, 2, 3], positions=None)
    ranged = method().collect([x[:2], x[2:]], range(4), positions=None)
    assert torch.equal(ranged.c, listed.c)
    assert ranged.provenance == listed.provenance
    for loader in ([x, x], [x[:3]]):
        with pytest.raises(ValueError, match="target has 4 entries, but the loader gave"):
            method().collect(loader, range(4), positions=None)


@pytest.mark.parametrize("method", METHODS)
def test_a_list_of_one_is_one_for_all(method) -> None:
    x = vectors()
    expected = method().context(x, 3)[1]
    for target in ([3], range(3, 4), torch.tensor([3])):
        assert torch.equal(method().context(x, target)[1], expected)
    with pytest.raises(ValueError, match="has 2 entries for 4 rows"):
        method().context(x, [3, 1])


@pytest.mark.parametrize(
    "method",
    [
        *METHODS,
        lambda: DisentangledAttributor(Gradient(network(), EpsilonPlus()), "1"),
        lambda: DisentangledAttribution(LRP(network()), "1"),
    ],
)
def test_functions_that_write_into_the_output(method) -> None:
    run, x = method(), vectors()
    run.subspaces = Subspaces(torch.eye(4), [2, 2])
    expected = run.explain(x, lambda output: output[:, 1] - 1)
    found = run.explain(x, in_place)
    assert torch.equal(found.score, expected.score)
    assert torch.equal(found.concept_relevance, expected.concept_relevance)
    assert torch.equal(found.maps, expected.maps)


@pytest.mark.parametrize("composite", [None, EpsilonPlus()])
@pytest.mark.parametrize("attributor", [Gradient, ZennitIntegratedGradients])
def test_an_attr_output_that_writes_into_the_output(attributor, composite) -> None:
    x, blocks = vectors(), Subspaces(torch.eye(4), [2, 2])
    run = DisentangledAttributor(attributor(network(), composite), "1", blocks)
    expected = run(x, torch.eye(5)[[1] * 4])
    found = run(x, one_hot_in_place)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert bool(found[1].any())
