"""Reference arrays that lie beside a developer's checkout; tests that need them are skipped elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def load(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and JSON sidecar of a golden file, or skip the calling test."""
    file = SHARED / "golden" / f"{name}.npz"
    if not file.is_file():
        pytest.skip(f"golden data {name} is not at hand")
    with np.load(file) as arrays:
        return dict(arrays), json.loads(file.with_suffix(".json").read_text())
