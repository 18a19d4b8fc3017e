"""Ctrl-C: nothing is half-written, and the same command goes on."""

from __future__ import annotations

import pytest
import torch
from drsa_audit import steps
from drsa_core import Subspaces

from zennit_drsa import DisentangledAttributor

from .running import drsa, files_in, succeeded
from .tiny import INPUT, MODEL

PLACES = {
    "pairs": (DisentangledAttributor, "collect"),
    "concepts": (steps, "relevance_of"),
    "maps": (steps, "explain_batch"),
    "flipping": (steps, "patch_flipping"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupted_audit_goes_on(finished, tmp_path, monkeypatch, place: str) -> None:
    out = tmp_path / "report.html"
    words = ("audit", MODEL, *INPUT, "--train", finished.train, "--test", finished.test, "--target", "blobs",
             "--out", out, "--subspaces", 2, "--layer", "4")  # fmt: skip
    owner, name = PLACES[place]
    original, calls = getattr(owner, name), []

    def interrupted(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == (2 if place in ("maps", "flipping") else 1):
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        if place == "concepts":
            patch.setattr("drsa_audit.auditing.relevance_of", interrupted)
        result = drsa(*words)
    assert result.exit_code == 130
    # Click ends the terminal's line with ^C first.
    assert result.stderr.strip() == (
        "drsa: interrupted; nothing is half-written, and the same command goes on from here"
    )
    assert not out.exists()
    assert not [file for file in files_in(tmp_path) if file.suffix == ".tmp"]

    done = {
        file: file.stat().st_mtime_ns for file in files_in(tmp_path) if file.name != "subspaces.safetensors"
    }
    succeeded(*words)
    assert out.exists()
    # What was done was not done again.
    assert all(file.stat().st_mtime_ns == time for file, time in done.items() if ".lock" not in file.name)
    first, second = (
        Subspaces.load(folder / "subspaces.safetensors")
        for folder in (finished.work, out.with_suffix(".drsa"))
    )
    assert torch.equal(first.basis, second.basis)
