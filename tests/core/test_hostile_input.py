"""Hostile input to the core's functions: right, or one clear error; NaN never passes unseen."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from drsa_core import Pairs, concept_vectors, netdissect_subspaces
from drsa_core.refine import RefinedModel, mean_relevance
from torch import nn

# ---------------------------------------------------------------------- NaN and wrong shapes


def concept_relevance(x: torch.Tensor, target: int) -> torch.Tensor:
    return x.flatten(1)[:, :3]


class Linear3(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.eval()


REFUSED: dict[str, tuple[Any, str]] = {
    "mean_relevance of another K": (
        lambda: RefinedModel(Linear3(), concept_relevance, 0, [1], torch.zeros(5))(torch.rand(2, 4)),
        r"mean_relevance has shape \(5,\), but concept_relevance gave 3",
    ),
    "concepts [0.9]": (
        lambda: RefinedModel(Linear3(), concept_relevance, 0, torch.tensor([0.9])),  # type: ignore[arg-type]
        "every entry of concepts must be an integer",
    ),
    "target 0.9": (
        lambda: RefinedModel(Linear3(), concept_relevance, 0.9, [1]),  # type: ignore[arg-type]
        "target must be an integer",
    ),
    "mean_relevance of K = 1, then 3": (
        lambda: mean_relevance(lambda x, _: x, [torch.rand(2, 1), torch.rand(2, 3)], 0, progress=False),
        "gave 1 concepts before, and 3 for this batch",
    ),
    "netdissect of 1.5": (
        lambda: netdissect_subspaces(["x", "y"], torch.rand(3, 2), torch.rand(3, 2), 1.5),  # type: ignore[arg-type]
        "n_subspaces must be an integer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("tally", "message"),
    [
        ("unit,label\none,sky\n", "line 2: unit must be a number"),
        ("unit,label\n1,sky\n1,tree\n", "line 3: unit 1 is there twice"),
        ("unit,label\n1,\n", "line 2: unit must be"),
        ("unit,label\n1,sky\n2\n", "line 3: unit must be"),
    ],
)
def test_damaged_tallies_are_named(tally: str, message: str, tmp_path) -> None:
    path = tmp_path / "tally.csv"
    path.write_text(tally)
    with pytest.raises(ValueError, match=message):
        netdissect_subspaces(path, torch.rand(3, 2), torch.rand(3, 2))


def test_a_tally_from_a_spreadsheet_is_read_as_utf_8(tmp_path) -> None:
    path = tmp_path / "tally.csv"
    path.write_bytes("\ufeffunit,label\n1,Bäume\n2,空\n".encode())  # with a mark in front
    found = netdissect_subspaces(path, torch.ones(3, 2), torch.tensor([[2.0, 1.0]]).repeat(3, 1), 2)
    assert found.names == ("Bäume", "空")


@pytest.mark.parametrize("weight_decay", [math.nan, -1.0, math.inf, True])
def test_weight_decays_that_are_none(weight_decay: float) -> None:
    with pytest.raises(ValueError, match="weight_decay must be a finite number of at least 0"):
        concept_vectors(torch.rand(4, 2), [0, 1, 0, 1], weight_decay)


# ---------------------------------------------------------------------- numbers of NumPy, and 0-d ones


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int16])
def test_unsigned_numbers_of_images_and_classes(dtype: Any) -> None:
    numbers = np.array([0, 1, 1, 0], dtype=dtype)
    assert Pairs(torch.rand(4, 2), torch.rand(4, 2), numbers).image.tolist() == [0, 1, 1, 0]
