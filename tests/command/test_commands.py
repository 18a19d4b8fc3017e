"""Every command on a tiny network: what it prints, what it writes, how it ends."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
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
from .tiny import INPUT, MODEL, SIZE, network, pictures

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, folders) -> Path:
    out = tmp_path_factory.mktemp("fit") / "blobs.safetensors"
    words = ("--layer", "4", "--target", "blobs", "--subspaces", 2, "--no-stability")
    succeeded("fit", MODEL, *INPUT, "--train", folders[0], "--out", out, *words)
    return out


@pytest.mark.parametrize("command", ["audit", "layers", "doctor", "fit", "explain", "evaluate", "report"])
def test_help_has_an_example(command: str) -> None:
    text = succeeded(command, "--help").stdout
    assert f"\n  drsa {command} " in text


def test_the_command_says_what_its_exit_codes_mean() -> None:
    text = succeeded("--help").stdout
    for code in ("0 done", "2 bad input", "3 `drsa doctor`", "130 interrupted", "1 a fault"):
        assert code in text


def test_the_command_alone_shows_its_help() -> None:
    assert succeeded().stdout == succeeded("--help").stdout


def test_layers_shows_the_tree_and_suggests_one() -> None:
    result = succeeded("layers", MODEL, *INPUT)
    assert "suggested: --layer 4" in result.stdout
    assert "16×12×12" in result.stdout
    as_json = json.loads(succeeded("layers", MODEL, *INPUT, "--json").stdout)
    assert (as_json["suggested"], as_json["outputs"]) == ("4", 3)
    assert as_json["layers"][0] == {
        "name": "0", "kind": "Conv2d", "shape": [8, SIZE, SIZE], "parameters": 3 * 8 * 9 + 8,
    }  # fmt: skip


def test_layers_suggests_what_fit_takes(tmp_path) -> None:
    model = torchvision.models.resnet18(weights=None)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    settings = ModelSettings(model="resnet18", weights=str(tmp_path / "weights.safetensors"), size=64)
    chosen = find_concept_layer(open_network(settings), None, torch.zeros(1, 3, 64, 64)).name
    words = ("layers", "resnet18", "--weights", tmp_path / "weights.safetensors", "--size", "64", "--json")
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


def test_fit_saves_subspaces_with_their_provenance(fitted) -> None:
    subspaces = Subspaces.load(fitted)
    assert subspaces.n_subspaces == 2
    made = subspaces.provenance
    assert made is not None
    assert (made.layer, made.target, made.positions) == ("4", 0, 20)
    assert subspaces.metadata["explained_class"] == {"name": "blobs", "index": 0}


def test_fit_chooses_how_many_concepts(folders, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("drsa_audit.steps.TRIED", range(2, 4))
    words = ("--layer", "4", "--target", "0", "--subspaces", "auto", "--json")
    result = succeeded(
        "fit", MODEL, *INPUT, "--train", folders[0], "--out", tmp_path / "auto.safetensors", *words
    )
    found = json.loads(result.stdout)
    assert found["choice"]["n_subspaces"] == [2, 3]
    n_subspaces = Subspaces.load(tmp_path / "auto.safetensors").n_subspaces
    assert n_subspaces == found["choice"]["best"] == len(found["stability"]["index"])


def test_every_long_step_says_before_how_long_it_takes(folders, tmp_path, capsys) -> None:
    train, test = (folder / "0_blobs" for folder in folders)
    settings: dict[str, Any] = {
        "target": 0,
        "layer": "4",
        "subspaces": 2,
        "mean": [0.5] * 3,
        "std": [0.25] * 3,
        "size": SIZE,
    }
    model = network()
    for shown in (True, False):
        out = tmp_path / f"report{shown}.html"
        audit(model, train=train, test=test, out=out, progress=shown, **settings)
        said = capsys.readouterr().err
        for step in ("Collecting pairs", "Learning concepts", "Explaining", "Removing patches", "Taking"):
            assert bool(re.search(rf"{step} .*: about \d+ s", said)) == shown, (step, said)
    assert said == ""


def test_explain_writes_pictures_and_a_table_that_add_up(fitted, folders, tmp_path) -> None:
    images = folders[1] / "0_blobs"
    out = tmp_path / "maps"
    succeeded("explain", MODEL, *INPUT, "--subspaces", fitted, "--images", images, "--out", out)
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


def test_evaluate_writes_flipping_and_ablation(fitted, folders, tmp_path) -> None:
    out = tmp_path / "evaluation.json"
    words = ("--subspaces", fitted, "--test", folders[1], "--out", out, "--json")
    printed = json.loads(succeeded("evaluate", MODEL, *INPUT, *words).stdout)
    found = json.loads(out.read_text())
    assert printed["flipping"] == found["flipping"]
    assert set(found["flipping"]["curves"]) == {"concepts", "one map", "random"}
    for curve in found["flipping"]["curves"].values():
        assert curve["share"][0] == 0
        assert curve["share"][-1] == 1
    assert -1 <= found["ablation"]["correlation"] <= 1
    assert len(found["ablation"]["drop"]) == found["images"] == 6


def test_audit_leaves_a_report_and_all_that_it_is_made_of(finished) -> None:
    text = finished.report.read_text()
    assert "Why “blobs”?" in text
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
    subspaces = Subspaces.load(finished.work / record.subspaces)
    assert explained.maps.shape == (6, subspaces.n_subspaces, SIZE, SIZE)


def test_concepts_are_compared_with_as_many_other_subspaces(finished, monkeypatch) -> None:
    """`PCA(k)` has two blocks whatever k is; its correlation would be one of two parts with another."""
    seen: list[Subspaces] = []

    def recorded(explainer: Any, inputs: Any, target: int, subspaces: Any = None, **options: Any) -> Any:
        seen.append(explainer.subspaces if subspaces is None else subspaces)
        return concept_ablation(explainer, inputs, target, subspaces, **options)

    monkeypatch.setattr(steps, "concept_ablation", recorded)
    out = finished.report.with_name("three.html")
    words = ("--subspaces", 3, "--layer", "4", "--no-stability", "--no-flipping")
    succeeded(
        "audit", MODEL, *INPUT, "--train", finished.train, "--test", finished.test, "--target", "blobs",
        "--out", out, *words,
    )  # fmt: skip
    assert [found.n_subspaces for found in seen] == [3] * 4  # DRSA, DSA, PCA, random


def test_the_command_in_the_report_makes_it_again(finished, tmp_path) -> None:
    words = AuditRecord.load(finished.work).command.split()
    assert words[:3] == ["drsa", "audit", MODEL]
    words[words.index("--out") + 1] = str(tmp_path / "again.html")
    succeeded(*words[1:])
    first, again = (
        Subspaces.load(folder / "subspaces.safetensors")
        for folder in (finished.work, tmp_path / "again.drsa")
    )
    assert torch.equal(first.basis, again.basis)


def test_the_command_in_the_report_has_absolute_paths(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths: dict[str, Any] = {name: Path(name) for name in ("train", "test", "out")}

    def word(model: str, **more: Any) -> list[str]:
        return shlex.split(command_of(AuditSettings(model=model, target=3, **paths, **more)))

    words = word("models/own.py:network", weights="own.pt")
    assert words[2] == f"{tmp_path}/models/own.py:network"
    assert words[words.index("--weights") + 1] == f"{tmp_path}/own.pt"
    assert word("own.safetensors")[2] == f"{tmp_path}/own.safetensors"
    assert word("timm/resnet50")[2] == "timm/resnet50"
    assert word("package.models:network")[2] == "package.models:network"


def test_report_gives_other_names_to_the_page_and_the_subspaces(finished, tmp_path) -> None:
    names = tmp_path / "names.json"
    names.write_text(json.dumps({"S1": "red <blob>"}))
    out = tmp_path / "named.html"
    work = tmp_path / "copy.drsa"
    subprocess.run(["cp", "-r", finished.work, work], check=True)
    succeeded("report", work, "--names", names, "--out", out)
    assert "red &lt;blob&gt;" in out.read_text()
    assert "red <blob>" not in out.read_text()
    assert Subspaces.load(work / "subspaces.safetensors").names == ("red <blob>", "S2")


def test_where_lrp_is_not_valid_another_method_is_taken_and_named(folders, tmp_path) -> None:
    out = tmp_path / "gated.html"
    words = ("--train", folders[0], "--test", folders[1], "--target", "0", "--out", out)
    extra = ("--layer", "features", "--subspaces", 2, "--no-stability", "--no-flipping", "--samples", 4)
    result = succeeded("audit", "tests.command.tiny:Gated", *INPUT, *words, *extra, "--json")
    found = json.loads(result.stdout)
    assert found["method"]["backend"] == "ig"
    assert any("Integrated Gradients instead of LRP" in text for text in found["be_careful"])
    assert "Integrated Gradients instead of LRP" in out.read_text()


def test_one_call_in_python_leaves_the_model_as_it_was(folders, tmp_path) -> None:
    model = network()
    before = model_state(model)
    result = audit(
        model,
        train=folders[0],
        test=folders[1],
        target="blobs",
        out=tmp_path / "report.html",
        layer="4",
        size=SIZE,
        resize=SIZE,
        mean=[0.5] * 3,
        std=[0.25] * 3,
        subspaces=2,
        stability=False,
        flipping=False,
        names=["first", "second"],
        progress=False,
    )
    assert model_state(model) == before
    assert result.report.is_file()
    assert result.subspaces.names == ("first", "second")
    assert "first (" in result.summary()["verdict"]
    # The shares are those of the positive relevance.
    positive = result.explained.relevance.double().clamp(min=0).sum(0)
    torch.testing.assert_close(result.verdict.shares, positive / positive.sum())
    with pytest.raises(TypeError, match="audit has no setting 'concept'"):
        audit(model, train="a", test="b", target=0, out="c", concept=3)


def test_a_process_of_its_own_is_quiet_in_a_pipe(tmp_path) -> None:
    pictures(tmp_path / "train", 4, ("0_blobs",))
    path = os.pathsep.join(str(place) for place in (ROOT / "shared", ROOT))
    command = [sys.executable, "-c", "from drsa_audit.command import main; main()"]
    words = [MODEL, *INPUT, "--layer", "4", "--target", "0", "--subspaces", "2", "--no-stability"]
    run = subprocess.run(
        [*command, "fit", *words, "--train", "train", "--out", "out.safetensors"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()
    assert first == "wrote out.safetensors: 2 concepts"
    assert second.startswith("at layer 4, by LRP(")
    assert run.stderr == ""


def test_what_is_not_installed_is_said_in_one_line(tmp_path) -> None:
    path = os.pathsep.join(str(place) for place in (ROOT / "shared", ROOT))
    hide = "import sys; sys.modules['click'] = None; from drsa_audit.command import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", f"import importlib.util as u; f = u.find_spec; "
         f"u.find_spec = lambda n, *a: None if n == 'click' else f(n, *a); {hide}"],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert run.stderr.startswith("drsa: click not installed; pip install 'captum-zennit-drsa[audit]'")
    assert len(run.stderr.splitlines()) == 1


def test_a_single_output_is_no_prediction(folders, tmp_path) -> None:
    """Its rank is the first, whatever it says: here it speaks against the class for every image."""
    words = ["--train", folders[0] / "0_blobs", "--test", folders[1] / "0_blobs", "--target", "0"]
    words += ["--layer", "4", "--subspaces", "2", "--no-stability", "--no-flipping", "--no-ablation"]
    model, out = "tests.command.tiny:one_output", tmp_path / "report.html"
    found = json.loads(succeeded("audit", model, *INPUT, *words, "--out", out, "--json").stdout)
    assert found["verdict"].startswith("The model has one output, “blobs”. Its evidence")
    assert not any("predicts" in text for text in found["be_careful"])
    assert "not predicted as the class" not in out.read_text()
    concepts = ("--subspaces", out.with_suffix(".drsa") / "subspaces.safetensors")
    maps = ("--images", folders[1] / "0_blobs", "--out", tmp_path / "maps")
    succeeded("explain", model, *INPUT, *concepts, *maps)
    with (tmp_path / "maps" / "relevance.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(float(row["score"]) < 0 and row["rank"] == "" for row in rows)
    assert len(rows) == 6
