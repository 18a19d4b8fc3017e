"""`PairStore`: one collection, one writer, no batch lost, doubled or overwritten."""

from __future__ import annotations

import os
import signal
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
    with pytest.raises(ValueError, match="no pairs yet"):
        PairStore(tmp_path).load()
    filled(tmp_path, 2)
    store = PairStore(tmp_path)
    with store.writing(made()) as writer:
        assert writer.n_done == 2
        writer.append(batch(2))
        assert writer.n_done == 3
    store.append(batch(3, made()))
    loaded = store.load()
    assert torch.equal(loaded.a, torch.cat([batch(seed).a for seed in range(4)]))
    assert loaded.image.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert loaded.provenance == store.provenance == made()


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": "b"},
        {"target": 4},
        {"model": "1" * 64},
        {"random_state": 1},
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
    with store.writing(made()) as writer, pytest.raises(ValueError, match=name):
        writer.append(batch(0, made(**changes)))
    assert len(store) == 2


def test_stores_that_do_not_say_how_they_were_made(tmp_path) -> None:
    old = PairStore(tmp_path)
    old.append(batch())
    with pytest.raises(ValueError, match="the stored pairs do not say"), old.writing(made()):
        pytest.fail("the block was entered")
    assert old.load().provenance is None
    with pytest.raises(ValueError, match="the new pairs do not say"):
        filled(tmp_path / "new").append(batch())


def test_a_store_without_batches_takes_any_collection(tmp_path) -> None:
    with PairStore(tmp_path).writing(made(layer="b")):
        pass
    assert filled(tmp_path).provenance == made()


def test_a_gap_is_an_error(tmp_path) -> None:
    store = filled(tmp_path, 4)
    (tmp_path / "000001.safetensors").unlink()
    for use in (store.load, lambda: store.append(batch(0, made()))):
        with pytest.raises(ValueError, match=r"lacks 000001\.safetensors"):
            use()
    store.close([0, 2], made(target=1))  # a store of some batches of a pass; the other file is of none
    assert store.load().a.tolist() == torch.cat([batch(0).a, batch(2).a]).tolist()
    assert store.provenance == made(target=1)
    assert len(store) == 2


def test_a_second_writer_is_kept_out(tmp_path) -> None:
    store = PairStore(tmp_path)
    code = f"""
import torch
from drsa_core import PairStore, Pairs
PairStore({str(tmp_path)!r}).append(Pairs(torch.ones(1, 3), torch.ones(1, 3)))
"""
    command = [sys.executable, "-c", code]
    with store.writing(made()) as writer:
        writer.append(batch())
        child = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        assert "another writer" in child.stderr
        assert PairStore(tmp_path).load().a.shape == (2, 3)  # reading is free


def test_a_killed_writer_leaves_no_lock(tmp_path) -> None:
    code = f"""
import os, signal, torch
from drsa_core import PairStore, Pairs
with PairStore({str(tmp_path)!r}).writing(None) as writer:
    writer.append(Pairs(torch.ones(1, 3), torch.ones(1, 3)))
    open({str(tmp_path / ".000001.safetensors.0123abcd.tmp")!r}, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code], env=environment(), check=False)
    assert ended.returncode == -signal.SIGKILL
    PairStore(tmp_path).append(batch())
    visible = [name for name in sorted(os.listdir(tmp_path)) if "lock" not in name]
    assert visible == ["000000.safetensors", "000001.safetensors"]


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
    assert len(store) == 2
    file = tmp_path / "000001.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(ValueError, match=r"000001\.safetensors is damaged"):
        store.load()
    assert list(store.damaged()) == [file]
    batch(0, made(layer="b")).save(file)
    with pytest.raises(ValueError, match="layer: 'a' there"):
        store.load()
    (tmp_path / "provenance.json").write_text("{")
    with pytest.raises(ValueError, match=r"provenance\.json is damaged"):
        _ = store.provenance
