"""What lies in a folder from an earlier run is used only if it is still right."""

from __future__ import annotations

import csv
import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from drsa_audit import steps
from drsa_audit.work import files_digest, subspaces_digest
from drsa_core import Subspaces
from drsa_core.storage import locked

from .running import refused, succeeded
from .tiny import INPUT, MODEL, pictures

GXI = ("--backend", "gxi")
FIT = ("--layer", "4", "--target", "0", "--subspaces", 2, "--no-stability")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, folders) -> Path:
    out = tmp_path_factory.mktemp("fit") / "blobs.safetensors"
    succeeded("fit", MODEL, *INPUT, *GXI, "--train", folders[0], "--out", out, *FIT)
    return out


@pytest.fixture
def images(tmp_path) -> Path:
    return pictures(tmp_path / "images", 5, ("0_blobs",), seed=1) / "0_blobs"


def explain(fitted: Path, images: Path, out: Path, *more: str | Path | int) -> None:
    succeeded("explain", MODEL, *INPUT, *GXI, "--subspaces", fitted, "--images", images, "--out", out, *more)


def table(out: Path) -> list[dict[str, str]]:
    with (out / "relevance.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_blocks_in_another_order_have_maps_of_their_own(fitted, images, tmp_path) -> None:
    explain(fitted, images, tmp_path / "maps")
    before = table(tmp_path / "maps")
    swapped = tmp_path / "swapped.safetensors"
    Subspaces.load(fitted).select([1, 0]).renamed(["A", "B"]).save(swapped)
    explain(swapped, images, tmp_path / "maps")
    after = table(tmp_path / "maps")
    assert [row["A"] for row in after] == [row["S2"] for row in before]
    assert [row["B"] for row in after] == [row["S1"] for row in before]


def test_the_digest_of_subspaces_sees_order_signs_grouping_and_dual() -> None:
    basis = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0))).Q
    found = [
        Subspaces(basis, [3, 3]),
        Subspaces(basis[:, [3, 4, 5, 0, 1, 2]], [3, 3]),
        Subspaces(-basis, [3, 3]),
        Subspaces(basis, [2, 4]),
        Subspaces(basis, [3, 3], dual=basis),
    ]
    assert len({subspaces_digest(subspaces) for subspaces in found}) == len(found)
    assert subspaces_digest(Subspaces(basis.clone(), [3, 3], ["a", "b"])) == subspaces_digest(found[0])


def test_maps_that_were_made_by_force_are_not_given_without_it(fitted, images, tmp_path) -> None:
    words = ("explain", MODEL, *INPUT, *GXI, "--subspaces", fitted, "--images", images, "--target", 1)
    out = ("--out", tmp_path / "maps")
    assert "target: 0 there, 1 here" in refused(*words, *out)
    forced = succeeded(*words, *out, "--force")
    assert "were made for something else" in forced.stderr
    assert "target: 0 there, 1 here" in refused(*words, *out)
    # What is there already is noted as well.
    assert "were made for something else" in succeeded(*words, *out, "--force").stderr


FACTORY = """
import os

from drsa_audit import Network
from drsa_core.evaluation import Preprocessing
from tests.command.tiny import SIZE, network
from zennit.composites import EpsilonGammaBox


def make():
    gamma = float(os.environ["GAMMA"])
    return Network(
        network(), SIZE, Preprocessing.from_mean_std(0.0, 1.0), "4",
        lambda layer: EpsilonGammaBox(0.0, 1.0, gamma=gamma),
    )
"""


def test_other_parameters_of_the_rules_are_another_run(folders, tmp_path, monkeypatch) -> None:
    (tmp_path / "factory.py").write_text(FACTORY)
    out = tmp_path / "blobs.safetensors"
    words = ("fit", f"{tmp_path / 'factory.py'}:make", "--train", folders[0], "--out", out, *FIT)
    methods = []
    for gamma in ("0.25", "5"):
        monkeypatch.setenv("GAMMA", gamma)
        succeeded(*words)
        made = Subspaces.load(out).provenance
        assert made is not None
        methods.append(made.method)
    assert methods[0] != methods[1]


def test_another_preprocessing_is_refused_unless_forced(fitted, images, tmp_path) -> None:
    assert Subspaces.load(fitted).metadata["preprocessing"]["mean"] == [0.5, 0.5, 0.5]
    rest = ("--subspaces", fitted, "--images", images, "--out", tmp_path / "maps")
    other = (*INPUT[:4], "--mean", "0", "--std", "0.01")
    line = refused("explain", MODEL, *other, *GXI, *rest)
    assert "made for something else: mean: [0.5, 0.5, 0.5] there, [0.0, 0.0, 0.0] here; std: " in line
    assert "--force uses them all the same" in line
    assert "mean: [0.5" in succeeded("explain", MODEL, *other, *GXI, *rest, "--force").stderr
    line = refused("explain", MODEL, *INPUT, "--channels", "BGR", *GXI, *rest)
    assert "channels: RGB there, BGR here" in line


def test_renamed_and_removed_images_leave_no_trace(fitted, images, tmp_path) -> None:
    out = tmp_path / "maps"
    explain(fitted, images, out)
    (out / "mine.png").write_bytes(b"not of this command")
    for file in sorted(images.iterdir()):
        file.rename(file.with_name(f"new_{file.name}"))
    explain(fitted, images, out)
    assert [row["image"] for row in table(out)] == [f"new_0{i}.png" for i in range(5)]
    assert sorted(p.name for p in out.glob("0*.png")) == [f"000{i}_new_0{i}.png" for i in range(5)]
    for file in sorted(images.iterdir())[:3]:
        file.unlink()
    explain(fitted, images, out)
    assert len(table(out)) == 2
    assert sorted(p.name for p in out.glob("*.png")) == ["0000_new_03.png", "0001_new_04.png", "mine.png"]


def test_another_batch_size_finds_its_own_maps_and_pairs(fitted, folders, images, tmp_path) -> None:
    out = tmp_path / "maps"
    for batch_size in (4, 3, 4):
        explain(fitted, images, out, "--batch-size", batch_size)
        assert len(table(out)) == 5
    out = tmp_path / "again.safetensors"
    shutil.copytree(fitted.with_suffix(".drsa"), out.with_suffix(".drsa"))
    words = ("fit", MODEL, *INPUT, *GXI, "--train", folders[0], "--out", out, *FIT)
    succeeded(*words, "--batch-size", 3)
    # Positions do not depend on the batches; the sums differ in float32.
    torch.testing.assert_close(
        Subspaces.load(out).basis.abs(), Subspaces.load(fitted).basis.abs(), atol=1e-3, rtol=0
    )


def test_a_second_job_in_the_same_work_folder_is_refused_in_one_line(folders, tmp_path) -> None:
    work = tmp_path / "work"
    words = ("fit", MODEL, *INPUT, *GXI, "--train", folders[0], "--work", work, *FIT, "--out")
    succeeded(*words, tmp_path / "a.safetensors")
    (pairs,) = [folder for folder in work.glob("pairs-*") if folder.is_dir()]
    for file in [*work.glob("learned-*"), *pairs.glob("*.safetensors")]:
        file.unlink()
    with locked(pairs):
        assert "another writer" in refused(*words, tmp_path / "b.safetensors")


def test_a_file_that_may_not_be_read_has_a_digest(tmp_path) -> None:
    (tmp_path / "folder.png").mkdir()  # no file at all: reading it fails for every user
    assert files_digest([tmp_path / "folder.png"]) == files_digest([tmp_path / "nothing.png"])


def test_names_that_are_no_text_or_long(fitted, folders, images, tmp_path) -> None:
    first, second, *_ = sorted(images.iterdir())
    os.rename(first, os.fsencode(images) + b"/00_caf\xe9.png")  # Latin-1, as archives of Windows have it
    second.rename(images / f"01_{'鳥' * 80}.png")  # 247 bytes, of which a system takes 255
    explain(fitted, images, tmp_path / "maps")
    rows = table(tmp_path / "maps")
    assert [row["image"] for row in rows[:2]] == ["00_caf\ufffd.png", f"01_{'鳥' * 80}.png"]
    drawn = sorted(file.name for file in (tmp_path / "maps").glob("*.png"))
    assert len(drawn) == 5
    assert drawn[0] == "0000_00_caf\ufffd.png"
    assert drawn[1].startswith("0001_01_鳥鳥")
    out = tmp_path / "report.html"
    words = (
        *GXI,
        *FIT,
        "--train",
        folders[0],
        "--test",
        images,
        "--no-flipping",
        "--no-ablation",
        "--out",
        out,
    )
    succeeded("audit", MODEL, *INPUT, *words)
    assert "00_caf\ufffd.png" in out.read_text(encoding="utf-8")


def test_notes_of_what_is_kept_are_kept(folders, tmp_path, monkeypatch) -> None:
    """A second run of the same command reads what the first has found, and must say as much about it."""

    def noisy(name: str, text: str) -> None:
        original = getattr(steps, name)

        def warning(*args, **kwargs):
            warnings.warn(text, UserWarning, stacklevel=2)
            return original(*args, **kwargs)

        monkeypatch.setattr(steps, name, warning)

    noisy("_learn", "the fit did not converge")
    noisy("concept_ablation", "without a concept it is another")
    noisy("explain_batch", "there are too few steps")
    out = tmp_path / "report.html"
    odd = ("--size", 31, "--resize", 31)  # patches of 2 × 2 do not divide it
    words = ("audit", MODEL, *INPUT, *odd, *GXI, *FIT, "--train", folders[0], "--test", folders[1], "--out",
             out, "--json")  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        first = json.loads(succeeded(*words).stdout)["be_careful"]
    assert not caught  # notes take their place
    monkeypatch.undo()
    for text in (
        "the fit did not converge",
        "there are too few steps",
        "without a concept it is another",
    ):
        assert first.count(text) == 1
    assert sum(text.startswith("patches of 2 × 2 do not divide") for text in first) == 1
    assert json.loads(succeeded(*words).stdout)["be_careful"] == first
    assert "there are too few steps" in out.read_text()


def test_one_concept_is_evaluated_in_json(folders, images, tmp_path) -> None:
    concepts = tmp_path / "one.safetensors"
    fit = ("--layer", "4", "--target", "0", "--subspaces", 1, "--no-stability")
    succeeded("fit", MODEL, *INPUT, *GXI, "--train", folders[0], "--out", concepts, *fit)
    out = tmp_path / "evaluation.json"
    words = ("evaluate", MODEL, *INPUT, *GXI, "--subspaces", concepts, "--test", images, "--out", out)
    succeeded(*words)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(out.read_text(), parse_constant=refuse)["ablation"]
    assert found["within_images"] is None  # nothing is left of one concept without its mean
    assert -1 <= found["correlation"] <= 1
