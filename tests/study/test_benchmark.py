"""The paper's plan, from the settings to tables and figures, on a small network of a factory."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("captum")
pytest.importorskip("zennit")
pytest.importorskip("matplotlib")

from drsa_audit import Network
from drsa_audit.networks import SuitableRules
from drsa_core import PRCA, Pairs, ProvenanceWarning, Subspaces
from drsa_core.evaluation import Preprocessing
from safetensors.torch import save_file
from study.benchmark import BenchmarkSettings, run_benchmark
from study.results import depth_of
from study.summary import summarise_records
from zennit.composites import EpsilonPlus

from tests.audit.photos import random_photos


def small_network() -> Network:
    """Outputs stand for the classes 5, 1 and 3."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
        )
    return Network(
        model, 64, Preprocessing.from_mean_std(0.5, 0.25), "1", lambda layer: EpsilonPlus(), (5, 1, 3)
    )


@pytest.fixture
def settings(tmp_path) -> BenchmarkSettings:
    data = random_photos(tmp_path / "data", ["001_a", "003_b"], 3, 2, 64)
    return BenchmarkSettings(
        data=data,
        out=tmp_path / "out",
        model=f"{__name__}:small_network",
        subspaces=2,
        ks=(2, 4),
        dims=(1, 2),
        layers=("3",),
        seeds=2,
        samples=2,
        fill="constant",
        backend="gxi",
    )


def test_all_stages_and_what_a_second_run_does(settings: BenchmarkSettings) -> None:
    said: list[str] = []
    records = run_benchmark(settings, said.append)
    # Readings of each class: DRSA, the whole, three single ones, DSA, DRSA with balance, two of each of two
    # random seeds; K = 4 and another layer with three methods each; four methods at d = 1 and 2; five
    # attributions; ablation of five sets of concepts, stability of three.
    assert len(records) == 2 * (2 + 3 + 2 + 4 + 3 + 3 + 8 + 5 + 5 + 3)
    stages = {"main", "layers", "subspaces", "dims", "attribution", "ablation", "stability"}
    assert {r["stage"] for r in records} == stages
    assert {r["layer"] for r in records if r["stage"] == "layers"} == {"3"}
    text = (settings.out / "tables.md").read_text()
    for title in (
        "Tables 1 and F.1",
        "Tables 2 and F.2",
        "Table D.1",
        "Subspace dimensions",
        "Layers, K = 2",
    ):
        assert title in text
    assert said[-1].startswith(f"{len(records)} evaluations")

    kept = (settings.out / "tables.json").read_text()
    again = run_benchmark(settings, lambda line: None)
    assert again == records
    assert (settings.out / "tables.json").read_text() == kept
    with pytest.raises(ValueError, match=r"begun with other settings \(samples: 2 → 3\)"):
        run_benchmark(replace(settings, samples=3), lambda line: None)


@pytest.mark.parametrize(
    ("begun_with", "change"),
    [({"gamma": 1.0}, "gamma: 1.0 → None"), ({"concepts": "common"}, "concepts: common → None")],
)
def test_a_setting_that_is_dropped_is_refused(
    settings: BenchmarkSettings, begun_with: dict[str, Any], change: str
) -> None:
    some = replace(settings, model=f"{__name__}:network_with_gamma", backend="lrp", samples=None)
    some = replace(some, stages=("main",), methods=("prca",))
    run_benchmark(replace(some, **begun_with), lambda line: None)
    with pytest.raises(ValueError, match=rf"begun with other settings \({change}"):
        run_benchmark(some, lambda line: None)


def test_other_photographs_are_refused(settings: BenchmarkSettings) -> None:
    settings = replace(settings, stages=("main",), methods=("prca",))
    before = run_benchmark(settings, lambda line: None)
    photo = settings.data / "val" / "003_b" / "00.png"
    kept = photo.read_bytes()
    photo.write_bytes((settings.data / "val" / "003_b" / "01.png").read_bytes())
    with pytest.raises(ValueError, match=r"results of 003_b .* \(changed: val/003_b/00.png\); put those"):
        run_benchmark(settings, lambda line: None)
    photo.rename(photo.with_name("09.png"))
    with pytest.raises(ValueError, match=r"\(new: val/003_b/09.png; missing: val/003_b/00.png\)"):
        run_benchmark(settings, lambda line: None)
    photo.with_name("09.png").unlink()
    photo.write_bytes(kept)
    assert run_benchmark(settings, lambda line: None) == before
    # Another folder takes what is there.
    photo.write_bytes(kept + b"more")
    assert run_benchmark(replace(settings, out=settings.out.parent / "new"), lambda line: None)


def test_another_network_under_the_same_name_is_refused(settings: BenchmarkSettings) -> None:
    weights = settings.out.parent / "weights.safetensors"
    state = small_network().model.state_dict()
    save_file(state, weights)
    settings = replace(settings, weights=weights, stages=("main",), methods=("prca",))
    run_benchmark(settings, lambda line: None)
    save_file({name: 2 * value for name, value in state.items()}, weights)  # trained on, say
    with pytest.raises(ValueError, match=r"are of another network, by its fingerprint;"):
        run_benchmark(settings, lambda line: None)


def test_what_is_asked_for_is_added_to_a_folder(settings: BenchmarkSettings) -> None:
    pytest.importorskip("sklearn")
    data = random_photos(settings.out.parent / "three", ["001_a", "003_b", "005_c"], 3, 2, 64)
    settings = replace(settings, data=data)
    first = replace(settings, stages=("main",), methods=("drsa", "dsa"))
    before = run_benchmark(first, lambda line: None)
    # A folder from before there were concept ablation and stability, and γ among the settings.
    assert "gamma" not in (settings.out / "settings.json").read_text().replace("upper_gamma", "")
    text = (settings.out / "tables.md").read_text()
    assert "separability" in text
    assert "ablation" not in text
    names = ("drsa", "dsa", "drsa-lines", "nmf", "channels", "ibd-classes")
    more = replace(settings, stages=("main", "ablation", "stability"), methods=names)
    records = run_benchmark(more, lambda line: None)
    assert [r for r in records if r["stage"] == "main"][: len(before)] == before
    summary = json.loads((settings.out / "summary.json").read_text())
    rows = summary["tables"]["many"]["rows"]
    assert set(rows) == {"whole", *names}
    for method in names:
        assert -1 <= rows[method]["ablation"]["mean"] <= 1
        assert ("stability" in rows[method]) == (method != "ibd-classes")
    assert rows["nmf"]["n_images"] == 6
    # The paired difference is the difference of the means: all have the same images.
    gain = summary["tables"]["many"]["differences"]["dsa"]["separability"]
    expected = rows["drsa"]["separability"]["mean"] - rows["dsa"]["separability"]["mean"]
    assert gain["mean"] == pytest.approx(expected, abs=2e-5)  # five digits are kept
    assert gain["interval"][0] <= gain["mean"] <= gain["interval"][1]
    by_class = [sum(r["separability"]) / 2 for r in records if r.get("separability") and r["method"] == "nmf"]
    assert rows["nmf"]["separability"]["mean"] == pytest.approx(sum(by_class) / 3, abs=1e-5)
    with pytest.raises(ValueError, match="no method nonsense"):
        run_benchmark(replace(settings, methods=("nonsense",)), lambda line: None)


def test_ablations_run_only_the_methods_that_are_asked_for(settings: BenchmarkSettings) -> None:
    some = replace(
        settings, stages=("main", "subspaces", "dims"), ks=(2, 3), dims=(1, 2), methods=("dsa", "pca")
    )
    records = run_benchmark(some, lambda line: None)
    found = {
        (r["stage"], r["method"], r["n_subspaces"] if r["stage"] != "dims" else r["dims"]) for r in records
    }
    assert {method for _, method, _ in found} == {"dsa", "pca"}
    other_k = {k for k in (2, 3) if k != settings.subspaces}
    assert {entry for entry in found if entry[0] == "subspaces"} == {("subspaces", "dsa", k) for k in other_k}
    assert {entry for entry in found if entry[0] == "dims"} == {("dims", "pca", 1), ("dims", "pca", 2)}


def network_with_gamma() -> Network:
    """A tiny EfficientNet with the rules that `load_network` gives to one."""
    timm = pytest.importorskip("timm")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model("test_efficientnet", num_classes=4).eval()
    rules = SuitableRules(model, (0.5,) * 3, (0.25,) * 3)
    return Network(model, 64, Preprocessing.from_mean_std(0.5, 0.25), "blocks.1", rules)


def test_gamma_is_compared_on_training_images(settings: BenchmarkSettings) -> None:
    factory = f"{__name__}:network_with_gamma"
    one = replace(settings, model=factory, backend="lrp", stages=("gamma",), gammas=(0.0, 1.0), val_images=1)
    records = run_benchmark(one, lambda line: None)
    assert [(r["class"], r["method"]) for r in records] == [
        *(("001_a", "γ = 0"), ("003_b", "γ = 0")),
        *(("001_a", "γ = 1"), ("003_b", "γ = 1")),
    ]
    assert records[0]["peakness"] != records[2]["peakness"]
    rows = json.loads((settings.out / "summary.json").read_text())["tables"]["gamma"]["rows"]
    assert rows["γ = 1"]["aupc"]["by_class"]["003_b"] == pytest.approx(records[3]["aupc"][0], abs=1e-5)
    # The validation photographs play no part in it.
    for file in (settings.data / "val").rglob("*.png"):
        file.write_bytes((settings.data / "train" / "001_a" / "00.png").read_bytes())
    again = replace(one, out=settings.out.parent / "again")
    found = run_benchmark(again, lambda line: None)
    assert [r["peakness"] for r in found] == [r["peakness"] for r in records]
    chosen = replace(one, out=settings.out.parent / "other", gamma=1.0, gammas=(0.0,))
    assert run_benchmark(chosen, lambda line: None)[0]["peakness"] == records[0]["peakness"]


def test_upper_gamma_counts_in_every_stage(settings: BenchmarkSettings) -> None:
    factory = f"{__name__}:network_with_gamma"
    usual = replace(settings, model=factory, backend="lrp", samples=None, methods=("drsa",))
    usual = replace(usual, stages=("main", "attribution", "gamma"), attributions=("lrp",), gammas=(0.25,))
    other = replace(usual, out=settings.out.parent / "other", upper_gamma=1.0)
    before, after = (run_benchmark(one, lambda line: None) for one in (usual, other))
    for one, two in zip(before, after, strict=True):
        assert (one["stage"], one["method"]) == (two["stage"], two["method"])
        assert one["peakness"] != two["peakness"]
    # One step or all concepts together: the same rules, the same maps.
    whole, lrp = ([r for r in after if r["method"] == name] for name in ("whole", "lrp"))
    for one, two in zip(whole, lrp, strict=True):
        assert one["peakness"] == pytest.approx(two["peakness"], rel=1e-3)


def test_time_that_is_over_leaves_what_there_is(settings: BenchmarkSettings) -> None:
    said: list[str] = []
    assert run_benchmark(replace(settings, max_minutes=-1.0), said.append) == []
    assert "out of time; the same command goes on from here" in said
    some = run_benchmark(replace(settings, methods=("prca",), stages=("main",)), said.append)
    assert run_benchmark(replace(settings, max_minutes=-1.0), said.append) == some


def test_common_concepts_are_learned_once_from_all_training_classes(
    settings: BenchmarkSettings, tmp_path: Path
) -> None:
    data = random_photos(tmp_path / "other", ["001_a", "003_b", "005_c"], 3, 1, 64)
    for folder in ("train/005_c", "val/001_a", "val/003_b"):  # learned from other classes than evaluated on
        shutil.rmtree(data / folder)
    (data / "val/003_b").mkdir()
    shutil.copy(next((data / "val/005_c").iterdir()), data / "val/003_b/same.png")
    common = replace(
        settings, data=data, concepts="common", stages=("main",), methods=("drsa", "prca", "dsa")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", ProvenanceWarning)
        records = run_benchmark(common, lambda line: None)
    assert {r["class"] for r in records} == {"003_b", "005_c"}
    assert len(records) == 2 * 4
    files = sorted(file.name for file in (settings.out / "subspaces/1").rglob("*.safetensors"))
    assert len(files) == 3  # one for each method, not for each class
    learned = [Pairs.load(settings.out / f"pairs/1/{name}/all.safetensors") for name in ("001_a", "003_b")]
    a, c = (torch.cat([getattr(pairs, name) for pairs in learned]) for name in "ac")
    expected = PRCA(1).fit(a, c).subspaces_
    found = Subspaces.load(next((settings.out / "subspaces/1/common").glob("prca*")))
    torch.testing.assert_close(found.basis[:, :1].abs(), expected.basis[:, :1].abs(), rtol=0, atol=1e-5)
    # One photograph a class: classes are what varies, and there is no interval within them.
    table = summarise_records(records, "1", 2)["tables"]["many"]
    assert table["differences"]["dsa"]["aupc"]["interval"] is None
    assert table["differences"]["dsa"]["aupc"]["n_classes"] == 2
    shutil.move(data / "train/003_b", data / "train/004_d")
    with pytest.raises(ValueError, match=r"begun with other settings \(learned_from"):
        run_benchmark(common, lambda line: None)
    with pytest.raises(ValueError, match="with common concepts there is no stability"):
        run_benchmark(replace(common, stages=("main", "stability")), lambda line: None)


def test_layers_are_in_the_order_of_their_numbers() -> None:
    layers = ["blocks.10", "features.29", "blocks.2.conv", "blocks.2", "stem", "features.3"]
    expected = ["blocks.2", "blocks.2.conv", "blocks.10", "features.3", "features.29", "stem"]
    assert sorted(layers, key=depth_of) == expected
    assert sorted(["16", "4", "2"], key=depth_of) == ["2", "4", "16"]  # K and d
