"""Starting ranks as torchrun does, on this machine only."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.core.test_storage import environment

ROOT = Path(__file__).resolve().parents[2]


def start_ranks(size: int, arguments: list[str]) -> list[subprocess.Popen[str]]:
    """Processes `python arguments…` that know of each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **environment(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout: float = 600) -> list[tuple[int, str]]:
    """Exit code and standard error of each; whoever is left after the time is killed."""
    ended = []
    try:
        for process in processes:
            _, errors = process.communicate(timeout=timeout)
            ended.append((process.returncode, errors))
    finally:
        for process in processes:
            if process.poll() is None:
                os.kill(process.pid, 9)
                process.communicate()
    return ended
