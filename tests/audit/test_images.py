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
from drsa_audit import load_images, photo_files
from drsa_audit.images import to_pixels
from photographs import find_photo, package_photos, random_crops
from study.classes import class_folders, find_classes

from .photos import random_photos


def test_folders_of_classes(tmp_path) -> None:
    with pytest.raises(ValueError, match="must hold the folders train and val"):
        find_classes(tmp_path)
    data = random_photos(tmp_path / ".cache" / "data", ["281_tabby_cat", "7_cock"], 2, 1)
    found = [(one.index, one.label, len(one.files)) for one in class_folders(data / "train")]
    assert found == [(281, "tabby cat", 2), (7, "cock", 2)]
    assert len(photo_files(data / "train")) == 4  # also in the folders in it
    (one,) = find_classes(data, ["7"], 1, None)
    assert (one.index, len(one.train), len(one.val)) == (7, 1, 1)
    with pytest.raises(ValueError, match="no photographs of the classes 8"):
        find_classes(data, ["8"])
    # Hidden files and folders are no photographs.
    (data / "val" / "7_cock" / ".checkpoints").mkdir()
    shutil.copy(data / "val/7_cock/00.png", data / "val/7_cock/.checkpoints/00.png")
    (data / "val" / "7_cock" / "._00.png").write_bytes(b"what a file system notes beside a file")
    assert [file.name for file in photo_files(data / "val" / "7_cock")] == ["00.png"]
    (data / "val" / "cat").mkdir()
    with pytest.raises(ValueError, match="must begin with the index of its class"):
        find_classes(data, ["7"])
    with pytest.raises(ValueError, match=r"no photographs \(.*\.jpg.*\) in"):
        photo_files(tmp_path / "nothing")


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
    expected = torch.from_numpy(ramp).float()
    for mode, kind in (("I;16", "<u2"), ("I;16B", ">u2")):
        values = Image.frombytes(mode, (32, 32), (ramp * 65535).astype(kind).tobytes())
        # Within one of 255 steps.
        torch.testing.assert_close(to_pixels(values, 32)[0], expected, atol=1 / 255, rtol=0)
    Image.fromarray((ramp * 65535).astype(np.uint16)).save(tmp_path / "16.png")
    np.testing.assert_allclose(np.asarray(find_photo(str(tmp_path / "16.png")))[..., 0], 255 * ramp, atol=1)
    (tmp_path / "deep.ppm").write_bytes(b"P5 8 8 65535\n" + bytes(128))  # Pillow makes it mode I
    with pytest.warns(UserWarning, match="whose range is not known; save it with 8 or 16 bits"):
        load_images([tmp_path / "16.png", tmp_path / "deep.ppm"], 32)


def test_photographs_are_turned_upright_and_cut_in_the_middle(tmp_path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter to the right
    Image.fromarray(np.zeros((4, 6), np.uint16)).save(tmp_path / "turned.png", exif=turned)
    assert find_photo(str(tmp_path / "turned.png")).size == (4, 6)
    photo = Image.new("RGB", (40, 20), (255, 0, 0))
    photo.paste((0, 0, 255), (0, 0, 10, 20))
    assert to_pixels(photo, 20)[2, 10, 2] > 0.9  # squeezed: the blue edge is there
    assert float(to_pixels(photo, 20, resize=20)[2].max()) < 0.1  # cut: it is gone


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
    with pytest.raises(ValueError, match="none of the 1 photographs can be read"):
        load_images([bad], 8)


def test_photographs_of_one_name_are_told_apart(tmp_path) -> None:
    files = [tmp_path / place for place in ("a/1.png", "b/1.png", "b/2.png")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(file)
    assert load_images(files[1:], 8)[1] == ["1.png", "2.png"]
    assert load_images(files, 8)[1] == ["a/1.png", "b/1.png", "b/2.png"]
