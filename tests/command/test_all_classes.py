"""`drsa fit --target all`: every class folder, by one process or by the ranks of torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from drsa_core import ClassIndex, PairStore, Subspaces

from tests.ranks.launching import finish, start_ranks

from .running import refused, succeeded
from .tiny import GXI, INPUT, MODEL, pictures

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
    assert "1 of 10 images cannot be read and were skipped" in result.stderr
    return out


def test_every_class_folder_has_its_concepts(alone, train, tmp_path) -> None:
    index = ClassIndex.load(alone)
    assert {label: entry["n_images"] for label, entry in index.classes.items()} == {0: 3, 1: 3, 2: 3}
    for label in index.classes:
        made = index.subspaces(label).provenance
        assert made is not None
        assert (made.layer, made.target, made.positions) == ("4", label, 5)
    about = index.subspaces(1).metadata
    assert about["explained_class"] == {"name": "bars", "index": 1}
    assert about["preprocessing"]["mean"] == [0.5, 0.5, 0.5]
    # The file is one like any other.
    words = ("--subspaces", alone / index.classes[0]["file"], "--images", train / "0_blobs")
    succeeded("explain", MODEL, *INPUT, *words, "--target", "0", "--out", tmp_path / "maps")
    assert len(list((tmp_path / "maps").glob("*.png"))) == 3


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


def test_shapley_values_follow_the_seed(tmp_path) -> None:
    train = pictures(tmp_path / "train", 3, ("0_blobs", "1_bars"))
    found = []
    for name, seed in (("one", "0"), ("again", "0"), ("other", "1")):
        words = ("--backend", "shapley", "--samples", "1", "--seed", seed, "--out", tmp_path / name)
        succeeded("fit", MODEL, *INPUT, "--train", train, *WORDS, *words)
        found.append(PairStore(tmp_path / name / "pairs" / "1").load().c)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_settings_that_do_not_go_together_are_refused(train, tmp_path, monkeypatch) -> None:
    words = ("fit", MODEL, *INPUT, "--train", train, *WORDS, "--out")
    (tmp_path / "file").touch()
    assert "is a file; --target all writes a folder" in refused(*words, tmp_path / "file")
    auto = refused(*words, tmp_path / "out", "--subspaces", "auto")
    assert "--target all needs a number of concepts" in auto
    assert "leave out --work" in refused(*words, tmp_path / "out", "--work", tmp_path / "work")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start `drsa fit` without torchrun" in refused(*words, tmp_path / "out", "--target", "blobs")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_was_learned_from_something_else_is_refused(tmp_path) -> None:
    train = pictures(tmp_path / "train", 3, ("0_blobs", "1_bars"))
    (train / "sheet.png").write_bytes(b"not used")
    out = tmp_path / "concepts"
    words = ("fit", MODEL, "--train", train, "--out", out, *WORDS, *GXI)
    assert "images beside the class folders are not used: 1, e.g. " in succeeded(*words, *INPUT).stderr
    line = refused(*words, *INPUT[:4], "--mean", "0", "--std", "0.1")
    assert f"{out} was learned from other inputs (preprocessing, " in line
    assert "(batch size)" in refused(*words, *INPUT, "--batch-size", "2")
    first, second = train / "0_blobs" / "00.png", train / "0_blobs" / "01.png"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    assert "names or contents of images" in refused(*words, *INPUT)
    first.write_bytes(content)
    succeeded(*words, *INPUT)
    (train / "0_blobs" / "005.png").write_bytes(content)
    assert "number of images" in refused(*words, *INPUT)


def test_classes_without_concepts_have_failed(tmp_path) -> None:
    train = pictures(tmp_path / "train", 3, ("0_blobs", "1_bars"))
    for file in (train / "0_blobs").iterdir():  # the first ones, by which layer and method are chosen
        file.write_bytes(b"not a picture")
    words = ("fit", MODEL, *INPUT, "--train", train, *WORDS, *GXI, "--out")
    found = json.loads(succeeded(*words, tmp_path / "one", "--json").stdout)
    assert list(found["classes"]) == ["bars"]
    assert found["failed"] == {"0": "none of the 3 images in 0_blobs can be read"}
    assert ClassIndex.load(tmp_path / "one").failed == {0: "none of the 3 images in 0_blobs can be read"}
    # One position of one image is too little for as many concepts.
    few = ("--train-images", "1", "--positions", "1", "--subspaces", "99")
    (train / "0_blobs" / "00.png").write_bytes((train / "1_bars" / "00.png").read_bytes())
    assert "no class has concepts (class 0: " in refused(*words, tmp_path / "none", *few)


def test_two_classes_of_one_name_are_both_shown(tmp_path) -> None:
    train = pictures(tmp_path / "train", 3, ("0_blobs", "1_bars"))
    for name in ("0_blobs", "1_bars"):
        (train / name).rename(train / f"{name[0]}_crane")
    words = ("fit", MODEL, *INPUT, "--train", train, "--out", tmp_path / "out", *WORDS, *GXI, "--json")
    assert json.loads(succeeded(*words).stdout)["classes"] == {
        "crane": "subspaces/0.safetensors",
        "crane (1)": "subspaces/1.safetensors",
    }


@pytest.mark.parametrize("target", ["blobs", "all"])
def test_class_tokens_are_in_no_pair(train, tmp_path, target: str) -> None:
    out = tmp_path / "concepts"
    words = ("--train", train, "--out", out, "--target", target, "--layer", "blocks.0", *GXI)
    words = (
        *words,
        "--subspaces",
        "2",
        "--positions",
        "20",
        *(() if target == "all" else ("--no-stability",)),
    )
    succeeded("fit", "tests.command.tiny:transformer", *INPUT, *words)
    found = ClassIndex.load(out).subspaces(0) if target == "all" else Subspaces.load(out)
    assert found.provenance is not None
    assert found.provenance.skip_tokens == 1
    assert found.metadata["solver"]["n_samples"] == 3 * 9  # patches of three images, of ten tokens each
