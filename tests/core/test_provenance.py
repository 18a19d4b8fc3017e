"""Provenance: what counts as another target, method or model, and fingerprints that are cheap and right."""

from __future__ import annotations

import copy
import functools
import gc
import json
import operator
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from drsa_core import (
    Provenance,
    ProvenanceWarning,
    check_provenance,
    describe_target,
    fingerprint,
    model_fingerprint,
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
        (np.array(3), 3),
        ([5, 1, 5], [1, 5]),
        ((5, 1), [1, 5]),
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


class Pick:
    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        return output[:, self.k]

    def method(self, output: torch.Tensor) -> torch.Tensor:
        return output[:, self.k]


def test_functions_are_told_apart_by_what_they_do() -> None:
    functions = [
        lambda output: output[:, 0],
        lambda output: output[:, 1],
        lambda output: output[:, 0] - output[:, 1],
        chosen(0),
        chosen(1),
        lambda output, k=0: output[:, k],
        lambda output, k=1: output[:, k],
        functools.partial(operator.getitem, 0),
        functools.partial(operator.getitem, 1),
        operator.itemgetter(0),
        operator.itemgetter(1),
        Pick(0),
        Pick(1),
        Pick(0).method,
        Pick(1).method,
        torch.sum,
        torch.mean,
    ]
    described = [describe_target(function) for function in functions]
    assert len(set(described)) == len(functions)
    assert all(isinstance(text, str) for text in described)
    assert describe_target(chosen(1)) == describe_target(chosen(1))
    assert describe_target(Pick(1)) == describe_target(Pick(1))
    assert str(describe_target(chosen(1))).startswith(f"{__name__}.chosen.<locals>.<lambda> ")


def test_a_constant_of_the_module_counts() -> None:
    def build(k: int) -> Any:
        space: dict[str, Any] = {"K": k, "__name__": "m"}
        exec("def choose(output): return output[:, K]", space)
        return space["choose"]

    assert describe_target(build(1)) == describe_target(build(1))
    assert describe_target(build(1)) != describe_target(build(2))


@pytest.mark.parametrize(
    "body",
    ["torch.stack(list(row[CLASS] for row in output))", "list(map(lambda row: row[CLASS], output))"],
)
def test_a_constant_of_the_module_counts_inside_of_generators_and_functions(body: str) -> None:
    def of_constant(value: int) -> Any:
        module: dict[str, Any] = {"CLASS": value, "torch": torch}
        exec(f"def target(output): return {body}", module)
        return describe_target(module["target"])

    assert of_constant(2) != of_constant(3)
    assert of_constant(2) == of_constant(2)


@dataclass(slots=True)
class InSlots:
    k: int

    def __call__(self, output: Any) -> Any:
        return output[:, self.k]


class Below(InSlots):
    __slots__ = ("__scale", "unset")

    def __init__(self, k: int, scale: float) -> None:
        super().__init__(k)
        self.__scale = scale


def test_attributes_in_slots_count() -> None:
    different = [InSlots(1), InSlots(2), Below(1, 1.0), Below(1, 2.0), Below(2, 2.0)]
    assert len({describe_target(target) for target in different}) == len(different)
    assert describe_target(Below(1, 2.0)) == describe_target(Below(1, 2.0))


def test_an_object_that_holds_itself_can_be_described() -> None:
    first, second = Pick(1), Pick(1)
    first.me, second.me = [first], [second]  # type: ignore[attr-defined]
    assert describe_target(first) == describe_target(second)


def test_a_function_is_the_same_in_another_process() -> None:
    code = """
from drsa_core import describe_target
def make(k): return lambda output, names={"b", "a", "c"}: output[:, k] if k in {"x", "y", "z", 1} else names
print(describe_target(make(1)))
"""
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**environment(), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
    assert runs.pop().startswith("__main__.make.<locals>.<lambda> ")


def test_the_order_of_targets_has_a_digest() -> None:
    assert target_order(3) is None
    assert target_order(None) is None
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
        ({"target": "(3, 4)"}, "target"),
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
        ({}, {}),
        ({}, {"model": None}),
        ({"model": None}, {}),
        ({}, {"target": None}),
        ({"target": None}, {}),
        ({}, {"positions": None, "random_state": 5}),
        ({"target": [1, 2, 3]}, {"target": 2}),
        ({"target": [1, 2, 3]}, {"target": [1, 3]}),
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
    again = Provenance.from_dict({**json.loads(json.dumps(some.as_dict())), "new": 1})
    assert again == some
    assert again.target == [1, 2]
    for wrong in ({"backend": "zennit"}, {**made().as_dict(), "layer": 3}, [1]):
        with pytest.raises(ValueError, match="provenance"):
            Provenance.from_dict(wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- fingerprints


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
