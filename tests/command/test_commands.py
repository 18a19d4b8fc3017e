"""Every command on the tiny network: what it prints and leaves."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.models
from drsa_audit import AuditSettings, audit, steps
from drsa_audit.auditing import command_of
from drsa_audit.layers import find_concept_layer
from drsa_audit.networks import open_network
from drsa_audit.results import AuditRecord, Explained
from drsa_audit.settings import ModelSettings
from drsa_core import Subspaces
from drsa_core.evaluation import concept_ablation
from PIL import Image
from safetensors.torch import save_file

from tests.model_state import model_state

from .running import drsa, succeeded
from .tiny import FIT, GXI, INPUT, MODEL, SIZE, network, pictures

ROOT = Path(__file__).resolve().parents[2]
MAIN = "from drsa_audit.command import main; main()"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "shared"), str(ROOT)])}


def test_help_has_examples_and_exit_codes() -> None:
    text = succeeded("--help").stdout
    assert succeeded().stdout == text
    for code in ("0 done", "2 bad input", "3 `drsa doctor`", "130 interrupted", "1 a fault"):
        assert code in text
    for command in ("audit", "layers", "doctor", "fit", "explain", "evaluate", "report"):
        assert f"\n  drsa {command} " in succeeded(command, "--help").stdout


def test_layers_shows_the_tree_and_suggests_one(tmp_path) -> None:
    result = succeeded("layers", MODEL, *INPUT)
    assert "suggested: --layer 4" in result.stdout
    assert "16×12×12" in result.stdout
    found = json.loads(succeeded("layers", MODEL, *INPUT, "--json").stdout)
    assert (found["suggested"], found["outputs"]) == ("4", 3)
    first = {"name": "0", "kind": "Conv2d", "shape": [8, SIZE, SIZE], "parameters": 3 * 8 * 9 + 8}
    assert found["layers"][0] == first
    # The suggestion is what `fit` takes.
    file = tmp_path / "weights.safetensors"
    save_file(torchvision.models.resnet18(weights=None).state_dict(), file)
    settings = ModelSettings(model="resnet18", weights=str(file), size=64)
    chosen = find_concept_layer(open_network(settings), None, torch.zeros(1, 3, 64, 64)).name
    words = ("layers", "resnet18", "--weights", file, "--size", "64", "--json")
    assert json.loads(succeeded(*words).stdout)["suggested"] == chosen == "layer4"


def test_doctor_passes_and_fails(folders) -> None:
    good = succeeded("doctor", MODEL, *INPUT, "--images", folders[0], "--table")
    assert "valid on this model" in good.stdout
    assert "Conv2d" in good.stdout
    bad = drsa("doctor", "tests.command.tiny:Gated", *INPUT, "--json")
    assert bad.exit_code == 3
    found = json.loads(bad.stdout)
    assert (found["valid"], found["backend"]) == (False, "ig")
    assert any(text.endswith(" has no rule") for text in found["doctor"]["findings"])
    assert found["doctor"]["findings"][0] in found["reason"]


def test_fit_saves_subspaces_and_chooses_how_many(fitted, folders, tmp_path, monkeypatch) -> None:
    made = Subspaces.load(fitted).provenance
    assert made is not None
    assert (made.layer, made.target, made.positions) == ("4", 0, 20)
    assert Subspaces.load(fitted).metadata["explained_class"] == {"name": "blobs", "index": 0}
    monkeypatch.setattr(steps, "TRIED", range(2, 4))
    out = tmp_path / "auto.safetensors"
    words = ("--layer", "4", "--target", "0", "--subspaces", "auto", "--json")
    found = json.loads(succeeded("fit", MODEL, *INPUT, "--train", folders[0], "--out", out, *words).stdout)
    assert found["choice"]["n_subspaces"] == [2, 3]
    assert Subspaces.load(out).n_subspaces == found["choice"]["best"] == len(found["stability"]["index"])


def test_explain_writes_pictures_and_a_table_that_add_up(finished, tmp_path) -> None:
    out, concepts = tmp_path / "maps", finished.work / "subspaces.safetensors"
    words = ("--subspaces", concepts, "--images", finished.test / "0_blobs", "--out", out)
    succeeded("explain", MODEL, *INPUT, *words)
    shown = sorted(out.glob("*.png"))
    assert len(shown) == 6
    with Image.open(shown[0]) as picture:
        width, height = picture.size  # the photograph, its map and two concept maps, side by side
        assert width > 2.5 * height
    with (out / "relevance.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    (folder,) = [path for path in out.iterdir() if path.is_dir()]
    explained = Explained.load(folder)
    for n, row in enumerate(rows):
        assert float(row["S1"]) == pytest.approx(float(explained.relevance[n, 0]), rel=1e-4)
    # LRP with complete subspaces: the maps add up to the one map, in float32.
    largest = float(explained.whole.abs().max())
    assert float((explained.maps.sum(1) - explained.whole).abs().max()) <= 1e-5 * largest


@pytest.mark.parametrize("k", [1, 2])
def test_evaluate_writes_flipping_and_ablation(folders, tmp_path, k: int) -> None:
    out, concepts = tmp_path / "evaluation.json", tmp_path / "concepts.safetensors"
    succeeded("fit", MODEL, *INPUT, *GXI, "--train", folders[0], "--out", concepts, *FIT, "--subspaces", k)
    words = ("--subspaces", concepts, "--test", folders[1], "--out", out, "--json")
    printed = json.loads(succeeded("evaluate", MODEL, *INPUT, *GXI, *words).stdout)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(out.read_text(), parse_constant=refuse)
    assert printed["flipping"] == found["flipping"]
    assert set(found["flipping"]["curves"]) == {"concepts", "one map", "random"}
    assert all(curve["share"][0] == 0 for curve in found["flipping"]["curves"].values())
    assert all(curve["share"][-1] == 1 for curve in found["flipping"]["curves"].values())
    assert -1 <= found["ablation"]["correlation"] <= 1
    # Nothing is left of one concept without its mean.
    assert (found["ablation"]["within_images"] is None) == (k == 1)
    assert len(found["ablation"]["drop"]) == found["images"] == 6


def test_audit_leaves_a_report_and_all_that_it_is_made_of(finished) -> None:
    assert "Why “blobs”?" in finished.report.read_text()
    record = AuditRecord.load(finished.work)
    assert record.target == {"name": "blobs", "index": 0, "output": 0}
    assert set(record.other_classes) == {"bars", "noise"}
    assert record.stability is not None
    assert len(record.stability["index"]) == 2
    assert record.flipping is not None
    assert record.ablation is not None
    assert set(record.ablation["others"]) == {"DSA", "PCA", "random"}
    assert len(record.history) > 1
    assert {"pairs", "concepts", "maps", "flipping", "ablation"} <= set(record.seconds)
    explained = Explained.load(finished.work / record.explained)
    assert explained.maps.shape == (6, 2, SIZE, SIZE)


def test_concepts_are_compared_with_as_many_other_subspaces(finished, tmp_path, monkeypatch) -> None:
    """`PCA(k)` has two blocks whatever k is; its correlation would be one of two parts with another."""
    seen: list[Subspaces] = []

    def recorded(explainer: Any, inputs: Any, target: int, subspaces: Any = None, **options: Any) -> Any:
        seen.append(explainer.subspaces if subspaces is None else subspaces)
        return concept_ablation(explainer, inputs, target, subspaces, **options)

    monkeypatch.setattr(steps, "concept_ablation", recorded)
    words = ("--train", finished.train, "--test", finished.test, *FIT, "--out", tmp_path / "three.html")
    succeeded("audit", MODEL, *INPUT, *words, "--subspaces", 3, "--no-flipping")
    assert [found.n_subspaces for found in seen] == [3] * 4  # DRSA, DSA, PCA, random


def test_the_command_in_the_report_makes_it_again(finished, tmp_path, monkeypatch) -> None:
    words = AuditRecord.load(finished.work).command.split()
    assert words[:3] == ["drsa", "audit", MODEL]
    words[words.index("--out") + 1] = str(tmp_path / "again.html")
    succeeded(*words[1:])
    first, again = (
        Subspaces.load(folder / "subspaces.safetensors")
        for folder in (finished.work, tmp_path / "again.drsa")
    )
    assert torch.equal(first.basis, again.basis)
    monkeypatch.chdir(tmp_path)
    paths: dict[str, Any] = {name: Path(name) for name in ("train", "test", "out")}

    def word(model: str, **more: Any) -> list[str]:
        return shlex.split(command_of(AuditSettings(model=model, target=3, **paths, **more)))

    words = word("models/own.py:network", weights="own.pt", stability=False, channel_order="BGR")
    assert words[2] == f"{tmp_path}/models/own.py:network"
    assert words[words.index("--weights") + 1] == f"{tmp_path}/own.pt"
    assert words[words.index("--channels") + 1] == "BGR"
    assert "--no-stability" in words
    for model in (f"{tmp_path}/own.safetensors", "timm/resnet50", "package.models:network"):
        assert word(model.replace(f"{tmp_path}/", ""))[2] == model


def test_report_gives_other_names_to_the_page_and_the_subspaces(finished, tmp_path) -> None:
    names, out = tmp_path / "names.json", tmp_path / "named.html"
    names.write_text(json.dumps({"S1": "red <blob>"}))
    work = Path(shutil.copytree(finished.work, tmp_path / "copy.drsa"))
    succeeded("report", work, "--names", names, "--out", out)
    assert "red &lt;blob&gt;" in out.read_text()
    assert "red <blob>" not in out.read_text()
    assert Subspaces.load(work / "subspaces.safetensors").names == ("red <blob>", "S2")


def test_where_lrp_is_not_valid_another_method_is_taken_and_named(folders, tmp_path) -> None:
    out = tmp_path / "gated.html"
    words = ("--train", folders[0], "--test", folders[1], *FIT, "--layer", "features", "--out", out)
    more = ("--no-flipping", "--samples", 4, "--json")
    found = json.loads(succeeded("audit", "tests.command.tiny:Gated", *INPUT, *words, *more).stdout)
    assert found["method"]["backend"] == "ig"
    assert any("Integrated Gradients instead of LRP" in text for text in found["be_careful"])
    assert "Integrated Gradients instead of LRP" in out.read_text()


def test_one_call_in_python_leaves_the_model_as_it_was(folders, tmp_path, capsys) -> None:
    model = network()
    before = model_state(model)
    words: dict[str, Any] = {"target": "blobs", "layer": "4", "size": SIZE, "resize": SIZE}
    words |= {"mean": [0.5] * 3, "std": [0.25] * 3, "subspaces": 2, "stability": False}
    words |= {"train": folders[0], "test": folders[1], "names": ["first", "second"]}
    for shown in (True, False):
        result = audit(model, out=tmp_path / f"{shown}.html", progress=shown, **words)
        said = capsys.readouterr().err
        for step in ("Collecting pairs", "Explaining", "Removing patches", "Taking concepts out"):
            assert bool(re.search(rf"{step} .*: about \d+ s", said)) == shown, (step, said)
    assert said == ""
    assert model_state(model) == before
    assert result.subspaces.names == ("first", "second")
    assert "first (" in result.summary()["verdict"]
    # The shares are those of the positive relevance.
    positive = result.explained.relevance.double().clamp(min=0).sum(0)
    torch.testing.assert_close(result.verdict.shares, positive / positive.sum())
    with pytest.raises(TypeError, match="audit has no setting 'concept'"):
        audit(model, train="a", test="b", target=0, out="c", concept=3)


def test_a_process_of_its_own_is_quiet_in_a_pipe(tmp_path) -> None:
    pictures(tmp_path / "train", 4, ("0_blobs",))
    words = ["fit", MODEL, *INPUT, *map(str, FIT), "--train", "train", "--out", "out.safetensors"]
    command = [sys.executable, "-c", MAIN, *words]
    run = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()
    assert first == "wrote out.safetensors: 2 concepts"
    assert second.startswith("at layer 4, by LRP(")
    assert run.stderr == ""


def test_missing_packages_are_said_in_one_line() -> None:
    hide = "import importlib.util as u; f = u.find_spec; "
    hide += "u.find_spec = lambda n, *a: None if n == 'click' else f(n, *a); "
    hide += f"import sys; sys.modules['click'] = None; {MAIN}"
    command = [sys.executable, "-c", hide]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("drsa: click not installed; pip install 'captum-zennit-drsa[audit]'")
    assert len(run.stderr.splitlines()) == 1


def test_a_single_output_is_no_prediction(folders, tmp_path) -> None:
    """Its rank is the first, whatever it says: here it speaks against the class for every image."""
    model, out = "tests.command.tiny:one_output", tmp_path / "report.html"
    images = folders[1] / "0_blobs"
    words = ["--train", folders[0] / "0_blobs", "--test", images, *FIT, "--no-flipping", "--no-ablation"]
    found = json.loads(succeeded("audit", model, *INPUT, *words, "--out", out, "--json").stdout)
    assert found["verdict"].startswith("The model has one output, “blobs”. Its evidence")
    assert not any("predicts" in text for text in found["be_careful"])
    assert "not predicted as the class" not in out.read_text()
    concepts = ("--subspaces", out.with_suffix(".drsa") / "subspaces.safetensors")
    succeeded("explain", model, *INPUT, *concepts, "--images", images, "--out", tmp_path / "maps")
    with (tmp_path / "maps" / "relevance.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert all(float(row["score"]) < 0 and row["rank"] == "" for row in rows)
