"""One target for each example: every sequence of them is treated as a list, in both adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import IntegratedGradients
from drsa_core import Subspaces
from torch import Tensor, nn
from zennit.attribution import Gradient
from zennit.attribution import IntegratedGradients as ZennitIntegratedGradients

from captum_drsa import DisentangledAttribution
from zennit_drsa import DisentangledAttributor


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 5)).eval()


def vectors() -> Tensor:
    return torch.rand(4, 6, generator=torch.Generator().manual_seed(0))


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
