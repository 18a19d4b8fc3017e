"""Figures of the benchmark."""

from __future__ import annotations

from pathlib import Path

from .experiment import Record


def draw_figures(records: list[Record], out: Path, layer: str, n_subspaces: int) -> list[Path]:
    """Draw what the records allow."""
    return []
