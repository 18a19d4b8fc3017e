"""Fingerprints of models: another for every change that counts, and cheap where nothing has changed."""

from __future__ import annotations

import copy
import gc
from typing import Any

import numpy as np
import pytest
import torch
from drsa_core import fingerprint, model_fingerprint
from torch import nn


class WithExtraState(nn.Linear):
    def __init__(self, state: Any) -> None:
        super().__init__(2, 2)
        nn.init.ones_(self.weight)
        nn.init.ones_(self.bias)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def test_extra_state_counts() -> None:
    states = [None, 1, {"a": torch.ones(2)}, {"a": torch.zeros(2)}, [1, "x"], {"b": {3, 4}}, np.ones(3)]
    found = [model_fingerprint(WithExtraState(state)) for state in states]
    assert len(set(found)) == len(states)
    assert model_fingerprint(WithExtraState({"a": torch.ones(2)})) == found[2]
    model = WithExtraState({"a": 1})
    before = model_fingerprint(model)
    model.state["a"] = 2
    assert model_fingerprint(model) != before


def hashed(monkeypatch) -> list[str]:
    """Names of the tensors that are hashed from now on."""
    names: list[str] = []
    whole = fingerprint._feed_tensor

    def recorded(digest: Any, tensor: torch.Tensor, name: str) -> None:
        names.append(name)
        whole(digest, tensor, name)

    monkeypatch.setattr(fingerprint, "_feed_tensor", recorded)
    return names


def test_a_second_call_hashes_nothing(monkeypatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    names = hashed(monkeypatch)
    first = model_fingerprint(model)
    assert len(names) == 7
    assert model_fingerprint(model) == first
    assert model_fingerprint(model.eval()) == first
    assert len(names) == 7
    assert model_fingerprint(copy.deepcopy(model)) == first


def in_place(model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight[3, 5] += 1e-6


def by_data(model: nn.Linear) -> None:
    model.weight.data.mul_(1.5)


def by_numpy(model: nn.Linear) -> None:
    model.weight.detach().numpy()[:] *= 2


def other_data(model: nn.Linear) -> None:
    model.weight.data = model.weight.data + 1


def other_parameter(model: nn.Linear) -> None:
    model.weight = nn.Parameter(model.weight.detach() * 2)


def other_shape(model: nn.Linear) -> None:
    model.weight.data = model.weight.data.view(10, 40)


def other_type(model: nn.Linear) -> None:
    model.double()


def loaded(model: nn.Linear) -> None:
    model.load_state_dict({name: t + 1 for name, t in model.state_dict().items()})


def a_step(model: nn.Linear) -> None:
    model(torch.ones(1, model.in_features)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


@pytest.mark.parametrize(
    "change",
    [in_place, by_data, by_numpy, other_data, other_parameter, other_shape, other_type, loaded, a_step],
)
def test_a_changed_model_has_another_fingerprint(change) -> None:
    model = nn.Linear(20, 20)
    before = model_fingerprint(model)
    change(model)
    assert model_fingerprint(model) != before


def test_a_change_and_back_is_no_change() -> None:
    model = nn.Linear(2, 2)
    state = copy.deepcopy(model.state_dict())
    before = model_fingerprint(model)
    by_data(model)
    model_fingerprint(model)
    model.load_state_dict(state)
    assert model_fingerprint(model) == before


def test_wrappers_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    plain = model_fingerprint(model)
    compiled: Any = torch.compile
    assert model_fingerprint(nn.DataParallel(model)) == plain
    assert model_fingerprint(compiled(model)) == plain
    assert model_fingerprint(compiled(nn.DataParallel(model))) == plain
    assert model_fingerprint(nn.Sequential(model[0], nn.DataParallel(model[1]))) == plain
    assert model_fingerprint(nn.Sequential(compiled(model[0]), compiled(model[1]))) == plain
    named = nn.Module()
    named.module = model  # an ordinary child that has the name by chance
    assert model_fingerprint(named) != plain


class Awkward(nn.Sequential):
    __hash__ = nn.Module.__hash__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    def __len__(self) -> int:
        return 0


def test_unusual_models_have_a_fingerprint() -> None:
    tied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    tied[1].weight = tied[0].weight
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    channels = torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8)
    with_buffers = nn.Module()
    odd = {
        "quantised": quantised,
        "channels": channels,
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "empty": torch.zeros(0, 3),
        "expanded": torch.ones(1).expand(5),
        "scalar": torch.tensor(1.0),
        "bool": torch.tensor([True]),
    }
    for name, tensor in odd.items():
        with_buffers.register_buffer(name, tensor)
    with torch.inference_mode():
        inference = nn.Linear(2, 2)
    models = [
        nn.Module(),
        nn.Linear(2, 2).bfloat16(),
        nn.Linear(2, 2, device="meta"),
        nn.LazyLinear(2),
        tied,
        with_buffers,
        inference,
        Awkward(nn.Linear(2, 2)),
    ]
    found = [model_fingerprint(model) for model in models]
    assert len(set(found)) == len(models)
    assert [model_fingerprint(model) for model in models] == found


def test_buffers_that_are_not_saved_do_not_count() -> None:
    model = nn.Linear(2, 2)
    before = model_fingerprint(model)
    model.register_buffer("cache", torch.rand(3), persistent=False)
    assert model_fingerprint(model) == before


def test_the_cache_does_not_keep_models_alive() -> None:
    model = nn.Linear(2, 2)
    model_fingerprint(model)
    key = id(model)
    assert key in fingerprint._CACHE
    del model
    gc.collect()
    assert key not in fingerprint._CACHE
