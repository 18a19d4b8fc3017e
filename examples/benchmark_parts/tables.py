"""Tables of the benchmark: Markdown, CSV and JSON."""

from __future__ import annotations

from pathlib import Path

from .experiment import Record


def write_tables(records: list[Record], out: Path, layer: str, n_subspaces: int) -> str:
    """Write the tables and return the Markdown."""
    return ""
