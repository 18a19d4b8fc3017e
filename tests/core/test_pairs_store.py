"""`PairStore`: one collection, one writer, no batch lost, doubled or overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from drsa_core import Pairs, PairStore, Provenance

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
