"""Every example says how it is used."""

from __future__ import annotations

import pytest

from .examples.running import EXAMPLES, run


@pytest.mark.parametrize("script", sorted(file.name for file in EXAMPLES.glob("*.py")))
def test_help(script: str) -> None:
    assert "usage:" in run(script, "--help")
