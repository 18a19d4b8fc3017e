"""Reference arrays. A small sample is part of the repository; the others lie beside a developer's checkout.

Tests that need an array that is not at hand are skipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"
SAMPLE = Path(__file__).resolve().parent / "golden_sample"


def load(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and JSON sidecar of a golden file, or skip the calling test."""
    for folder in (SHARED / "golden", SAMPLE):
        file = folder / f"{name}.npz"
        if file.is_file():
            with np.load(file) as arrays:
                return dict(arrays), json.loads(file.with_suffix(".json").read_text())
    pytest.skip(f"golden data {name} is not at hand")
