"""Pairs that stay in files: the same numbers as in memory, chunk by chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drsa_core import DRSA, PCA, PRCA, MaxRel, Pairs, PairShards, PairStore
from drsa_core.objective import HeldSamples, Objective, ShardedSamples

from tests.ranks.work import pairs

from .test_provenance import made

N, D, DIMS = 700, 24, (7, 6, 5)


def in_files(folder: Path, whole: Pairs, rows: int = 130) -> list[Path]:
    files = []
    for begin in range(0, len(whole), rows):
        files.append(folder / f"{begin:06d}.safetensors")
        Pairs(whole.a[begin : begin + rows], whole.c[begin : begin + rows]).save(files[-1])
    return files


@pytest.fixture
def both(tmp_path) -> tuple[Objective, Objective]:
    whole = pairs(N, D)
    shards = PairShards.from_files(in_files(tmp_path, whole), memory=1)  # chunks of 256, across files
    assert [chunk.n_rows for chunk in shards.chunks] == [256, 256, 188]
    held = HeldSamples(whole.a, whole.c, None).objective(DIMS, 0.5, 0.3)
    return held, ShardedSamples(shards).objective(DIMS, 0.5, 0.3)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_every_sum_over_samples_is_the_same(both) -> None:
    """All that solvers ask of an objective, at a random U, and for a selection in other coordinates."""
    generator = torch.Generator().manual_seed(0)
    one, many = both
    rows = torch.randperm(N, generator=generator)[:400].sort().values
    weights = torch.rand(N, generator=generator, dtype=torch.float64)
    close(many.pair_relevance(), one.pair_relevance())
    close(many.moments(weights), one.moments(weights))
    directions = torch.linalg.qr(torch.randn(D, D, generator=generator, dtype=torch.float64)).Q[:, :20]
    cases = [
        (one, many),
        (one.of_samples(rows), many.of_samples(rows)),
        (one.of_samples(rows).of_samples(rows[:200]), many.of_samples(rows).of_samples(rows[:200])),
        (one.in_directions(directions, (5, 5, 5)), many.in_directions(directions, (5, 5, 5))),
    ]
    for held, sharded in cases:
        size = held.n_features
        basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
        here, there = held.evaluate(basis), sharded.evaluate(basis)
        assert there.value == pytest.approx(here.value, rel=1e-12)
        assert (sharded.n_samples, sharded.n_total) == (held.n_samples, held.n_total)
        close(there.block_means, here.block_means)
        close(sharded.gradient(there), held.gradient(here))
        close(sharded.tangent_gradient(there), held.tangent_gradient(here))
        close(sharded.shares(there), held.shares(here))
        close(sharded.linearised(there, basis[:, :6]), held.linearised(here, basis[:, :6]))
        curved, expected = sharded.curvature(there), held.curvature(here)
        for ours, theirs in zip(curved.rotations, expected.rotations, strict=True):
            close(ours.abs(), theirs.abs())  # eigenvectors have no sign
        close(curved.diagonal, expected.diagonal)


def test_curvature_takes_the_same_part_of_the_samples(both, monkeypatch) -> None:
    monkeypatch.setattr("drsa_core.objective.CURVATURE_SAMPLES", 50)
    one, many = both
    basis = torch.eye(D, dtype=torch.float64)
    close(many.curvature(many.evaluate(basis)).diagonal, one.curvature(one.evaluate(basis)).diagonal)


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
    close(PRCA(4).fit(shards).eigenvalues_, PRCA(4).fit(whole).eigenvalues_)
    with pytest.raises(TypeError, match="only PRCA, PCA, DRSA and DSA take PairShards"):
        MaxRel(1).fit(shards)
    assert torch.equal(MaxRel(1).fit(shards.gathered()).order_, MaxRel(1).fit(whole).order_)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_any_scale(tmp_path, scale: float) -> None:
    whole = pairs(200, 12, torch.float32)
    shards = PairShards.from_files(in_files(tmp_path, Pairs(whole.a * scale, whole.c * scale)))
    for solver in (PRCA(2), DRSA(2, random_state=0, n_init=1)):
        expected = type(solver)(**solver.get_params()).fit(whole)
        ours, theirs = solver.fit(shards).subspaces_.blocks[0], expected.subspaces_.blocks[0]
        torch.testing.assert_close(ours @ ours.T, theirs @ theirs.T, rtol=0, atol=2e-3)


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
    for solver in (DRSA(2), PRCA(2)):
        with pytest.raises(ValueError, match="no pairs on any rank"):
            solver.fit(PairShards.from_files([empty]))
    with pytest.raises(TypeError, match="hold their contexts"):
        PRCA(2).fit(PairShards.from_files(zero), torch.ones(2, 2))


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
