"""The page of results is what its summaries give, and every number in it comes from them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("captum")
pytest.importorskip("zennit")
pytest.importorskip("timm")
pytest.importorskip("matplotlib")
from reproduction import main, number_of, page, read_results

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_up_to_date() -> None:
    results = read_results(DOCS / "results")
    template = (DOCS / "results" / "template.txt").read_text()
    assert page(template, results) == (DOCS / "reproduction.md").read_text()


def test_verdicts_hold_no_number_of_their_own() -> None:
    template = (DOCS / "results" / "template.txt").read_text()
    rows = [line for line in template.splitlines() if re.search(r"\*\*(holds|does not|cannot)", line)]
    assert len(rows) > 8
    for row in rows:
        # Claims speak of d = 1, K = 4 or Table 2; what was measured is looked up.
        found = re.sub(r"\[\[.+?\]\]", "", row.split("|")[3])
        assert not re.search(r"\d\.\d", found), row


def small() -> dict[str, Any]:
    cell = {"mean": 1.25, "error": 0.5, "by_class": {"a": 1.0}}
    gap = {"mean": -0.25, "error": None, "interval": [-0.5, 0.0], "better": 1, "n_classes": 2}
    rows = {"drsa": {"n_seeds": 1, "n_images": 4, "aupc": cell}, "dsa": {"n_seeds": 2, "n_images": 4}}
    many = {
        "title": "K",
        "metrics": ["aupc"],
        "rows": rows,
        "of": "drsa",
        "differences": {"dsa": {"aupc": gap}},
    }
    grid = {"title": "d", "axis": "d", "places": ["1"], "metrics": ["aupc"], "n_images": 4}
    grid |= {
        "rows": {"prca": {"1": {"aupc": cell}}},
        "of": "prca",
        "differences": {"pca": {"1": {"aupc": gap}}},
    }
    return {
        "net": {"tables": {"many": many}, "grids": {"dims": grid}, "gains": {}, "times": []},
        "known_concepts": {"scores": {"DRSA": [[0.5, 4], [0.7, 3]]}},
    }


def test_numbers_and_tables_of_a_template() -> None:
    results = small()
    assert number_of("net many drsa aupc", results) == "1.250 ± 0.500"
    assert number_of("net many drsa:dsa aupc", results) == "-0.250 [-0.500, 0.000], 1/2"
    assert number_of("net dims prca@1 aupc", results) == "1.250 ± 0.500"
    assert number_of("net dims prca:pca@1 aupc", results) == "-0.250 [-0.500, 0.000], 1/2"
    assert number_of("known_concepts drsa", results) == "0.600 ± 0.100"
    with pytest.raises(ValueError, match="no number for 'net many nmf aupc'"):
        number_of("net many nmf aupc", results)
    text = page("{{tables net}}\n{{known known_concepts}}\n{{compared net:VGG16:aupc}}", results)
    assert "| DRSA | 1.250 ± 0.500 | 4 |" in text  # nobody to be better than
    assert "| DSA (2 seeds) |  | 4 |" in text
    assert "| DSA | -0.250 [-0.500, 0.000], 1/2 |" in text
    assert "| PRCA minus PCA | -0.250 [-0.500, 0.000], 1/2 |" in text
    assert "| DRSA | 0.600 ± 0.100 | 3.5 |" in text
    assert "| DRSA | 0.600 ± 0.100 | 1.250 ± 0.500 |" in text
    with pytest.raises(ValueError, match="unknown kind 'nonsense'"):
        page("{{nonsense net}}", results)


def record(name: str, method: str, files: list[str], aupc: list[float]) -> dict[str, Any]:
    metrics = ("aupc", "aupc_of_removed", "total_relevance", "separability", "peakness")
    about = {"stage": "main", "layer": "f", "class": name, "method": method, "n_subspaces": 4, "dims": None}
    about |= {"seed": 0, "files": files, "blocks": 4, "share": [0.0, 1.0]}
    scores = dict.fromkeys(metrics, aupc) | {"curves": [[1.0, 0.0]] * len(files)}
    return about | scores | {"explain_seconds": 1.0, "fill_seconds": 1.0, "network_seconds": 1.0}


def written(template: str, folder: Path, docs: Path, monkeypatch) -> str:
    """The page that a template gives for a result folder, added under the name "some"."""
    (docs / "results").mkdir(parents=True)
    (docs / "results" / "known_concepts.json").write_text('{"scores": {}}')
    (docs / "results" / "template.txt").write_text(template)
    arguments = ["reproduction.py", "--docs", str(docs), "--add", "some", str(folder)]
    monkeypatch.setattr("sys.argv", arguments)
    main()
    return (docs / "reproduction.md").read_text()


def test_attribution_methods_alone_and_paired_with_lrp(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "out"
    for method, files, aupc in (("lrp", ["1", "2"], [1.0, 3.0]), ("shapley", ["1"], [1.5])):
        file = folder / "results" / "attribution" / "a" / f"{method}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        one = record("a", method, files, aupc) | {"stage": "attribution", "layer": "", "n_subspaces": 1}
        file.write_text(json.dumps([one]))
    (folder / "settings.json").write_text(json.dumps({"model": "net", "subspaces": "4"}))
    template = "[[some attribution lrp aupc]]; [[some attribution lrp:shapley aupc]] {{tables some}}"
    text = written(template, folder, tmp_path / "docs", monkeypatch)
    assert "2.000; -0.500" in text  # the second only on the image that both have
    assert "| LRP minus | AUPC ↓ |" in text


def test_ablations_are_paired_by_image_at_each_place(tmp_path, monkeypatch) -> None:
    """Two classes; DRSA is 0.5 and 1.5 lower than DSA for K = 4, and 0.25 higher in both for K = 2."""
    folder = tmp_path / "out"
    scores = {"drsa": {4: (1.0, 2.0), 2: (1.25, 2.25)}, "dsa": {4: (1.5, 3.5), 2: (1.0, 2.0)}}
    for method, by_k in scores.items():
        for k, by_class in by_k.items():
            for name, aupc in zip("ab", by_class, strict=True):
                stage = "main" if k == 4 else "subspaces"
                file = folder / "results" / stage / name / f"{method}.json"
                file.parent.mkdir(parents=True, exist_ok=True)
                one = record(name, method, ["1", "2"], [aupc, aupc]) | {"stage": stage, "n_subspaces": k}
                file.write_text(json.dumps([one]))
    (folder / "settings.json").write_text(json.dumps({"model": "net", "subspaces": "4"}))
    template = "[[some subspaces drsa:dsa@4 aupc]]; [[some subspaces drsa:dsa@2 aupc]] {{tables some}}"
    text = written(template, folder, tmp_path / "docs", monkeypatch)
    assert "-1.000 ± 0.500 [-1.000, -1.000], 2/2; 0.250 ± 0.000 [0.250, 0.250], 0/2" in text
    assert (
        "| DRSA minus DSA | 0.250 ± 0.000 [0.250, 0.250], 0/2 | -1.000 ± 0.500 [-1.000, -1.000], 2/2 |"
        in text
    )


def test_checks_without_maps_have_a_table_of_their_own(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "out"
    for name, index in (("a", [[0.25, 0.75], [0.5, 0.5]]), ("b", [[1.0, 1.0], [0.5, 0.5]])):
        about = {"layer": "f", "class": name, "method": "dsa", "n_subspaces": 2, "dims": None, "seed": 0}
        drop = {"relevance": [[1.0, 2.0], [3.0, 4.0]], "drop": [[2.0, 4.0], [6.0, 8.0]], "files": ["1", "2"]}
        for stage, found in (("stability", {"index": index}), ("ablation", drop)):
            file = folder / "results" / stage / "f" / name / "dsa.json"
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps([about | {"stage": stage} | found]))
    (folder / "settings.json").write_text(json.dumps({"model": "net", "subspaces": "2"}))
    template = "[[some checks dsa stability]] {{tables some}} {{compared some:Net:ablation,stability}}"
    text = written(template, folder, tmp_path / "docs", monkeypatch)
    assert "0.625 ± 0.125 ###" in text  # classes have 0.5 and 0.75
    assert "| | ablation ↑ | ablation within images ↑ | stability ↑ |" in text  # no column of images
    assert "| DSA |  | 1.000 ± 0.000 | 0.625 ± 0.125 |" in text


def test_folders_are_summed_up_on_the_images_that_they_share(tmp_path, monkeypatch) -> None:
    folders = []
    for number, (method, files) in enumerate((("drsa", ["1", "2"]), ("nmf", ["1"]))):
        folder = tmp_path / f"out{number}"
        folders.append(str(folder))
        for name in ("a", "b"):
            file = folder / "results" / "main" / "f" / name / f"{method}.json"
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps([record(name, method, files, [1.0 + number, 5.0][: len(files)])]))
        (folder / "settings.json").write_text(json.dumps({"model": "/x/load.py:Net", "subspaces": "4"}))
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "template.txt").write_text("[[both many drsa aupc]] {{tables both}}")
    arguments = [
        "reproduction.py",
        "--docs",
        str(tmp_path / "docs"),
        "--same-images",
        "--add",
        "both",
        *folders,
    ]
    monkeypatch.setattr("sys.argv", arguments)
    main()
    summary = json.loads((tmp_path / "docs" / "results" / "both.json").read_text())
    with monkeypatch.context() as twice:  # the same again would count double
        twice.setattr("sys.argv", [*arguments, folders[0]])
        with pytest.raises(SystemExit, match="more than one of the folders has main f a drsa 4"):
            main()
    assert summary["about"]["model"] == "load.py:Net"
    rows = summary["tables"]["many"]["rows"]
    assert {method: row["n_images"] for method, row in rows.items()} == {"drsa": 2, "nmf": 2}
    assert (rows["drsa"]["aupc"]["mean"], rows["nmf"]["aupc"]["mean"]) == (1, 2)
    monkeypatch.setattr("sys.argv", ["reproduction.py", "--docs", str(tmp_path / "docs"), "--check"])
    main()
    (tmp_path / "docs" / "reproduction.md").write_text("other")
    with pytest.raises(SystemExit, match="not what docs/results gives"):
        main()
