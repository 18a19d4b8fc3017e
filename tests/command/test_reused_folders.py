"""Parts of an earlier run in a folder are used only if they are still right; an interrupted run goes on."""

from __future__ import annotations

import csv
import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from drsa_audit import steps
from drsa_audit.work import files_digest
from drsa_core import Subspaces
from drsa_core.storage import locked

from zennit_drsa import DisentangledAttributor

from .running import drsa, files_in, refused, succeeded
from .tiny import FIT, GXI, INPUT, MODEL, pictures


@pytest.fixture
def images(tmp_path) -> Path:
    return pictures(tmp_path / "images", 5, ("0_blobs",), seed=1) / "0_blobs"


def explain(fitted: Path, images: Path, out: Path, *more: str | Path | int) -> list[dict[str, str]]:
    """The table that `drsa explain` writes."""
    succeeded("explain", MODEL, *INPUT, *GXI, "--subspaces", fitted, "--images", images, "--out", out, *more)
    with (out / "relevance.csv").open(newline="") as file:
        return list(csv.DictReader(file))


PLACES = {
    "pairs": (DisentangledAttributor, "collect"),
    "maps": (steps, "explain_batch"),
    "flipping": (steps, "patch_flipping"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupted_audit_goes_on(finished, tmp_path, monkeypatch, place: str) -> None:
    out = tmp_path / "report.html"
    rest = ("--train", finished.train, "--test", finished.test, "--target", "blobs", "--out", out)
    words = ("audit", MODEL, *INPUT, *rest, "--subspaces", 2, "--layer", "4")
    owner, name = PLACES[place]
    original, calls = getattr(owner, name), []

    def interrupted(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == (1 if place == "pairs" else 2):
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
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
    # Finished parts were not done again.
    assert all(file.stat().st_mtime_ns == time for file, time in done.items() if ".lock" not in file.name)
    first, second = (
        Subspaces.load(folder / "subspaces.safetensors")
        for folder in (finished.work, out.with_suffix(".drsa"))
    )
    assert torch.equal(first.basis, second.basis)


def test_other_blocks_names_and_batches_have_maps_of_their_own(fitted, images, tmp_path) -> None:
    out = tmp_path / "maps"
    before = explain(fitted, images, out)
    assert [row["S1"] for row in explain(fitted, images, out, "--batch-size", 3)] == pytest.approx(
        [row["S1"] for row in before]
    )
    swapped = tmp_path / "swapped.safetensors"
    Subspaces.load(fitted).select([1, 0]).renamed(["A", "B"]).save(swapped)
    after = explain(swapped, images, out)
    assert [(row["A"], row["B"]) for row in after] == [(row["S2"], row["S1"]) for row in before]


def test_subspaces_of_something_else_are_refused_unless_forced(fitted, images, tmp_path) -> None:
    rest = ("--subspaces", fitted, "--images", images, "--out", tmp_path / "maps")
    other_input = (*INPUT[:4], "--mean", "0", "--std", "0.01")
    for model, given, expected in (
        (MODEL, (*INPUT, "--target", 1), "target: 0 there, 1 here"),
        ("tests.command.tiny:other_network", INPUT, "model: weights"),
        (MODEL, other_input, "mean: [0.5, 0.5, 0.5] there, [0.0, 0.0, 0.0] here; std: "),
        (MODEL, (*INPUT, "--channels", "BGR"), "channels: RGB there, BGR here"),
    ):
        line = refused("explain", model, *given, *GXI, *rest)
        assert "made for something else: " in line
        assert expected in line
        assert "--force uses them all the same" in line


def test_maps_that_were_made_by_force_are_not_given_without_it(fitted, images, tmp_path) -> None:
    rest = ("--subspaces", fitted, "--images", images, "--target", 1, "--out", tmp_path / "maps")
    for _ in range(2):  # maps that are there already are noted as well
        forced = succeeded("explain", MODEL, *INPUT, *GXI, *rest, "--force")
        assert "were made for something else" in forced.stderr
    assert "target: 0 there, 1 here" in refused("explain", MODEL, *INPUT, *GXI, *rest)


FACTORY = """
import os
from drsa_audit import Network
from drsa_core.evaluation import Preprocessing
from tests.command.tiny import SIZE, network
from zennit.composites import EpsilonGammaBox

def make():
    gamma = float(os.environ["GAMMA"])
    rules = lambda layer: EpsilonGammaBox(0.0, 1.0, gamma=gamma)
    return Network(network(), SIZE, Preprocessing.from_mean_std(0.0, 1.0), "4", rules)
"""


def test_other_parameters_of_the_rules_are_another_run(folders, tmp_path, monkeypatch) -> None:
    (tmp_path / "factory.py").write_text(FACTORY)
    out = tmp_path / "blobs.safetensors"
    methods = set()
    for gamma in ("0.25", "5"):
        monkeypatch.setenv("GAMMA", gamma)
        succeeded("fit", f"{tmp_path / 'factory.py'}:make", "--train", folders[0], "--out", out, *FIT)
        made = Subspaces.load(out).provenance
        methods.add(made and made.method)
    assert len(methods) == 2


def test_renamed_and_removed_images_leave_no_trace(fitted, images, tmp_path) -> None:
    out = tmp_path / "maps"
    explain(fitted, images, out)
    (out / "mine.png").write_bytes(b"not of this command")
    for file in sorted(images.iterdir())[:3]:
        file.unlink()
    for file in images.iterdir():
        file.rename(file.with_name(f"new_{file.name}"))
    assert [row["image"] for row in explain(fitted, images, out)] == ["new_03.png", "new_04.png"]
    assert sorted(p.name for p in out.glob("*.png")) == ["0000_new_03.png", "0001_new_04.png", "mine.png"]


def test_names_that_are_no_text_or_long(fitted, images, tmp_path) -> None:
    first, second, *_ = sorted(images.iterdir())
    os.rename(first, os.fsencode(images) + b"/00_caf\xe9.png")  # Latin-1, as archives of Windows have it
    second.rename(images / f"01_{'鳥' * 80}.png")  # 247 bytes, of which a system takes 255
    rows = explain(fitted, images, tmp_path / "maps")
    assert [row["image"] for row in rows[:2]] == ["00_caf\ufffd.png", f"01_{'鳥' * 80}.png"]
    drawn = sorted(file.name for file in (tmp_path / "maps").glob("*.png"))
    assert (len(drawn), drawn[0]) == (5, "0000_00_caf\ufffd.png")
    assert drawn[1].startswith("0001_01_鳥鳥")


def test_a_second_job_in_the_same_work_folder_is_refused_in_one_line(folders, tmp_path) -> None:
    words = ("fit", MODEL, *INPUT, *GXI, "--train", folders[0], "--work", tmp_path / "work", *FIT, "--out")
    succeeded(*words, tmp_path / "a.safetensors")
    (pairs,) = [folder for folder in (tmp_path / "work").glob("pairs-*") if folder.is_dir()]
    for file in [*(tmp_path / "work").glob("learned-*"), *pairs.glob("*.safetensors")]:
        file.unlink()
    with locked(pairs):
        assert "another writer" in refused(*words, tmp_path / "b.safetensors")


def test_damaged_maps_are_named(fitted, images, tmp_path) -> None:
    explain(fitted, images, tmp_path / "maps")
    (damaged, _) = sorted((tmp_path / "maps").glob("maps-*/*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    words = ("--subspaces", fitted, "--images", images, "--out", tmp_path / "maps")
    assert f"{damaged} is damaged" in refused("explain", MODEL, *INPUT, *GXI, *words)
    assert files_digest([tmp_path]) == files_digest([tmp_path / "nothing"])  # what cannot be read has one


def test_notes_of_kept_parts_are_repeated(folders, tmp_path, monkeypatch) -> None:
    """A second run of the same command reads the results of the first, and must say as much about them."""

    def noisy(name: str, text: str) -> None:
        original = getattr(steps, name)

        def warning(*args, **kwargs):
            warnings.warn(text, UserWarning, stacklevel=2)
            return original(*args, **kwargs)

        monkeypatch.setattr(steps, name, warning)

    texts = {"_learn": "no convergence", "concept_ablation": "another score", "explain_batch": "few steps"}
    for name, text in texts.items():
        noisy(name, text)
    out = tmp_path / "report.html"
    odd = ("--size", 31, "--resize", 31)  # patches of 2 × 2 do not divide it
    rest = ("--train", folders[0], "--test", folders[1], "--out", out, "--json")
    words = ("audit", MODEL, *INPUT, *odd, *GXI, *FIT, *rest)
    with warnings.catch_warnings(record=True) as caught:
        first = json.loads(succeeded(*words).stdout)["be_careful"]
    assert not caught  # notes take their place
    monkeypatch.undo()
    assert all(first.count(text) == 1 for text in texts.values())
    assert sum(text.startswith("patches of 2 × 2 do not divide") for text in first) == 1
    assert json.loads(succeeded(*words).stdout)["be_careful"] == first
    assert "few steps" in out.read_text()
