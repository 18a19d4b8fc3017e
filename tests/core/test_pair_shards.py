"""Pairs that stay in files: the same numbers as in memory, chunk by chunk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drsa_core import DRSA, PCA, PRCA, MaxRel, Pairs, PairShards, PairStore

from tests.ranks.work import pairs

from .test_provenance import made

N, D = 700, 24


def in_files(folder: Path, whole: Pairs, rows: int = 130) -> list[Path]:
    files = []
    for begin in range(0, len(whole), rows):
        files.append(folder / f"{begin:06d}.safetensors")
        Pairs(whole.a[begin : begin + rows], whole.c[begin : begin + rows]).save(files[-1])
    return files


def test_solvers_find_the_same_in_files_as_in_memory(tmp_path) -> None:
    whole = pairs(N, D)
    store = PairStore(tmp_path)
    for begin in range(0, N, 100):
        store.append(Pairs(whole.a[begin : begin + 100], whole.c[begin : begin + 100]))
    shards = store.shards(memory=1)
    for make in (lambda: DRSA(3, random_state=0, n_init=2), lambda: PRCA(4), lambda: PCA(2)):
        one, many = make().fit(whole).subspaces_, make().fit(shards).subspaces_
        for ours, theirs in zip(many.blocks, one.blocks, strict=True):
            torch.testing.assert_close(ours @ ours.T, theirs @ theirs.T, rtol=0, atol=1e-7)
    assert torch.equal(MaxRel(1).fit(shards).order_, MaxRel(1).fit(whole).order_)


def test_what_cannot_be_solved_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="same number of features"):
        PairShards.from_files([])
    zero = in_files(tmp_path, Pairs(torch.ones(60, 4), torch.zeros(60, 4)))
    with pytest.raises(ValueError, match="all contexts c are zero"):
        DRSA(2).fit(PairShards.from_files(zero))
    other = tmp_path / "other.safetensors"
    Pairs(torch.ones(3, 5), torch.ones(3, 5)).save(other)
    with pytest.raises(ValueError, match=r"same number of features, got \[4, 5\]"):
        PairShards.from_files([*zero, other])
    other.write_bytes(other.read_bytes()[:-8])
    with pytest.raises(ValueError, match=str(other)):
        PairShards.from_files([other])
    empty = tmp_path / "empty.safetensors"
    Pairs(torch.ones(0, 4), torch.ones(0, 4)).save(empty)
    with pytest.raises(ValueError, match="no pairs on any rank"):
        DRSA(2).fit(PairShards.from_files([empty]))
    with pytest.raises(TypeError, match="hold their contexts"):
        DRSA(2).fit(PairShards.from_files(zero), torch.ones(2, 2))


def test_files_of_several_collections_are_not_mixed(tmp_path) -> None:
    files = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for file, provenance in zip(files, (made(), None, made(layer="other")), strict=True):
        pairs(60, 4).with_provenance(provenance).save(file)
    with pytest.raises(ValueError, match="not collected in one way: layer"):
        PairShards.from_files([files[0], files[2]])
    # As `Pairs.concatenate` does it: what does not say how it was made goes with all others.
    assert PairShards.from_files([files[1], files[0]]).provenance == made()
    pairs(60, 4).with_provenance(made(random_state=7)).save(files[1])
    assert PairShards.from_files(files[:2]).provenance == made(random_state=None)
