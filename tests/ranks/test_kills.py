"""A sample of `tests/benchmarks/kills.py`: a killed job loses nothing but the unit under way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.test_storage import environment

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "kills.py"


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_a_few_kills() -> None:
    for package in ("captum", "zennit", "timm", "cv2", "matplotlib"):
        pytest.importorskip(package)
    command = [sys.executable, str(SCRIPT), "--kills", "6", "--seed", "1"]
    command += ["--case", "collection", "many classes, 2 ranks"]
    ended = subprocess.run(
        command, env={**environment(), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    rows = [line.split("|")[1:-1] for line in ended.stdout.splitlines()[2:]]
    assert [[cell.strip() for cell in (row[0], row[2], row[4])] for row in rows] == [
        ["collection", "3", "none"],
        ["many classes, 2 ranks", "3", "none"],
    ], ended.stdout + ended.stderr
    assert ended.returncode == 0
