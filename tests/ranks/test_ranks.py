"""Two and three gloo ranks against one process: the same collection bit by bit, the same subspaces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from drsa_core import DRSA, ClassIndex, Pairs, PairStore, Subspaces, fit_many
from drsa_core.distributed import Ranks

from tests.core.test_storage import environment

from .launching import finish, start_ranks
from .work import FITS, GradientTimesInput, pairs, photographs


@pytest.fixture(scope="module", params=[2, 3])
def results(request, tmp_path_factory) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    (folder / "files").mkdir()
    whole = pairs(*FITS["coarse"][1])
    for i, begin in enumerate(range(0, len(whole), 190)):
        rows = slice(begin, begin + 190)
        Pairs(whole.a[rows], whole.c[rows]).save(folder / "files" / f"{i:03d}.safetensors")
    ended = finish(start_ranks(request.param, ["-m", "tests.ranks.work", str(folder)]))
    assert [code for code, _ in ended] == [0] * request.param, ended
    return request.param, folder


def projectors(subspaces: Subspaces) -> torch.Tensor:
    return torch.stack([block @ block.T for block in subspaces.blocks])


@pytest.fixture(scope="module")
def alone() -> dict[str, Subspaces]:
    fits: dict[str, Any] = {name: make().fit(pairs(*size)) for name, (make, size) in FITS.items()}
    return {name: solver.subspaces_ for name, solver in fits.items()}


@pytest.mark.parametrize("name", [*FITS, "streamed"])
def test_every_rank_ends_with_the_subspaces_of_one_process(results, alone, name: str) -> None:
    size, folder = results
    found = [Subspaces.load(folder / f"rank{rank}" / f"{name}.safetensors") for rank in range(size)]
    expected = alone["coarse" if name == "streamed" else name]
    ours, theirs = found[0].metadata["solver"], expected.metadata["solver"]
    assert ours.get("objective", 0) == pytest.approx(theirs.get("objective", 0), rel=1e-10)
    assert ours.get("n_samples") == theirs.get("n_samples")
    for other in found[1:]:
        assert torch.equal(other.basis, found[0].basis)
    # Rounding in float64, after tens of iterations that amplify it.
    torch.testing.assert_close(projectors(found[0]), projectors(expected), rtol=0, atol=1e-7)


def test_the_parts_of_all_ranks_are_the_collection_of_one_process(results) -> None:
    size, folder = results
    expected = GradientTimesInput().collect(photographs(), "label", 5, 7)
    listed = GradientTimesInput().collect([x for x, _ in photographs()], 2, 5, 7)
    for name, one in (("pairs", expected), ("listed", listed)):
        parts = [Pairs.load(folder / f"rank{rank}" / f"{name}.safetensors") for rank in range(size)]
        whole = Pairs.concatenate(parts)
        assert torch.equal(whole.a, one.a)
        assert torch.equal(whole.c, one.c)
        assert torch.equal(whole.image, one.image)
        assert all(len(part) for part in parts)
    stored = PairStore(folder / "store").load()
    assert torch.equal(stored.a, expected.a)
    assert stored.provenance == expected.provenance


def test_fit_of_a_wrapper(results) -> None:
    size, folder = results
    explainer = GradientTimesInput().fit(photographs(), 1, DRSA(2, random_state=0, n_init=2), 5, 7)
    assert explainer.subspaces is not None
    for rank in range(size):
        found = Subspaces.load(folder / f"rank{rank}" / "fitted.safetensors")
        torch.testing.assert_close(projectors(found), projectors(explainer.subspaces), rtol=0, atol=1e-7)
        assert found.provenance == explainer.subspaces.provenance


def test_many_classes_are_shared_and_not_done_twice(results, tmp_path) -> None:
    size, folder = results
    said = [json.loads((folder / f"rank{rank}" / "many.json").read_text()) for rank in range(size)]
    assert sum(entry["images"] for entry in said) == 23  # each image once, in the first run
    assert all(entry["index"] for entry in said)
    alone = GradientTimesInput()
    solver = DRSA(2, random_state=0, n_init=2)
    expected = fit_many(alone, photographs(), tmp_path / "many", solver, positions=5)
    found = ClassIndex.load(folder / "many")
    assert sorted(found.classes) == sorted(expected.classes) == said[0]["classes"] == [0, 1, 2, 3]
    for label in expected.classes:
        theirs, ours = (PairStore(f / "many" / "pairs" / str(label)) for f in (folder, tmp_path))
        assert [file.name for file in theirs.files()] == [file.name for file in ours.files()]
        for mine, other in zip(ours.files(), theirs.files(), strict=True):
            assert mine.read_bytes() == other.read_bytes()
        assert torch.equal(found.subspaces(label).basis, expected.subspaces(label).basis)


def test_an_error_of_one_rank_is_one_of_all(results) -> None:
    size, folder = results
    for rank in range(size):
        errors = json.loads((folder / f"rank{rank}" / "errors.json").read_text())
        for culprit in range(size):
            own = f"ValueError: by {culprit}"
            expected = own if rank == culprit else f"RankError: a test failed on rank {culprit}: {own}"
            assert errors[str(culprit)] == expected
        assert "the loader shuffles" in errors["99"]


WAITING = """
import sys, time
from datetime import timedelta
from drsa_core import joined_ranks
with joined_ranks(timedelta(seconds=30)) as ranks:
    ranks.barrier("the start")
    print("ready", flush=True)
    if ranks.rank == 1:
        time.sleep(60)
    ranks.barrier("the end")
"""


def test_a_killed_rank_ends_the_others_with_an_error() -> None:
    processes = start_ranks(2, ["-c", WAITING])
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    processes[1].kill()
    ended = finish(processes)
    assert ended[1][0] == -9
    assert ended[0][0] == 1
    assert "RankError: rank 0 of 2 waited for the others (the end) in vain" in ended[0][1]


STUCK = """
import sys, time
from datetime import timedelta
import torch
from drsa_core import joined_ranks
with joined_ranks(timedelta(seconds=120)) as ranks:
    ranks.barrier("the start")  # the import may take a while
    with joined_ranks(timedelta(seconds=4)) as impatient:
        if ranks.rank == 1:
            time.sleep(600)
        if sys.argv[1] == "barrier":
            impatient.barrier("the end")
        impatient.sum(torch.ones(2))
"""


@pytest.mark.parametrize("work", ["barrier", "sum"])
def test_a_stuck_rank_ends_the_whole_job_with_an_error(tmp_path, work: str) -> None:
    """As users start it: torchrun ends the rank that hangs as soon as the other one has given up."""
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), work]
    ended = subprocess.run(
        [sys.executable, *command],
        env={**environment(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,  # not the 600 s of the rank that hangs
        check=False,
    )
    assert ended.returncode == 1
    what = {"barrier": "the end", "sum": "a sum"}[work]
    assert f"RankError: rank 0 of 2 waited for the others ({what}) in vain" in ended.stderr
    assert "took longer than the timeout" in ended.stderr
    if work == "barrier":
        assert "Ranks 1 failed to pass monitoredBarrier" in ended.stderr  # who it was


def test_shares_are_even_and_cover_everything() -> None:
    for n in (1, 5, 7, 100):
        for size in (1, 2, 3, 8):
            shares = [Ranks(rank, size).share(n) for rank in range(size)]
            assert [i for share in shares for i in share] == list(range(n))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
