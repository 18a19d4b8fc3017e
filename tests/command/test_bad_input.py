"""Bad input, case by case: one line on stderr, exit code 2, and nothing half-written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from drsa_audit import BadInput
from drsa_audit.folders import find_target
from drsa_audit.networks import open_network
from drsa_audit.settings import ModelSettings
from drsa_core import Subspaces

from .running import files_in, refused, succeeded
from .tiny import FIT, GXI, INPUT, MODEL, pictures


@pytest.fixture
def words(folders, tmp_path) -> list[str | Path]:
    test = ["--train", folders[0], "--test", folders[1], "--target", "blobs"]
    return [*INPUT, *test, "--out", tmp_path / "report.html"]


@pytest.mark.parametrize(
    ("model", "extra", "expected"),
    [
        (MODEL, ["--layer", "44"], "has no layer '44'; did you mean '4'"),
        (MODEL, ["--target", "7"], "the model has the classes 0 to 2, got 7"),
        (MODEL, ["--target", "blob"], "has no class 'blob' that is known by name; did you mean 'blobs'?"),
        (MODEL, ["--weights", "nowhere.pt"], "there is no file nowhere.pt with weights"),
        (MODEL, ["--mean", "0.1,0.2"], "must be one number, or three with commas"),
        (MODEL, ["--std", "0"], "std positive"),
        (MODEL, ["--device", "cuda:99"], "the device 'cuda:99' cannot be used"),
        (MODEL, ["--subspaces", "99"], "'auto' or a number from 1 to 16, got 99"),
        (MODEL, ["--subspaces", "many"], "'many' must be a number of concepts, or auto"),
        (MODEL, ["--backend", "lime"], "'lime' is not one of"),
        (MODEL, ["--train", "nowhere"], "there is no folder nowhere"),
        ("tests.command.tiny:failing", [], "could not be made: RuntimeError: the checkpoint is gone"),
        ("tests.command.tiny:nothing", [], "has no function 'nothing'"),
        ("no_such_module:factory", [], "cannot import 'no_such_module'"),
        ("resnet5", [], "neither torchvision nor timm has a model 'resnet5'; did you mean resnet50"),
        ("nowhere.safetensors", [], "there is no file nowhere.safetensors"),
    ],
)
def test_model_and_settings(words, tmp_path, model: str, extra: list[str], expected: str) -> None:
    assert expected in refused("audit", model, *words, *extra)
    assert not files_in(tmp_path) or "--subspaces" in extra  # pairs are collected before the fit
    assert not (tmp_path / "report.html").exists()


def test_commands_options_and_weights_that_do_not_fit(words, tmp_path) -> None:
    assert "No such command 'adit'" in refused("adit")
    assert "Missing option" in refused("audit", MODEL)
    assert "give --mean and --std together" in refused("audit", MODEL, "--mean", "0.5", *words[8:])
    torch.save({"other": torch.zeros(2)}, tmp_path / "other.pt")
    line = refused("audit", MODEL, *words, "--weights", tmp_path / "other.pt")
    assert f"the weights {tmp_path / 'other.pt'} do not fit {MODEL}" in line


def test_folders_without_the_images(words, tmp_path) -> None:
    train = tmp_path / "train"
    train.mkdir()
    again = [*words, "--train", train]
    assert f"no images (.bmp, .jpeg, .jpg, .png, .ppm, .webp) in {train}" in refused("audit", MODEL, *again)
    (train / "00.png").write_bytes(b"not a picture")
    assert "none of the 1 photographs can be read" in refused("audit", MODEL, *again)
    (train / "00.png").unlink()
    pictures(train, 2, ("1_bars", "2_noise"))
    line = refused("audit", MODEL, *again)
    assert "holds the class folders 1_bars, 2_noise, none of which is of blobs (0)" in line
    (train / "sheet.png").write_bytes((train / "1_bars" / "00.png").read_bytes())
    assert "holds images, e.g. sheet.png, and folders of images" in refused("audit", MODEL, *again)


def test_unreadable_images_are_named_skipped_and_counted(folders, tmp_path) -> None:
    images = pictures(tmp_path / "train", 10, ("0_blobs",)) / "0_blobs"
    for i in range(7):
        (images / f"0{i}.png").write_bytes(b"not a picture")
    (images / "07.png").unlink()
    (images / "07.png").symlink_to(tmp_path / "gone.png")
    out = tmp_path / "blobs.safetensors"
    said = succeeded("fit", MODEL, *INPUT, "--train", images, *FIT, "--out", out).stderr
    assert f"8 of 10 images cannot be read and were skipped: {images / '00.png'} (" in said
    shown = ("--subspaces", out, "--images", images, "--out", tmp_path / "maps")
    assert "8 of 10 images" in succeeded("explain", MODEL, *INPUT, *shown).stderr
    assert "valid on this model" in succeeded("doctor", MODEL, *INPUT, "--images", images).stdout


def test_places_that_cannot_be_written(words, folders, tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    assert "is a folder; give the name" in refused("audit", MODEL, *words, "--out", tmp_path / "folder")
    missing = tmp_path / "missing" / "report.html"
    assert "there is no folder" in refused("audit", MODEL, *words, "--out", missing)
    # Before anything is learned: the folder for finished parts would be in the way.
    out = tmp_path / "concepts.drsa"
    assert "cannot be the output" in refused("audit", MODEL, *words, "--out", out)
    assert not files_in(tmp_path)


def test_files_that_hold_no_subspaces(folders, tmp_path) -> None:
    words = ("explain", MODEL, *INPUT, "--images", folders[1], "--out", tmp_path / "maps", "--subspaces")
    assert "nowhere.safetensors" in refused(*words, "nowhere.safetensors")
    (tmp_path / "x.safetensors").write_bytes(b"no tensors")
    assert "x.safetensors is damaged" in refused(*words, tmp_path / "x.safetensors")
    Subspaces(torch.eye(16), [8, 8]).save(tmp_path / "bare.safetensors")
    assert "does not say which class it is for" in refused(*words, tmp_path / "bare.safetensors")


def test_names_and_work_folders_that_do_not_fit(finished, tmp_path) -> None:
    out = ("--out", tmp_path / "report.html")
    assert "holds no finished audit" in refused("report", tmp_path, *out)
    for text, expected in {
        '{"S9": "x"}': "no block is named 'S9'",
        '["one"]': "names must be 2 different strings",
        '{"S1": 3}': "must hold a list of names",
        "{": "names.json is damaged",
    }.items():
        (tmp_path / "names.json").write_text(text)
        assert expected in refused("report", finished.work, "--names", tmp_path / "names.json", *out)
    assert not (tmp_path / "report.html").exists()


def test_a_folder_with_the_number_of_another_class(folders, tmp_path) -> None:
    words = ("fit", MODEL, *INPUT, "--train", folders[0] / "1_bars", *GXI, *FIT, "--target", "2", "--out")
    line = refused(*words, tmp_path / "x.safetensors")
    assert "the folder 1_bars is by its name of class 1, but the explained class is 2 (class 2)" in line
    forced = succeeded(*words, tmp_path / "x.safetensors", "--force")
    assert "the folder 1_bars is by its name of class 1" in forced.stderr


def test_a_name_that_several_classes_have(tmp_path) -> None:
    network = open_network(ModelSettings(model=MODEL))
    with pytest.raises(BadInput, match="more than one class is called 'crane': 134 and 517"):
        find_target(network, 1000, "crane", [])
    assert find_target(network, 1000, "517", []).index == 517
    assert find_target(network, 1000, "134_crane", []).index == 134
    assert find_target(network, 1000, "tabby", []).index == 281
    with pytest.raises(BadInput, match="'7_crane' says class 7, but crane is class 134 and 517"):
        find_target(network, 1000, "7_crane", [])
    (tmp_path / "517_crane").mkdir()  # a folder says which one is meant
    assert find_target(network, 1000, "crane", [tmp_path]).index == 517


def test_features_on_an_axis_that_the_shape_does_not_tell(folders, tmp_path) -> None:
    out, model = tmp_path / "x.safetensors", "tests.command.tiny:cube"
    rest = ("--train", folders[0], *GXI, *INPUT, *FIT, "--layer", "2", "--out", out)
    line = refused("fit", model, *rest)
    assert "the output of layer '2', 8×8×8, does not say which axis holds the features" in line
    assert "--channel-dim must be 1 or -1, got 2" in refused("fit", model, *rest, "--channel-dim", 2)
    succeeded("fit", model, *rest, "--channel-dim", -1)
    made = Subspaces.load(out).provenance
    assert made is not None
    assert made.channel_dim == -1
    # What the subspaces know need not be said again.
    shown = ("--subspaces", out, "--images", folders[1], "--out", tmp_path / "maps")
    succeeded("explain", model, *INPUT, *GXI, *shown)


def test_test_images_that_were_learned_from_and_classes_without_images_are_noted(folders, tmp_path) -> None:
    test = Path(shutil.copytree(folders[1], tmp_path / "test"))
    for name in ("00.png", "03.png"):
        shutil.copy(folders[0] / "0_blobs" / name, test / "0_blobs" / f"again_{name}")
    for file in (test / "2_noise").iterdir():
        file.write_bytes(b"not a picture")
    out = ("--no-flipping", "--no-ablation", "--json", "--out", tmp_path / "report.html")
    words = ("audit", MODEL, *INPUT, "--train", folders[0], "--test", test, *FIT, *out)
    found = json.loads(succeeded(*words).stdout)["be_careful"]
    assert any(text.startswith("2 of 8 test images are among those that") for text in found)
    assert "no image of noise can be read; the class is left out" in found
