"""Every example says how it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(script: str, *arguments: str | Path) -> str:
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("script", sorted(file.name for file in EXAMPLES.glob("*.py")))
def test_help(script: str) -> None:
    assert "usage:" in run(script, "--help")
