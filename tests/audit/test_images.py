"""Folders of photographs, and those that come with packages."""

from __future__ import annotations

import pytest

pytest.importorskip("captum")
pytest.importorskip("zennit")
from drsa_audit import class_folders, find_classes, load_images, photo_files
from drsa_audit.package_photos import package_photos, random_crops

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
    with pytest.warns(UserWarning, match=r"skipped .*x\.jpg"):
        pixels, names, unreadable = load_images([*found.val, broken], 32)
    assert (len(pixels), names, unreadable) == (2, ["00.png", "01.png"], [str(broken)])
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(ValueError, match="none of the 1"):
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
