"""`drsa fit --target all`: every class folder, by one process or by the ranks of torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from drsa_core import ClassIndex, Subspaces

from tests.ranks.launching import finish, start_ranks

from .running import refused, succeeded
from .tiny import INPUT, MODEL, pictures

WORDS = ("--layer", "4", "--target", "all", "--subspaces", "2", "--positions", "5", "--batch-size", "3")
#: The command as a program, for processes that are started with Python.
COMMAND = ["-c", "from drsa_audit.command import main; main()"]


@pytest.fixture(scope="module")
def train(tmp_path_factory) -> Path:
    folder = pictures(tmp_path_factory.mktemp("classes") / "train", 3)
    (folder / "1_bars" / "03.png").write_bytes(b"not a picture")
    return folder


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "concepts"
    result = succeeded("fit", MODEL, *INPUT, "--train", train, "--out", out, *WORDS, "--json")
    found = json.loads(result.stdout)
    assert list(found["classes"]) == ["blobs", "bars", "noise"]
    assert not found["failed"]
    assert "1 images cannot be read and were skipped" in result.stderr
    return out


def test_every_class_folder_has_its_concepts(alone, train, tmp_path) -> None:
    index = ClassIndex.load(alone)
    assert {label: entry["n_images"] for label, entry in index.classes.items()} == {0: 3, 1: 3, 2: 3}
    for label in index.classes:
        made = index.subspaces(label).provenance
        assert made is not None
        assert (made.layer, made.target, made.positions) == ("4", label, 5)
    # The file is one like any other.
    out = tmp_path / "maps"
    images = train / "0_blobs"
    file = alone / index.classes[0]["file"]
    succeeded(
        "explain", MODEL, *INPUT, "--subspaces", file, "--images", images, "--target", "0", "--out", out
    )
    assert len(list(out.glob("*.png"))) == 3


def test_two_ranks_find_what_one_process_finds(alone, train, tmp_path) -> None:
    out = tmp_path / "concepts"
    words = ["fit", MODEL, *INPUT, "--train", str(train), "--out", str(out), *WORDS]
    ended = finish(start_ranks(2, [*COMMAND, *words]))
    assert [code for code, _ in ended] == [0, 0], ended
    assert "cannot be read" in ended[0][1] + ended[1][1]
    for label in range(3):
        found, expected = (
            Subspaces.load(folder / "subspaces" / f"{label}.safetensors") for folder in (out, alone)
        )
        assert torch.equal(found.basis, expected.basis)
        assert found.metadata["n_images"] == expected.metadata["n_images"]


def test_what_does_not_go_together_is_refused(train, tmp_path, monkeypatch) -> None:
    words = ("fit", MODEL, *INPUT, "--train", train, "--layer", "4", "--out")
    (tmp_path / "file").touch()
    assert "is a file; --target all writes a folder" in refused(*words, tmp_path / "file", "--target", "all")
    auto = refused(*words, tmp_path / "out", "--target", "all", "--subspaces", "auto")
    assert "--target all needs a number of concepts" in auto
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start `drsa fit` without torchrun" in refused(*words, tmp_path / "out", "--target", "blobs")
    assert not (tmp_path / "out").exists()
