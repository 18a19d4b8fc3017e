"""Bad input, case by case: one line on stderr, exit code 2, and nothing half-written."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from pathlib import Path

import pytest
import torch
from drsa_audit import BadInput
from drsa_audit.folders import find_target
from drsa_audit.networks import open_network
from drsa_audit.results import AuditRecord
from drsa_audit.settings import ModelSettings
from drsa_core import Subspaces

from .running import files_in, refused, succeeded
from .tiny import INPUT, MODEL, pictures


def audit_words(folders: tuple[Path, Path], out: Path) -> list[str | Path]:
    return ["--train", folders[0], "--test", folders[1], "--target", "blobs", "--out", out]


@pytest.fixture
def words(folders, tmp_path) -> list[str | Path]:
    return [*INPUT, *audit_words(folders, tmp_path / "report.html")]


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
    line = refused("audit", model, *words, *extra)
    assert expected in line
    assert not files_in(tmp_path) or "--subspaces" in extra  # pairs are collected before the fit
    assert not (tmp_path / "report.html").exists()


def test_half_of_mean_and_std(folders, tmp_path) -> None:
    rest = audit_words(folders, tmp_path / "report.html")
    assert "give --mean and --std together" in refused("audit", MODEL, "--mean", "0.5", *rest)


def test_weights_of_another_model(words, tmp_path) -> None:
    torch.save({"other": torch.zeros(2)}, tmp_path / "other.pt")
    line = refused("audit", MODEL, *words, "--weights", tmp_path / "other.pt")
    assert f"the weights {tmp_path / 'other.pt'} do not fit {MODEL}" in line
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    assert "do not fit" in refused("audit", MODEL, *words, "--weights", tmp_path / "broken.safetensors")


def test_a_folder_without_images(folders, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no picture")
    rest = [*audit_words(folders, tmp_path / "report.html"), "--train", tmp_path / "empty"]
    assert f"no images (.bmp, .jpeg, .jpg, .png, .ppm, .webp) in {tmp_path / 'empty'}" in refused(
        "audit", MODEL, *INPUT, *rest
    )


def test_class_folders_without_the_class(folders, tmp_path) -> None:
    pictures(tmp_path / "train", 2, ("1_bars", "2_noise"))
    rest = [*audit_words(folders, tmp_path / "report.html"), "--train", tmp_path / "train"]
    line = refused("audit", MODEL, *INPUT, *rest)
    assert "holds the class folders 1_bars, 2_noise, none of which is of blobs (0)" in line


def test_unreadable_images_are_named_skipped_and_counted(folders, tmp_path) -> None:
    train = pictures(tmp_path / "train", 6, ("0_blobs",))
    (train / "0_blobs" / "00.png").write_bytes(b"not a picture")
    out = tmp_path / "blobs.safetensors"
    rest = ("--layer", "4", "--target", "0", "--subspaces", 2, "--no-stability", "--out", out)
    result = succeeded("fit", MODEL, *INPUT, "--train", train, *rest)
    assert f"1 of 6 images cannot be read and were skipped: {train / '0_blobs' / '00.png'}" in result.stderr
    assert out.is_file()
    (train / "0_blobs" / "01.png").unlink()
    (train / "0_blobs" / "01.png").symlink_to(tmp_path / "gone.png")
    result = succeeded("fit", MODEL, *INPUT, "--train", train, *rest)
    assert "2 of 6 images cannot be read and were skipped" in result.stderr
    assert f"{train / '0_blobs' / '01.png'} ([Errno 2] No such file or directory" in result.stderr


def test_no_readable_image(folders, tmp_path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "00.png").write_bytes(b"not a picture")
    rest = [*audit_words(folders, tmp_path / "report.html"), "--train", tmp_path / "train"]
    assert "none of the 1 photographs can be read" in refused("audit", MODEL, *INPUT, *rest)


@pytest.mark.parametrize(
    ("out", "expected"),
    [("missing/report.html", "there is no folder"), ("folder", "is a folder; give the name of a file in it")],
)
def test_places_that_cannot_be_written(folders, tmp_path, out: str, expected: str) -> None:
    (tmp_path / "folder").mkdir()
    line = refused("audit", MODEL, *INPUT, *audit_words(folders, tmp_path / out))
    assert expected in line


def test_the_folder_for_what_is_done_is_no_output(folders, tmp_path) -> None:
    """Before anything is learned: the fit used to fail when it was done, and left a folder in the way."""
    out = tmp_path / "concepts.drsa"
    line = refused("fit", MODEL, *INPUT, "--train", folders[0], "--target", "0", "--out", out)
    assert f"{out} is the folder for what is done, and cannot be the output" in line
    assert "cannot be the output" in refused("audit", MODEL, *INPUT, *audit_words(folders, out))
    html = tmp_path / "report.html"
    words = (*INPUT, *audit_words(folders, html), "--work", html)
    assert "cannot be the output" in refused("audit", MODEL, *words)
    assert not files_in(tmp_path)


def test_no_write_access(folders, tmp_path, monkeypatch) -> None:
    def denied(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", denied)  # as root, every folder can be written to
    line = refused("audit", MODEL, *INPUT, *audit_words(folders, tmp_path / "report.html"))
    assert f"cannot write to {tmp_path} (Permission denied)" in line
    assert not files_in(tmp_path)


def test_subspaces_of_another_model_are_refused_unless_forced(folders, tmp_path) -> None:
    fitted = tmp_path / "blobs.safetensors"
    rest = ("--layer", "4", "--target", "0", "--subspaces", 2, "--no-stability", "--out", fitted)
    succeeded("fit", MODEL, *INPUT, "--train", folders[0], *rest)
    other = "tests.command.tiny:other_network"
    images = ("--images", folders[1] / "0_blobs")
    line = refused("explain", other, *INPUT, "--subspaces", fitted, *images, "--out", tmp_path / "maps")
    assert "the subspaces were made for something else: model: weights" in line
    assert "--force uses them all the same" in line
    assert not list((tmp_path / "maps").rglob("*.png"))
    succeeded("explain", other, *INPUT, "--subspaces", fitted, *images, "--out", tmp_path / "maps", "--force")
    line = refused(
        "explain", MODEL, *INPUT, "--subspaces", fitted, *images, "--target", "1", "--out", tmp_path / "m"
    )
    assert "target: 0 there, 1 here" in line


def test_files_that_hold_no_subspaces(folders, tmp_path) -> None:
    images = ("--images", folders[1] / "0_blobs", "--out", tmp_path / "maps")
    assert "nowhere.safetensors" in refused(
        "explain", MODEL, *INPUT, "--subspaces", "nowhere.safetensors", *images
    )
    (tmp_path / "x.safetensors").write_bytes(b"no tensors")
    assert "x.safetensors is damaged" in refused(
        "explain", MODEL, *INPUT, "--subspaces", tmp_path / "x.safetensors", *images
    )
    Subspaces(torch.eye(16), [8, 8]).save(tmp_path / "bare.safetensors")
    assert "does not say which class it is for" in refused(
        "explain", MODEL, *INPUT, "--subspaces", tmp_path / "bare.safetensors", *images
    )


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


def test_an_unknown_command_and_a_missing_option() -> None:
    assert "No such command 'adit'" in refused("adit")
    assert "Missing option" in refused("audit", MODEL)


def with_long_text(picture: bytes) -> bytes:
    """A PNG with a comment that Pillow refuses with a ValueError."""
    content = b"Comment\0\0" + zlib.compress(b"a" * (3 << 20))
    chunk = struct.pack(">I", len(content)) + b"zTXt" + content
    chunk += struct.pack(">I", zlib.crc32(b"zTXt" + content))
    return picture[:33] + chunk + picture[33:]


def test_whatever_a_decoder_raises_the_file_is_named(folders, tmp_path) -> None:
    train = pictures(tmp_path / "train", 4, ("0_blobs",)) / "0_blobs"
    (train / "zz.png").write_bytes(with_long_text((train / "00.png").read_bytes()))
    rest = ("--layer", "4", "--target", "0", "--subspaces", 2, "--no-stability", "--out")
    result = succeeded("fit", MODEL, *INPUT, "--train", train, *rest, tmp_path / "blobs.safetensors")
    assert f"1 of 5 images cannot be read and were skipped: {train / 'zz.png'} (Decompressed" in result.stderr


def test_the_first_readable_images_decide(folders, tmp_path) -> None:
    images = pictures(tmp_path / "train", 10, ("0_blobs",)) / "0_blobs"
    for i in range(8):
        (images / f"0{i}.png").write_bytes(b"not a picture")
    out = tmp_path / "blobs.safetensors"
    rest = ("--layer", "4", "--target", "0", "--subspaces", 2, "--no-stability", "--out", out)
    assert "8 of 10 images" in succeeded("fit", MODEL, *INPUT, "--train", images, *rest).stderr
    shown = ("--subspaces", out, "--images", images, "--out", tmp_path / "maps")
    assert "8 of 10 images" in succeeded("explain", MODEL, *INPUT, *shown).stderr
    assert "valid on this model" in succeeded("doctor", MODEL, *INPUT, "--images", images).stdout


def test_images_beside_folders_of_images(folders, tmp_path) -> None:
    train = pictures(tmp_path / "train", 2)
    (train / "contact_sheet.png").write_bytes((train / "1_bars" / "00.png").read_bytes())
    line = refused("fit", MODEL, *INPUT, "--train", train, "--target", "0", "--out", tmp_path / "x")
    assert "holds images, e.g. contact_sheet.png, and folders of images, 0_blobs, 1_bars, 2_noise" in line


def test_a_folder_with_the_number_of_another_class(folders, tmp_path) -> None:
    rest = ("--layer", "4", "--subspaces", 2, "--no-stability", "--backend", "gxi")
    words = ("fit", MODEL, *INPUT, "--train", folders[0] / "1_bars", *rest, "--target", "2", "--out")
    line = refused(*words, tmp_path / "x.safetensors")
    assert "the folder 1_bars is by its name of class 1, but the explained class is 2 (class 2)" in line
    assert "--force learns from them all the same" in line
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
    # A folder says which one is meant.
    (tmp_path / "517_crane").mkdir()
    assert find_target(network, 1000, "crane", [tmp_path]).index == 517


def test_features_on_an_axis_that_the_shape_does_not_tell(folders, tmp_path) -> None:
    out = tmp_path / "x.safetensors"
    rest = ("--train", folders[0], "--target", "0", "--layer", "2", "--backend", "gxi", *INPUT,
            "--subspaces", 2, "--no-stability", "--out", out)  # fmt: skip
    model = "tests.command.tiny:cube"
    line = refused("fit", model, *rest)
    assert "the output of layer '2', 8×8×8, does not say which axis holds the features" in line
    for dim in (1, -1):
        succeeded("fit", model, *rest, "--channel-dim", dim)
        made = Subspaces.load(out).provenance
        assert made is not None
        assert made.channel_dim == dim
        # What the subspaces know need not be said again.
        shown = ("--subspaces", out, "--images", folders[1], "--out", tmp_path / f"maps{dim}")
        succeeded("explain", model, *INPUT, "--backend", "gxi", *shown)


def test_images_that_were_learned_from_are_counted_among_the_test_images(folders, tmp_path) -> None:
    train, test = tmp_path / "train", tmp_path / "test"
    shutil.copytree(folders[0] / "0_blobs", train)
    shutil.copytree(folders[1] / "0_blobs", test)
    for name in ("00.png", "03.png"):
        shutil.copy(train / name, test / f"again_{name}")
    for folder in (train, test):  # the same in both, but nothing is learned from it
        (folder / "damaged.png").write_bytes(b"not a picture")
    words = ["audit", MODEL, *INPUT, "--train", train, "--target", "0", "--layer", "4", "--subspaces", "2"]
    words += ["--no-stability", "--no-flipping", "--no-ablation", "--json", "--out"]
    found = json.loads(succeeded(*words, tmp_path / "mixed.html", "--test", test).stdout)
    (caution,) = [text for text in found["be_careful"] if "learned from: they say nothing" in text]
    assert caution.startswith("2 of 8 test images")
    found = json.loads(succeeded(*words, tmp_path / "clean.html", "--test", folders[1] / "0_blobs").stdout)
    assert not any("they say nothing" in text for text in found["be_careful"])


def test_another_class_without_a_readable_image_is_left_out(folders, tmp_path) -> None:
    test = tmp_path / "test"
    shutil.copytree(folders[1], test)
    for file in (test / "2_noise").iterdir():
        file.write_bytes(b"not a picture")
    (test / "1_bars" / "00.png").write_bytes(b"not a picture")
    out = tmp_path / "report.html"
    words = ["audit", MODEL, *INPUT, "--train", folders[0], "--test", test, "--target", "blobs", "--layer"]
    words += ["4", "--subspaces", "2", "--no-stability", "--no-flipping", "--no-ablation", "--json"]
    for _ in range(2):  # a second run finds it in the folder
        found = json.loads(succeeded(*words, "--out", out).stdout)
        assert "no image of noise can be read; the class is left out" in found["be_careful"]
        assert any("1 of 6 images cannot be read" in text for text in found["be_careful"])
    other = AuditRecord.load(out.with_suffix(".drsa")).other_classes
    assert {name: len(values) for name, values in other.items()} == {"bars": 5}
