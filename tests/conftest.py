"""Small tensors gain nothing from threads, and one thread adds in the same order in every run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As torch has them where nobody asks for another number."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB; only where this user may mount one, in a container for instance."""
    mount, place = shutil.which("mount"), tmp_path / "disk"
    place.mkdir()
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a file system of its own cannot be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)
