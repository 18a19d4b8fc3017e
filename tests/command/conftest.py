"""Pictures, concepts and a finished audit of the tiny network, made once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("click")
pytest.importorskip("jinja2")
pytest.importorskip("captum")
pytest.importorskip("zennit")
pytest.importorskip("timm")
pytest.importorskip("torchvision")
pytest.importorskip("cv2")
from .running import succeeded
from .tiny import FIT, GXI, INPUT, MODEL, pictures


@dataclass(frozen=True)
class Finished:
    """A finished audit: report, work folder, and the folders of its images."""

    report: Path
    work: Path
    train: Path
    test: Path


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Folders of class folders to learn from and to test on."""
    root = tmp_path_factory.mktemp("pictures")
    return pictures(root / "train", 8), pictures(root / "test", 6, seed=1)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, folders) -> Finished:
    """An audit with everything in it."""
    train, test = folders
    out = tmp_path_factory.mktemp("audit") / "report.html"
    words = ("--train", train, "--test", test, "--target", "blobs", "--out", out, "--subspaces", 2)
    succeeded("audit", MODEL, *INPUT, *words, "--layer", "4")
    return Finished(out, out.with_suffix(".drsa"), train, test)


@pytest.fixture(scope="session")
def fitted(tmp_path_factory, folders) -> Path:
    """A file with two concepts of class 0, learned with gradients."""
    out = tmp_path_factory.mktemp("fit") / "blobs.safetensors"
    succeeded("fit", MODEL, *INPUT, *GXI, "--train", folders[0], "--out", out, *FIT)
    return out
