"""Methods with noise draw the same random numbers for the parts and for the whole, on any device."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from captum.attr import KernelShap
from drsa_core.layer import replay_rng
from torch import nn
from zennit.attribution import SmoothGrad

from captum_drsa import DisentangledAttribution
from tests.toys import subspaces, vectors
from zennit_drsa import DisentangledAttributor


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)).eval()


def test_generators_of_all_devices_of_the_inputs_are_put_back(monkeypatch) -> None:
    forks = []

    def fork(devices: Any, enabled: bool = True) -> Any:
        forks.append((set(devices), enabled))
        return nullcontext()

    monkeypatch.setattr(torch.random, "fork_rng", fork)
    on_devices: list[Any] = [
        SimpleNamespace(is_cuda=kind == "cuda", device=torch.device(kind, number))
        for kind, number in (("cuda", 0), ("cuda", 1), ("cuda", 1), ("cpu", 0))
    ]
    with replay_rng(on_devices), replay_rng(on_devices[3:], enabled=False):
        pass
    assert forks == [({torch.device("cuda", 0), torch.device("cuda", 1)}, True), (set(), False)]


@pytest.mark.parametrize("whole", [True, False])
def test_smooth_grad_leaves_the_generator_as_one_run_does(whole: bool) -> None:
    model, x, start = network(), vectors(), torch.eye(5)[[1] * 3]
    torch.manual_seed(3)
    _, expected = SmoothGrad(model, n_iter=4)(x, start)
    state = torch.get_rng_state()
    run = DisentangledAttributor(SmoothGrad(model, n_iter=4), "1", subspaces(8), residual=whole)
    torch.manual_seed(3)
    found = run.explain(x, 1, whole=whole)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(found.maps.sum(1), expected)
    assert not whole or (found.whole is not None and torch.equal(found.whole, expected))
    torch.manual_seed(3)
    torch.testing.assert_close(run(x, start)[1].sum(1), expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_kernel_shap_draws_the_same_coalitions_for_each_concept() -> None:
    run = DisentangledAttribution(KernelShap(network()), "1", subspaces(8), "gradient")
    one = DisentangledAttribution(KernelShap(network()), "1", subspaces(8, 1), "gradient")
    maps = []
    for wrapper in (run, one):
        torch.manual_seed(3)
        maps.append(wrapper.attribute(vectors()[:1], target=1, n_samples=20).sum(1))
    torch.testing.assert_close(*maps, rtol=1e-3, atol=1e-5)
