"""Methods with noise draw the same random numbers for the parts and for the whole, on any device."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drsa_core.layer import replay_rng
from torch import Tensor, nn

pytest.importorskip("captum")
pytest.importorskip("zennit")

from captum.attr import KernelShap
from zennit.attribution import SmoothGrad

from captum_drsa import DisentangledAttribution
from tests.zennit_adapter.models import subspaces
from zennit_drsa import DisentangledAttributor


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)).eval()


def vectors() -> Tensor:
    return torch.rand(3, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def forks(monkeypatch) -> list[tuple[set[Any], bool]]:
    """The devices whose generators are put back, and whether they are, for each use of `fork_rng`."""
    found = []

    def fork(devices: Any, enabled: bool = True) -> Any:
        found.append((set(devices), enabled))
        return nullcontext()

    monkeypatch.setattr(torch.random, "fork_rng", fork)
    return found


def test_generators_of_all_devices_of_the_inputs(forks) -> None:
    on_devices: list[Any] = [
        SimpleNamespace(is_cuda=kind == "cuda", device=torch.device(kind, number))
        for kind, number in (("cuda", 0), ("cuda", 1), ("cuda", 1), ("cpu", 0))
    ]
    with replay_rng(on_devices):
        pass
    with replay_rng(on_devices[3:], enabled=False):
        pass
    assert forks == [({torch.device("cuda", 0), torch.device("cuda", 1)}, True), (set(), False)]


@pytest.mark.parametrize("whole", [True, False])
def test_smooth_grad_leaves_it_to_the_device(forks, monkeypatch, whole: bool) -> None:
    """No state of the CPU alone is taken or put back."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the state of the CPU alone")

    monkeypatch.setattr(torch, "set_rng_state", refuse)
    run = DisentangledAttributor(SmoothGrad(network(), n_iter=3), "1", subspaces(8), residual=whole)
    run.explain(vectors(), 1, whole=whole)
    run(vectors(), torch.eye(5)[[1] * 3])
    assert forks == [(set(), whole), (set(), whole)]


def test_kernel_shap_does_so_too(forks) -> None:
    DisentangledAttribution(KernelShap(network()), "1", subspaces(8), "gradient").attribute(
        vectors()[:1], target=1, n_samples=5
    )
    assert forks == [(set(), True), (set(), True), (set(), False)]  # the last of three concepts goes on


def test_the_generator_is_left_as_one_run_leaves_it() -> None:
    model, x, start = network(), vectors(), torch.eye(5)[[1] * 3]
    torch.manual_seed(3)
    _, expected = SmoothGrad(model, n_iter=4)(x, start)
    state = torch.get_rng_state()
    for whole in (True, False):
        torch.manual_seed(3)
        run = DisentangledAttributor(SmoothGrad(model, n_iter=4), "1", subspaces(8), residual=whole)
        found = run.explain(x, 1, whole=whole)
        assert torch.equal(torch.get_rng_state(), state)
        torch.testing.assert_close(found.maps.sum(1), expected)
        if found.whole is not None:
            assert torch.equal(found.whole, expected)
        torch.manual_seed(3)
        torch.testing.assert_close(run(x, start)[1].sum(1), expected)
        assert torch.equal(torch.get_rng_state(), state)
