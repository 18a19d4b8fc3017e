"""Examples as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# One thread: small networks gain nothing from more, and tests run beside one another.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def run(script: str, *arguments: str | Path) -> str:
    """What an example prints. It must end well, and use subspaces for what they were learned for."""
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ProvenanceWarning" not in done.stderr, done.stderr[-3000:]
    return done.stdout
