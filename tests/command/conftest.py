"""Pictures and a finished audit of the tiny network, made once."""

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
from .tiny import INPUT, MODEL, pictures


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
    succeeded(
        "audit", MODEL, *INPUT, "--train", train, "--test", test, "--target", "blobs", "--out", out,
        "--subspaces", 2, "--layer", "4",
    )  # fmt: skip
    return Finished(out, out.with_suffix(".drsa"), train, test)
