"""The example of many classes under torchrun, as a user runs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .running import ENVIRONMENT, EXAMPLES, run


def test_many_classes(tmp_path) -> None:
    pytest.importorskip("zennit")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(EXAMPLES / "many_classes.py"), "--out", str(tmp_path / "two")]
    environment = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    shared = [line.rpartition(", ")[0] for line in done.stdout.splitlines()]
    assert shared[0].startswith("class 0: 8 images, 160 pairs, objective ")
    assert len(shared) == 6
    # One process resumes the job of two and prints the same; nothing is left to be done.
    again = run("many_classes.py", "--out", tmp_path / "two")
    assert again == done.stdout
