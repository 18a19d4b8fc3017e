"""`PairStore`: one collection, one writer, no batch lost, doubled or overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from drsa_core import Pairs, PairStore, Provenance
from drsa_core.collect import collect_pairs
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from .test_provenance import made
from .test_storage import environment


def batch(seed: int = 0, provenance: Provenance | None = None) -> Pairs:
    a = torch.rand(2, 3, generator=torch.Generator().manual_seed(seed))
    return Pairs(a, a, torch.tensor([0, 1]), provenance)


def filled(folder: Any, n_batches: int = 2, **changes: Any) -> PairStore:
    store = PairStore(folder)
    with store.writing(made(**changes)) as writer:
        for seed in range(n_batches):
            writer.append(batch(seed))
    return store


def test_a_collection_goes_on_by_number(tmp_path) -> None:
    filled(tmp_path, 2)
    store = PairStore(tmp_path)
    with store.writing(made()) as writer:
        assert writer.n_done == 2
        writer.append(batch(2))
        assert writer.n_done == 3
    with pytest.raises(RuntimeError, match="closed"):
        writer.append(batch(3))
    loaded = store.load()
    assert torch.equal(loaded.a, torch.cat([batch(seed).a for seed in range(3)]))
    assert loaded.image.tolist() == [0, 1, 2, 3, 4, 5]
    assert loaded.provenance == made()
    assert store.provenance == made()


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": "b"},
        {"target": 4},
        {"model": "1" * 64},
        {"random_state": 1},
        {"positions": 5},
        {"positions": None},
        {"method": "LRP"},
        {"backend": "captum"},
        {"channel_dim": -1},
        {"target_order": "x"},
    ],
)
def test_another_collection_is_refused_before_anything_is_computed(tmp_path, changes) -> None:
    store = filled(tmp_path)
    name = next(iter(changes))
    with (
        pytest.raises(ValueError, match=rf"another collection: {name}: .*; use another folder, or delete"),
        store.writing(made(**changes)),
    ):
        pytest.fail("the block was entered")
    assert len(store) == 2
    with pytest.raises(ValueError, match=name):
        store.append(batch(0, made(**changes)))
    with store.writing(made()) as writer, pytest.raises(ValueError, match=name):
        writer.append(batch(0, made(**changes)))
    assert len(store) == 2


def test_stores_that_do_not_say_how_they_were_made(tmp_path) -> None:
    old = PairStore(tmp_path)
    old.append(batch())
    with pytest.raises(ValueError, match="1 batches that do not say how they were made"), old.writing(made()):
        pytest.fail("the block was entered")
    assert old.load().provenance is None
    new = filled(tmp_path / "new")
    with pytest.raises(ValueError, match="do not say how they were made, but"):
        new.append(batch())


def test_a_store_without_batches_takes_any_collection(tmp_path) -> None:
    filled(tmp_path, 0, layer="b")
    assert filled(tmp_path, 1).provenance == made()
    (tmp_path / "provenance.json").write_text('{"backend": ')
    with pytest.raises(ValueError, match=r"provenance\.json is damaged"):
        PairStore(tmp_path).load()


def test_a_gap_is_an_error_and_nothing_is_overwritten(tmp_path) -> None:
    store = filled(tmp_path, 4)
    last = (tmp_path / "000003.safetensors").read_bytes()
    (tmp_path / "000001.safetensors").unlink()
    message = r"lacks 000001\.safetensors, but holds 000003\.safetensors"
    with pytest.raises(ValueError, match=message):
        store.load()
    with pytest.raises(ValueError, match=message):
        store.append(batch(9, made()))
    with store.writing(made()) as writer:  # a collection fills the gap, and does nothing else
        assert [writer.holds(number, 2) for number in range(5)] == [True, False, True, True, False]
        with pytest.raises(ValueError, match=message):
            writer.append(batch(9))
        with pytest.raises(RuntimeError, match=r"000003\.safetensors is there already"):
            writer.put(3, batch(3))
        with pytest.raises(ValueError, match=r"holds 2 images, but this batch has 3: .*another size"):
            writer.holds(0, 3)
        writer.put(1, batch(1))
    assert torch.equal(store.load().a, torch.cat([batch(seed).a for seed in range(4)]))
    assert (tmp_path / "000003.safetensors").read_bytes() == last


def test_a_second_writer_is_kept_out(tmp_path) -> None:
    store, other = PairStore(tmp_path), PairStore(tmp_path)
    with store.writing(made()) as writer:
        writer.append(batch())
        with pytest.raises(RuntimeError, match=rf"process {os.getpid()} on .* is adding to {tmp_path}"):
            other.append(batch(0, made()))
        code = f"""
from drsa_core import PairStore
with PairStore({str(tmp_path)!r}).writing(None): pass
"""
        child = subprocess.run(
            [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
        )
        assert "another writer" in child.stderr
        assert other.load().a.shape == (2, 3)  # reading is free
    assert len(other) == 1
    with pytest.raises(RuntimeError, match="from 0 to 1 batches since this store was opened"):
        other.append(batch(0, made()))
    PairStore(tmp_path).append(batch(1, made()))
    assert len(other) == 2


def test_a_killed_writer_leaves_no_lock(tmp_path) -> None:
    code = f"""
import os, signal, torch
from drsa_core import PairStore, Pairs
with PairStore({str(tmp_path)!r}).writing(None) as writer:
    writer.append(Pairs(torch.ones(1, 3), torch.ones(1, 3)))
    open({str(tmp_path / ".000001.safetensors.0123abcd.tmp")!r}, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == -9
    store = PairStore(tmp_path)
    assert len(store) == 1
    store.append(batch())
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        ".lock",
        "000000.safetensors",
        "000001.safetensors",
    ]


def test_an_error_in_the_block_frees_the_store(tmp_path) -> None:
    store = PairStore(tmp_path)

    def interrupted() -> None:
        with store.writing(made()) as writer:
            writer.append(batch())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with store.writing(made()) as writer:
        assert writer.n_done == 1


def test_other_files_are_no_batches_and_damaged_ones_are_named(tmp_path) -> None:
    store = filled(tmp_path, 2)
    store.load().save(tmp_path / "all.safetensors")
    store.load().save(tmp_path / "2020.safetensors")
    assert len(store) == 2
    (tmp_path / "000001.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"000001\.safetensors"):
        store.load()
    batch(0, made(layer="b")).save(tmp_path / "000001.safetensors")
    with pytest.raises(ValueError, match=rf"batches in {tmp_path} do not go together: .*layer: 'a' there"):
        store.load()


# ---------------------------------------------------------------------- the batches of a loader


def gathered(folder: Path, loader: Any, target: Any = 0, store: bool = True) -> Pairs:
    """Pairs whose contexts are the activation times the target."""

    def context(x: Any, target: Any) -> tuple[Tensor, Tensor]:
        return x, x * (torch.as_tensor(target).reshape(-1, 1) + 1)

    kept = PairStore(folder) if store else None
    about: dict[str, Any] = {"backend": "zennit", "method": "m", "layer": "l", "model": None}
    return collect_pairs(context, loader, target, random_state=0, store=kept, progress=False, **about)


@pytest.mark.parametrize("listed", [False, True])
def test_a_store_refuses_other_images_and_labels(tmp_path: Path, listed: bool) -> None:
    x, labels = torch.rand(8, 3) + 1, torch.arange(8)

    def loader(x: Tensor, labels: Tensor) -> Any:
        batches = DataLoader(TensorDataset(x, labels), 2)
        return list(batches) if listed else batches

    first = gathered(tmp_path / "label", loader(x, labels), "label")
    assert torch.equal(gathered(tmp_path / "label", loader(x, labels), "label").c, first.c)
    with pytest.raises(ValueError, match="made from other images or labels than the loader gives now"):
        gathered(tmp_path / "label", loader(x, labels.flip(0)), "label")
    gathered(tmp_path / "zero", loader(x, labels))
    gathered(tmp_path / "zero", loader(x, labels.flip(0)))  # which do not matter for one target
    # Another picture at the end only, as when a file is put into a folder.
    with pytest.raises(ValueError, match="made from other images than the loader gives now"):
        gathered(tmp_path / "zero", loader(torch.cat([x[:7], x[:1]]), labels))


def test_a_shuffled_loader_that_goes_on_gives_every_image_once(tmp_path: Path) -> None:
    x = torch.rand(8, 3) + 1

    def shuffled(seed: int | None) -> DataLoader[Any]:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return DataLoader(TensorDataset(x), 2, shuffle=True, generator=generator)

    with pytest.raises(ValueError, match="shuffle=False"):
        gathered(tmp_path / "s", shuffled(None))
    assert not list((tmp_path / "s").glob("*.safetensors"))
    assert len(gathered(tmp_path / "s", shuffled(None), store=False)) == 8
    gathered(tmp_path / "s", shuffled(7))
    for number in (2, 3):  # killed after two batches
        (tmp_path / "s" / f"{number:06d}.safetensors").unlink()
    with pytest.raises(ValueError, match="another order"):
        gathered(tmp_path / "s", shuffled(8))
    again = gathered(tmp_path / "s", shuffled(7))
    assert sorted(again.a[:, 0].tolist()) == sorted(x[:, 0].tolist())


def test_stores_without_digests_of_batches_go_on(tmp_path: Path) -> None:
    x = torch.rand(8, 3) + 1
    first = gathered(tmp_path, [x[:4], x[4:]])
    (tmp_path / "000001.safetensors").unlink()
    Pairs.load(tmp_path / "000000.safetensors").save(tmp_path / "000000.safetensors")  # as 0.2.0 wrote it
    assert torch.equal(gathered(tmp_path, [x[:4], x[4:]]).a, first.a)
