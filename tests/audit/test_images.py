"""Folders of photographs, and those that come with packages."""

from __future__ import annotations

import shutil
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("captum")
pytest.importorskip("zennit")
from drsa_audit import class_folders, load_images, photo_files
from drsa_audit.images import to_pixels
from photographs import find_photo, package_photos, random_crops
from study.classes import find_classes

from .photos import random_photos


def test_bad_folders_are_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="must hold the folders train and val"):
        find_classes(tmp_path)
    data = random_photos(tmp_path / "data", ["001_a"], 2, 2)
    with pytest.raises(ValueError, match="no photographs of the classes 7"):
        find_classes(data, ["7"])
    (found,) = find_classes(data, ["1"], 1, None)
    assert (found.index, len(found.train), len(found.val)) == (1, 1, 2)
    (data / "val" / "002_b").mkdir()
    with pytest.raises(ValueError, match=r"no photographs .* in .*002_b"):
        find_classes(data, ["2"])
    (data / "val" / "cat").mkdir()
    with pytest.raises(ValueError, match="must begin with the index of its class"):
        find_classes(data, ["1"])
    broken = data / "val" / "001_a" / "x.jpg"
    broken.write_bytes(b"nothing")
    with pytest.warns(UserWarning, match=r"skipped: .*x\.jpg"):
        pixels, names, unreadable = load_images([*found.val, broken], 32)
    assert (len(pixels), names, len(unreadable)) == (2, ["00.png", "01.png"], 1)
    with pytest.raises(ValueError, match="none of the 1"):
        load_images([broken], 32)


def test_a_folder_of_classes_without_train_and_val(tmp_path) -> None:
    data = random_photos(tmp_path, ["281_tabby_cat", "7_cock"], 2, 1) / "train"
    assert [(one.index, one.label, len(one.files)) for one in class_folders(data)] == [
        (281, "tabby cat", 2),
        (7, "cock", 2),
    ]
    assert len(photo_files(data)) == 4  # also in the folders in it
    with pytest.raises(ValueError, match=r"no photographs \(.*\.jpg.*\) in"):
        photo_files(tmp_path / "nothing")


def test_hidden_files_and_folders_are_no_photographs(tmp_path) -> None:
    data = random_photos(tmp_path / ".cache" / "data", ["281_tabby"], 2, 1) / "train"
    for place in (data, data / "281_tabby"):
        (place / ".ipynb_checkpoints").mkdir()
        shutil.copy(data / "281_tabby" / "00.png", place / ".ipynb_checkpoints" / "00-checkpoint.png")
    (data / "281_tabby" / "._00.png").write_bytes(b"what a file system notes beside a file")
    assert [file.name for file in photo_files(data)] == ["00.png", "01.png"]
    assert [one.name for one in class_folders(data)] == ["281_tabby"]


def test_photographs_of_packages_have_names() -> None:
    for package in ("skimage", "timm", "foolbox"):
        pytest.importorskip(package)
    photos = package_photos()
    assert len(photos) == 23
    assert {"cat", "coffee", "rocket", "cannon", "bottlecap", "jeep", "jeep 2"} <= set(photos)
    cannon = photos["cannon"]()
    assert cannon.width == cannon.height
    crops = random_crops(cannon, 5, seed=1)
    assert all(0.5 * cannon.width < crop.width <= cannon.width for crop in crops)
    assert [crop.tobytes() for crop in random_crops(cannon, 5, seed=1)] == [crop.tobytes() for crop in crops]


def test_sixteen_bits_are_scaled_and_values_without_a_range_refused(tmp_path) -> None:
    ramp = np.linspace(0, 1, 32)[None].repeat(32, 0)
    Image.fromarray((ramp * 255).astype(np.uint8)).save(tmp_path / "8.png")
    for i, kind in enumerate(("<u2", ">u2")):
        values = Image.frombytes(
            "I;16" if i == 0 else "I;16B", (32, 32), (ramp * 65535).astype(kind).tobytes()
        )
        expected = torch.from_numpy(ramp).float()
        # Within one of 255 steps.
        torch.testing.assert_close(to_pixels(values, 32)[0], expected, atol=1 / 255, rtol=0)
    Image.fromarray((ramp * 65535).astype(np.uint16)).save(tmp_path / "16.png")
    pixels, _, _ = load_images([tmp_path / "8.png", tmp_path / "16.png"], 32)
    torch.testing.assert_close(pixels[1], pixels[0], atol=1 / 255, rtol=0)
    for mode in ("I", "F"):
        with pytest.raises(ValueError, match=rf"mode {mode}\), whose range is not known"):
            to_pixels(Image.new(mode, (8, 8)), 8)
    (tmp_path / "deep.ppm").write_bytes(b"P5 8 8 65535\n" + bytes(128))  # Pillow makes it mode I
    with pytest.warns(UserWarning, match="whose range is not known; save it with 8 or 16 bits"):
        load_images([tmp_path / "8.png", tmp_path / "deep.ppm"], 32)


@pytest.mark.parametrize("error", [ValueError, EOFError, struct.error, zlib.error, IndexError])
def test_whatever_a_decoder_raises_one_file_is_skipped(tmp_path, monkeypatch, error) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    for file in (good, bad):
        Image.new("RGB", (8, 8)).save(file)
    opened = Image.open

    def failing(file):
        if file == bad:
            raise error("damaged")
        return opened(file)

    monkeypatch.setattr(Image, "open", failing)
    with pytest.warns(UserWarning, match=r"1 of 2 images cannot be read .*bad\.png \(damaged\)"):
        pixels, names, unreadable = load_images([bad, good], 8)
    assert (len(pixels), names, unreadable) == (1, ["good.png"], [f"{bad} (damaged)"])


def test_sixteen_bits_of_a_single_photograph_are_scaled(tmp_path) -> None:
    ramp = np.linspace(0, 65535, 32 * 32).reshape(32, 32).astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / "16.png")
    photo = np.asarray(find_photo(str(tmp_path / "16.png")))
    np.testing.assert_array_equal(photo, (ramp / 257).round().astype(np.uint8)[..., None].repeat(3, 2))


def test_a_single_photograph_is_the_right_way_up(tmp_path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter to the right
    for values in (np.zeros((4, 6), np.uint8), np.zeros((4, 6), np.uint16)):
        Image.fromarray(values).save(tmp_path / "turned.png", exif=turned)
        assert find_photo(str(tmp_path / "turned.png")).size == (4, 6)


def test_photographs_of_one_name_are_told_apart(tmp_path) -> None:
    files = []
    for place, grey in (("a/1.png", 10), ("b/1.png", 20), ("b/2.png", 30)):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (grey,) * 3).save(tmp_path / place)
        files.append(tmp_path / place)
    assert load_images(files[1:], 8)[1] == ["1.png", "2.png"]
    _, names, _ = load_images(files, 8)
    assert names == ["a/1.png", "b/1.png", "b/2.png"]
