"""The loop behind `collect`: numbers of batches, what is loaded, and collections that go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drsa_core import Pairs, PairStore
from drsa_core.collection import Batches, collect_pairs
from drsa_core.distributed import Ranks
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)


class Loads(Dataset[Any]):
    """Notes which images are loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.loaded.append(i)
        return torch.full((2,), float(i)), i


def found(loader: Any, done: set[int]) -> list[tuple[int, int, int, list[float]]]:
    """Number, first example, size and content of batches that are to be computed."""
    batches = Batches(loader, progress=False)
    some = [b for b in batches.missing(lambda number, _: number in done) if not b.is_done]
    return [(b.number, b.first, b.size, b.data[0][:, 0].tolist()) for b in some]


def test_every_loader_gives_the_same_numbers() -> None:
    def dropping(items: list[Any]) -> Any:
        return default_collate([item for item in items if item[1] != 5])

    expected = [(1, 4, 4, [4, 5, 6, 7]), (2, 8, 2, [8, 9])]
    for loader in (DataLoader(Loads(), 4), list(DataLoader(Loads(), 4)), iter(DataLoader(Loads(), 4))):
        assert found(loader, {0}) == expected
    assert found(DataLoader(Loads(), 4, collate_fn=dropping), {0}) == [
        (1, 4, 3, [4, 6, 7]),
        (2, 7, 2, [8, 9]),
    ]


def test_only_what_is_missing_is_loaded_and_the_first_and_last_that_are_done() -> None:
    images = Loads()
    batches = Batches(DataLoader(images, 2), progress=False)
    some = [(b.number, b.is_done) for b in batches.missing(lambda number, _: number != 3)]
    assert some == [(0, True), (3, False), (4, True)]
    assert images.loaded == [0, 1, 6, 7, 8, 9]
    assert (batches.n_examples, batches.own) == (10, range(5))


def test_ranks_share_the_batches() -> None:
    parts = []
    for rank in range(2):
        batches = Batches(list(DataLoader(Loads(), 4)), progress=False)
        batches.ranks = Ranks(rank, 2)
        parts += [batch.number for batch in batches.missing(None)]
        assert (batches.n_examples, batches.own) == (10, [range(1), range(1, 3)][rank])
    assert parts == [0, 1, 2]


@pytest.mark.parametrize("options", [{"resumes": True}, {"ranks": Ranks(0, 2)}])
def test_random_orders_are_refused_where_batches_are_found_by_number(options) -> None:
    images = Loads()
    for loader in (
        DataLoader(images, 4, shuffle=True),
        DataLoader(images, 4, sampler=SubsetRandomSampler([3, 1, 2])),
        DataLoader(images, batch_sampler=BatchSampler(RandomSampler(images), 4, False)),
    ):
        Batches(loader)
        with pytest.raises(ValueError, match=r"the loader shuffles.*shuffle=False"):
            Batches(loader, **options)
    Batches(DataLoader(images, 4, shuffle=True, generator=torch.Generator()), resumes=True)


def context(x: Any, target: Any) -> tuple[Tensor, Tensor]:
    """Contexts are the activation times the target."""
    return x, x * (torch.as_tensor(target).reshape(-1, 1) + 1)


def gathered(folder: Path | None, loader: Any, target: Any = 0, **options: Any) -> Pairs:
    store = None if folder is None else PairStore(folder)
    about: dict[str, Any] = {"random_state": 0, "backend": "zennit", "method": "m", "layer": "l"}
    return collect_pairs(context, loader, target, store=store, progress=False, **{**about, **options})


def test_a_collection_needs_examples_labels_and_one_target_for_each() -> None:
    x = torch.rand(4, 3)
    with pytest.raises(TypeError, match=r"pass \[x\]"):
        gathered(None, x)
    with pytest.raises(ValueError, match="gave no images"):
        gathered(None, iter([]))
    with pytest.raises(TypeError, match="loader must give tensors"):
        gathered(None, [{"x": x}])
    with pytest.raises(ValueError, match="'lable'"):
        gathered(None, [x], "lable")
    for target in ([0, 1, 2], [0, 1, 2, 3, 4]):
        with pytest.raises(ValueError, match=rf"target has {len(target)} entries, but the loader gave 4"):
            gathered(None, [x[:2], x[2:]], target)
    for labels in (["cat"] * 4, torch.rand(4), torch.tensor([[0]] * 4), torch.tensor([0, 1, 2, -1])):
        with pytest.raises((TypeError, ValueError), match="label"):
            gathered(None, [(x, labels)], "label")
    with pytest.raises(TypeError, match="needs batches"):
        gathered(None, [x], "label")


def test_positions_depend_on_the_seed_and_the_number_of_the_example() -> None:
    x = torch.rand(6, 3, 5, 5)
    whole = gathered(None, [x], positions=4)
    parts = gathered(None, [x[:1], x[:0], x[1:4], x[4:]], positions=4)
    assert torch.equal(whole.a, parts.a)
    assert torch.equal(whole.image, parts.image)
    assert not torch.equal(whole.a, gathered(None, [x], positions=4, random_state=1).a)


@pytest.mark.parametrize("listed", [False, True])
def test_a_store_refuses_other_images_and_labels(tmp_path: Path, listed: bool) -> None:
    x, labels = torch.rand(8, 3) + 1, torch.arange(8)

    def loader(x: Tensor, labels: Tensor) -> Any:
        batches = DataLoader(TensorDataset(x, labels), 2)
        return list(batches) if listed else batches

    first = gathered(tmp_path / "label", loader(x, labels), "label")
    assert torch.equal(gathered(tmp_path / "label", loader(x, labels), "label").c, first.c)
    with pytest.raises(ValueError, match="made from other examples or labels"):
        gathered(tmp_path / "label", loader(x, labels.flip(0)), "label")
    gathered(tmp_path / "zero", loader(x, labels))
    gathered(tmp_path / "zero", loader(x, labels.flip(0)))  # which do not matter for one target
    # Another picture at the end only, as when a file is put into a folder.
    with pytest.raises(ValueError, match="made from other examples"):
        gathered(tmp_path / "zero", loader(torch.cat([x[:7], x[:1]]), labels))
    with pytest.raises(ValueError, match="batches of another size"):
        gathered(tmp_path / "zero", [x])


def test_a_shuffled_loader_that_goes_on_gives_every_image_once(tmp_path: Path) -> None:
    x = torch.rand(8, 3) + 1

    def shuffled(seed: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(TensorDataset(x), 2, shuffle=True, generator=generator)

    gathered(tmp_path, shuffled(7))
    for number in (2, 3):  # killed after two batches
        (tmp_path / f"{number:06d}.safetensors").unlink()
    with pytest.raises(ValueError, match="another order"):
        gathered(tmp_path, shuffled(8))
    again = gathered(tmp_path, shuffled(7))
    assert sorted(again.a[:, 0].tolist()) == sorted(x[:, 0].tolist())


def test_batches_that_were_stored_without_a_digest_pass(tmp_path: Path) -> None:
    x = torch.rand(8, 3) + 1
    first = gathered(tmp_path, [x[:4], x[4:]])
    (tmp_path / "000001.safetensors").unlink()
    Pairs.load(tmp_path / "000000.safetensors").save(tmp_path / "000000.safetensors")
    assert torch.equal(gathered(tmp_path, [x[:4], x[4:]]).a, first.a)
