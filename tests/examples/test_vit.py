"""The example of transformers runs as a user runs it, on a small network with random weights."""

from __future__ import annotations

import re

import pytest

from .running import run

FACTORY = """
import timm
import torch

def factory():
    torch.manual_seed(0)
    return timm.create_model("test_vit", pretrained=False, num_classes=5, img_size=64)
"""


def test_concepts_of_a_vit_and_what_keeps_the_rest(tmp_path) -> None:
    for package in ("skimage", "timm", "zennit", "matplotlib"):
        pytest.importorskip(package)
    (tmp_path / "models.py").write_text(FACTORY)
    figure = tmp_path / "vit.png"
    model = f"{tmp_path / 'models.py'}:factory"
    printed = run("vit.py", "--model", model, "--crops", "3", "--concepts", "2", "--figure", figure)
    assert "concepts of blocks.2 from 3 images" in printed  # the middle of six blocks
    error = re.search(r"against the whole map: off by ([\d.e-]+)", printed)
    assert error is not None
    assert float(error[1]) < 1e-5  # float32, as in the design's table
    shares = {
        name: _share(text)
        for name, text in re.findall(r"(sum of all maps|absorbed by [^:]+): (\S+) of the score", printed)
    }
    assert {"absorbed by position embeddings", "absorbed by prefix tokens"} <= set(shares)
    assert sum(shares.values()) == pytest.approx(1, abs=0.003)  # each is rounded to 0.1 %
    assert figure.stat().st_size > 10_000


def _share(text: str) -> float:
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)
