"""Provenance: fingerprints of models, what counts as another target, and what is said of other uses."""

from __future__ import annotations

import copy
import functools
import gc
import json
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from drsa_core import (
    Provenance,
    ProvenanceWarning,
    check_provenance,
    describe_target,
    model_fingerprint,
    provenance,
    target_order,
)
from drsa_core.provenance import COLLECTION
from torch import nn

from .test_storage import environment


def made(**changes: Any) -> Provenance:
    entries = {"backend": "zennit", "method": "EpsilonPlus", "layer": "a", "channel_dim": 1, "target": 3}
    return Provenance(**{**entries, "model": "0" * 64, "positions": 20, "random_state": 0, **changes})


# ---------------------------------------------------------------------- targets


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (None, None),
        (3, 3),
        (np.int64(3), 3),
        (torch.tensor(3), 3),
        ([5, 1, 5], [1, 5]),
        ((5, 1), [1, 5]),
        (range(2), [0, 1]),
        ([2, 2], 2),
        (torch.tensor([4, 2, 4]), [2, 4]),
        (np.array([4, 2], dtype=np.int32), [2, 4]),
        ([np.int64(1), torch.tensor(0)], [0, 1]),
        ([(1, 2), (0, 1), (1, 2)], "[(0, 1), (1, 2)]"),
    ],
)
def test_targets_are_described_by_the_different_ones(target, expected) -> None:
    found = describe_target(target)
    assert found == expected
    assert type(found) is type(expected)
    assert json.loads(json.dumps(found)) == expected


def test_an_index_into_an_output_of_several_axes_stays_one() -> None:
    index = describe_target((1, 2), tuple_is_index=True)
    assert index == "(1, 2)"
    assert index != describe_target((2, 1), tuple_is_index=True)
    assert describe_target([1, 2], tuple_is_index=True) == [1, 2]
    assert describe_target([(1, 2)], tuple_is_index=True) != index


@pytest.mark.parametrize("target", [1.5, True, "dog", [0.5], torch.tensor([1.0]), np.array([True]), []])
def test_what_is_no_target_is_refused(target) -> None:
    with pytest.raises(TypeError, match="target"):
        describe_target(target)


def chosen(k: int) -> Any:
    return lambda output: output[:, k]


def first(output: Any) -> Any:
    return output[:, 0]


class Pick:
    def __init__(self, k: int) -> None:
        self.k, self.me = k, self

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        return output[:, self.k]


def test_functions_are_told_apart_by_name_and_captured_values() -> None:
    def functions() -> list[Any]:
        return [
            first,
            chosen(0),
            chosen(1),
            lambda output, k=0: output[:, k],
            lambda output, k=1: output[:, k],
            functools.partial(first, 0),
            functools.partial(first, 1),
            Pick(0),
            Pick(1),
            Pick(1).__call__,
            torch.sum,
            torch.mean,
        ]

    described = [describe_target(function) for function in functions()]
    assert len(set(described)) == len(described)
    assert described == [describe_target(function) for function in functions()]
    assert str(describe_target(chosen(1))).startswith(f"{__name__}.chosen.<locals>.<lambda> ")


def test_a_function_is_the_same_in_another_process() -> None:
    code = """
from drsa_core import describe_target
def make(k): return lambda output, names={"b", "a", "c"}: output[:, k]
print(describe_target(make(1)))
"""
    command = [sys.executable, "-c", code]
    environments = [{**environment(), "PYTHONHASHSEED": seed} for seed in ("1", "2")]
    runs = [subprocess.run(command, env=env, capture_output=True, text=True) for env in environments]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.startswith("__main__.make.<locals>.<lambda> ")


def test_the_order_of_targets_has_a_digest() -> None:
    assert target_order(3) is None
    assert target_order(chosen(1)) is None
    assert target_order([1, 0]) == target_order(torch.tensor([1, 0])) == target_order(np.array([1, 0]))
    assert target_order([1, 0]) != target_order([0, 1])
    assert target_order([(0, 1)]) != target_order([(1, 0)])


# ---------------------------------------------------------------------- comparing


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer": "b"}, "layer: 'a' there, 'b' here"),
        ({"method": "LRP"}, "method"),
        ({"channel_dim": -1}, "channel_dim: 1 there, -1 here"),
        ({"target": 4}, "target: 3 there, 4 here"),
        ({"target": [3, 4]}, r"target: 3 there, \[3, 4\] here"),
        ({"model": "1" * 64}, "model: weights 00000000… there, weights 11111111… here"),
    ],
)
def test_a_use_for_something_else_is_named(changes, named) -> None:
    with pytest.warns(ProvenanceWarning, match=named):
        check_provenance(made(), made(**changes), "subspaces")
    with pytest.raises(ValueError, match=named):
        check_provenance(made(), made(**changes), "subspaces", strict=True)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({}, {"model": None}),
        ({"model": None}, {}),
        ({}, {"target": None}),
        ({"target": None}, {}),
        ({}, {"positions": None, "random_state": 5}),
        ({"target": [1, 2, 3]}, {"target": 2}),
        ({"target": [1, 2, 3]}, {"target": [1, 3]}),
        ({"target": "label"}, {}),
    ],
)
def test_what_agrees_or_is_not_known_gives_no_warning(there, here) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_provenance(made(**there), made(**here), "subspaces", strict=True)
        check_provenance(None, made(), "subspaces", strict=True)


def test_a_collection_is_compared_exactly() -> None:
    some = made(target=[1, 2], target_order="x")
    assert some.differences(made(target=1, target_order="x"), COLLECTION, exact=True)
    assert some.differences(made(target=[1, 2], target_order="y"), COLLECTION, exact=True)
    assert made().differences(made(random_state=None, positions=None), COLLECTION, exact=True) == [
        "positions: 20 there, None here",
        "random_state: 0 there, None here",
    ]
    assert made(model=None).differences(made(), COLLECTION, exact=True) == []


def test_a_provenance_survives_json() -> None:
    some = made(target=np.array([2, 1]), random_state=np.int64(7), channel_dim=np.int32(-1))
    assert Provenance.from_dict({**json.loads(json.dumps(some.as_dict())), "new": 1}) == some
    assert some.target == [1, 2]


# ---------------------------------------------------------------------- fingerprints of models


def in_place(model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight[3, 5] += 1e-6


def by_data(model: nn.Linear) -> None:
    model.weight.data.mul_(1.5)


def by_numpy(model: nn.Linear) -> None:
    model.weight.detach().numpy()[:] *= 2


def other_parameter(model: nn.Linear) -> None:
    model.weight = nn.Parameter(model.weight.detach() * 2)


def other_shape(model: nn.Linear) -> None:
    model.weight.data = model.weight.data.view(10, 40)


def other_type(model: nn.Linear) -> None:
    model.double()


def a_step(model: nn.Linear) -> None:
    model(torch.ones(1, model.in_features)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


@pytest.mark.parametrize(
    "change", [in_place, by_data, by_numpy, other_parameter, other_shape, other_type, a_step]
)
def test_a_changed_model_has_another_fingerprint(change) -> None:
    model = nn.Linear(20, 20)
    before, state = model_fingerprint(model), copy.deepcopy(model.state_dict())
    assert model_fingerprint(copy.deepcopy(model)) == before
    change(model)
    assert model_fingerprint(model) != before
    if change is by_data:
        model.load_state_dict(state)
        assert model_fingerprint(model) == before


def test_a_second_call_reads_little_and_the_cache_keeps_no_model_alive(monkeypatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    sizes, read = [], provenance.bytes_of
    monkeypatch.setattr(provenance, "bytes_of", lambda t: sizes.append(t.numel()) or read(t))  # type: ignore[func-returns-value]
    first = model_fingerprint(model)
    assert max(sizes) == 108
    sizes.clear()
    assert model_fingerprint(model.eval()) == first
    assert max(sizes) <= 16
    n_known = len(provenance._FINGERPRINTS)
    del model
    gc.collect()
    assert len(provenance._FINGERPRINTS) == n_known - 1


def test_wrappers_and_buffers_that_are_not_saved_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    plain = model_fingerprint(model)
    compiled: Any = torch.compile
    assert model_fingerprint(compiled(nn.DataParallel(model))) == plain
    assert model_fingerprint(nn.Sequential(compiled(model[0]), nn.DataParallel(model[1]))) == plain
    model.register_buffer("cache", torch.rand(3), persistent=False)
    assert model_fingerprint(model) == plain


def test_unusual_tensors_have_a_fingerprint() -> None:
    with torch.inference_mode():
        inference = nn.Linear(2, 2)
    models: list[nn.Module] = [
        inference,
        nn.Module(),
        nn.Linear(2, 2).bfloat16(),
        nn.Linear(2, 2, device="meta"),
    ]
    for tensor in (
        torch.eye(3).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.zeros(0, 3),
        torch.ones(1).expand(5),
        torch.tensor(1.0),
        torch.tensor([True]),
    ):
        models.append(nn.Module())
        models[-1].register_buffer("x", tensor)
    found = [model_fingerprint(model) for model in models]
    assert len(set(found)) == len(models)
    assert [model_fingerprint(model) for model in models] == found
