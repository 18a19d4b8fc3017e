"""Batches with their numbers: what is done is not loaded, and every loader gives the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drsa_core.distributed import Ranks
from drsa_core.numbered_batches import NumberedBatches
from torch.utils.data import DataLoader, Dataset, RandomSampler, SubsetRandomSampler, default_collate


class Loads(Dataset[Any]):
    """Notes which images are loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        self.loaded.append(i)
        return torch.full((2,), float(i)), i


def numbers(batches: NumberedBatches, done: set[int]) -> list[tuple[int, int, int, list[float]]]:
    found = batches.missing(lambda number, _: number in done)
    return [(b.number, b.first, b.images, b.batch[0][:, 0].tolist()) for b in found]


def test_only_what_is_missing_is_loaded() -> None:
    images = Loads()
    batches = NumberedBatches(DataLoader(images, 4), progress=False)
    assert numbers(batches, {0}) == [(1, 4, 4, [4, 5, 6, 7]), (2, 8, 2, [8, 9])]
    assert images.loaded == [4, 5, 6, 7, 8, 9]
    assert (batches.n_images, batches.own) == (10, range(3))


def test_other_loaders_are_gone_through_with_the_same_numbers() -> None:
    def dropping(items: list[Any]) -> Any:
        return default_collate([item for item in items if item[1] != 5])

    whole = numbers(NumberedBatches(DataLoader(Loads(), 4), progress=False), {0})
    listed = NumberedBatches(list(DataLoader(Loads(), 4)), progress=False)
    assert numbers(listed, {0}) == whole
    assert (listed.n_images, listed.own) == (10, range(3))
    assert numbers(NumberedBatches(iter(DataLoader(Loads(), 4)), progress=False), {0}) == whole
    images = Loads()
    dropped = numbers(NumberedBatches(DataLoader(images, 4, collate_fn=dropping), progress=False), {0})
    assert dropped == [(1, 4, 3, [4, 6, 7]), (2, 7, 2, [8, 9])]
    assert images.loaded == list(range(10))


def test_what_several_ranks_cannot_share_is_refused() -> None:
    two = Ranks(0, 2)
    with pytest.raises(ValueError, match="the loader shuffles"):
        NumberedBatches(DataLoader(Loads(), 4, shuffle=True), two)
    with pytest.raises(TypeError, match="a loader with a length"):
        NumberedBatches(iter([torch.zeros(1, 2)]), two)
    with pytest.raises(TypeError, match="got one tensor of shape"):
        NumberedBatches(torch.zeros(1, 2))


def test_what_is_done_is_compared_where_it_is_loaded() -> None:
    def compared(loader: Any, done: set[int]) -> list[tuple[int, float]]:
        found: list[tuple[int, float]] = []
        batches = NumberedBatches(loader, progress=False)
        list(
            batches.missing(lambda number, _: number in done, lambda n, b: found.append((n, float(b[1][0]))))
        )
        return found

    images = Loads()
    assert compared(DataLoader(images, 2), {0, 1, 2, 4}) == [(0, 0.0), (4, 8.0)]
    assert images.loaded == [0, 1, 8, 9, 6, 7]
    assert compared(DataLoader(Loads(), 2), {3}) == [(3, 6.0)]
    assert compared(DataLoader(Loads(), 2), set()) == []
    # A list is gone through, so that everything can be compared.
    assert compared(list(DataLoader(Loads(), 2)), {0, 1, 3}) == [(0, 0.0), (1, 2.0), (3, 6.0)]


def test_random_orders_cannot_be_kept() -> None:
    images, generator = Loads(), torch.Generator()
    inner = torch.utils.data.BatchSampler(RandomSampler(images), 4, False)
    for loader in (
        DataLoader(images, 4, shuffle=True),
        DataLoader(images, 4, sampler=SubsetRandomSampler([3, 1, 2])),
        DataLoader(images, batch_sampler=inner),
    ):
        with pytest.raises(ValueError, match=r"another order in every run.*shuffle=False"):
            NumberedBatches(loader).check_can_be_kept()
    for kept in (
        DataLoader(images, 4),
        DataLoader(images, 4, shuffle=True, generator=generator),
        [images[0]],
    ):
        NumberedBatches(kept).check_can_be_kept()
