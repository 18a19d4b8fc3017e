"""Provenance: what counts as another target or method, and what is said of a use for something else."""

from __future__ import annotations

import functools
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
    target_order,
)
from drsa_core.provenance import COLLECTION

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
