"""The page as text: nothing from outside, nothing that breaks out, not too large; and the verdict on it."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drsa_audit.report import make_verdict, render
from drsa_audit.report.pictures import (
    Line,
    choice_rows,
    concept_colours,
    crop_box,
    line_chart,
    packed,
    rgb,
    shrunk,
)
from drsa_audit.results import AuditRecord, Explained, join_certificates
from drsa_core import Subspaces


@pytest.fixture(scope="module")
def parts(finished) -> tuple[AuditRecord, Explained, Subspaces]:
    record = AuditRecord.load(finished.work)
    explained = Explained.load(finished.work / record.explained)
    return record, explained, Subspaces.load(finished.work / record.subspaces)


def test_nothing_comes_from_outside(finished) -> None:
    text = finished.report.read_text()
    assert "http://" not in text
    assert not re.findall(r"https?://(?!www\.w3\.org)", text)
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert all(source.startswith(("data:", "#")) for source in sources)
    assert "default-src 'none'" in text


def test_names_from_users_cannot_break_out_of_the_page(parts) -> None:
    record, explained, subspaces = parts
    evil = '</script><img src=x onerror="alert(1)">'
    changed = replace(record, target={**record.target, "name": evil}, notes=[evil, "{S0} {x}"])
    files = replace(explained, names=[evil, *explained.names[1:]])
    text = render(changed, files, subspaces.renamed([evil, "S2"]))
    assert evil not in text
    assert "<img src=x" not in text
    assert text.count("<script") == render(record, explained, subspaces).count("<script")


def test_the_choice_of_k_is_explained(parts) -> None:
    record, explained, subspaces = parts
    found = {"best": 2, "is_chosen": True, "n_subspaces": [2, 3], "index": [0.981, 0.5]}
    found |= {"threshold": [0.75, 0.75], "held_out": [1.5, 1.25]}
    # Work folders of older versions know less.
    text = render(replace(record, choice_of_k=found), explained, subspaces)
    assert "Why 2 concepts?" in text
    assert "Is it more than chance?" not in text
    found |= {"overlap": [-0.25, 0.125], "null_objective": [0.75, 0.5], "splits": [[0, 0, 0]]}
    split = "1 splits into 1 and 2 and 3; 2 has no successor"
    names = ("n_subspaces", "index", "overlap", "held_out", "null_objective", "split")
    assert [[row[name] for name in names] for row in choice_rows(found)] == [
        ["2", "0.98", "-0.25", "1.5", "0.75", split],
        ["3", "0.50", "0.12", "1.25", "0.5", ""],
    ]
    text = render(replace(record, choice_of_k=found), explained, subspaces)
    for part in ("Why 2 concepts?", "none is a part of another", "Is it more than chance?", "1 splits into"):
        assert part in text


def test_forty_photographs_with_four_concepts_stay_below_15_megabytes(parts) -> None:
    generator = torch.Generator().manual_seed(0)
    n, k, side = 40, 4, 224
    # Noise compresses worst of all.
    explained = Explained(
        names=[f"{i}.jpg" for i in range(n)],
        pixels=torch.rand(n, 3, side, side, generator=generator),
        maps=torch.randn(n, k, side, side, generator=generator),
        whole=torch.randn(n, side, side, generator=generator),
        relevance=torch.rand(n, k, generator=generator),
        score=torch.rand(n, generator=generator),
        rank=torch.ones(n, dtype=torch.long),
        predicted=torch.zeros(n, dtype=torch.long),
        certificate=parts[1].certificate,
    )
    record = replace(parts[0], train_relevance=[], other_classes={}, stability=None, ablation=None)
    assert len(render(record, explained, Subspaces(torch.eye(8), [2] * k)).encode()) < 15e6


def test_maps_are_packed_as_signed_bytes() -> None:
    maps = torch.linspace(-2, 2, 2 * 112 * 112).reshape(2, 112, 112)
    values = np.frombuffer(base64.b64decode(packed(maps, 1.0)), dtype=np.int8).reshape(2, 56, 56)
    assert np.array_equal(values, (shrunk(maps) * 127).clamp(-127, 127).round().numpy())
    means = maps.reshape(2, 56, 2, 56, 2).mean((2, 4))
    torch.testing.assert_close(shrunk(maps), means, atol=1e-6, rtol=0)  # float32 sums of four values


@pytest.mark.parametrize("place", [(0, 0), (5, 30), (39, 39), (20, 20)])
def test_a_crop_lies_around_the_peak_inside_of_the_picture(place: tuple[int, int]) -> None:
    relevance = torch.full((40, 40), -1.0)
    relevance[place] = 3.0
    top, left, side = crop_box(relevance)
    assert side == 16
    assert top <= place[0] < top + side
    assert left <= place[1] < left + side
    assert min(top, left) >= 0
    assert max(top, left) + side <= 40


def test_the_verdict_says_what_is_wrong(parts) -> None:
    record, explained, _ = parts
    known = {"index": [0.9, 0.3], "is_stable": [True, False], "beats_chance": True, "threshold": 0.75}
    lost = {**explained.certificate, "around_the_layer": 0.3, "share_of_score": 0.4}
    changed = replace(explained, certificate=lost, rank=torch.full((6,), 2))
    verdict = make_verdict(replace(record, stability=known, notes=["a note"]), changed)
    texts = " ".join(caution.text for caution in verdict.cautions)
    for expected in (
        "{S1} does not come back",
        "30% of the evidence goes around the layer",
        "add up to 40% of the score",
        "for only 0 of 6 test images",
        "learned from 8 images",
        "a note",
    ):
        assert expected in texts
    assert "1 of 2 concepts come back" in verdict.facts[0]
    chance = replace(record, stability={**known, "is_stable": [False, False], "beats_chance": False})
    assert "Stable: no." in make_verdict(chance, explained).facts[0]


def test_the_lead_of_one_concept_and_of_one_against_the_class(parts) -> None:
    record, explained, _ = parts
    alone = replace(explained, relevance=explained.relevance[:, :1])
    braces = replace(record, target=record.target | {"name": "a {S0} class"}, train_relevance=[])
    lead = make_verdict(braces, alone).lead
    assert "“a (S0) class”" in lead  # no name of a concept is put there
    assert "splits into 1 concept: {S0} (100%)." in lead
    against = replace(explained, relevance=torch.tensor([[3.0, -2.0]]).repeat(len(explained), 1))
    assert "{S0} (100%) and {S1} (0%, on average against the class)" in make_verdict(record, against).lead


@pytest.mark.parametrize(("lost", "around", "held"), [(0.6, 0.7, "12%"), (0.1, None, "90%")])
def test_coverage_is_a_share(parts, lost: float, around: float | None, held: str) -> None:
    record, explained, _ = parts
    shares = {"on_zero_activations": lost, "around_the_layer": around}
    facts = make_verdict(record, replace(explained, certificate=explained.certificate | shares)).facts
    assert any(fact.startswith(f"Coverage: {held} of the evidence") for fact in facts)


def test_the_verdict_compares_with_the_one_map_too(parts) -> None:
    record, explained, _ = parts
    for scale, expected in ((1, "2 against 2.5; by the one map 1.75"), (1e-4, "0.0002 against 0.00025; ")):
        areas = {"concepts": 2.0, "one map": 1.75, "random": 2.5}
        curves = {name: {"aupc": scale * area} for name, area in areas.items()}
        facts = make_verdict(replace(record, flipping={"curves": curves}), explained).facts
        assert any(expected in fact for fact in facts)


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("lrp", "biases and stabilisers"),
        ("gxi", "biases and curved activations"),
        ("ig", "the change from an input of zeros, in a limited number of steps"),
        ("shapley", "the change from an input of zeros."),
    ],
)
def test_the_verdict_says_why_maps_miss_the_score_with_this_method(parts, backend: str, why: str) -> None:
    record, explained, _ = parts
    record = replace(record, method=record.method | {"backend": backend})

    def caution(**more: Any) -> str:
        certificate = explained.certificate | {"share_of_score": -0.004} | more
        verdict = make_verdict(record, replace(explained, certificate=certificate))
        assert any("the maps add up to 0% of the model's score" in fact for fact in verdict.facts)
        (text,) = [c.text for c in verdict.cautions if "of the score" in c.text]
        return text

    assert caution().startswith("The maps add up to 0% of the score: ")  # not -0%
    assert why in caution()
    kept = caution(kept={"position embeddings": 0.6, "biases": 0.4})
    assert kept.endswith("position embeddings (60%) and biases (40%) hold the difference.")


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e20])
def test_charts_have_any_scale_and_say_what_they_show(scale: float) -> None:
    text = line_chart([Line("a", [0, 1], [0.0, 3.0 * scale], "one")], "x", "y", "a")
    # The line goes from corner to corner, and the highest tick is the end of the line.
    assert re.findall(r'points="([^"]*)"', text) == ["54.0,218.0 446.0,14.0"]
    assert f">{3 * scale:g}</text>" in text
    two = [Line("<a>", [0, 1], [1, 2], "one"), Line("b", [0, 1], [3, 3], "two")]
    text = line_chart(two, "x", "y", 'it "is"')
    assert 'aria-label="it &#34;is&#34;"' in text
    assert "&lt;a&gt;" in text
    assert line_chart([Line("flat", [0], [0], "one")], "x", "y", "flat")  # one point has no extent


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_page_knows_relevance_of_any_scale(parts, scale: float) -> None:
    record, explained, subspaces = parts
    scaled = replace(explained, relevance=explained.relevance * scale, maps=explained.maps * scale)
    found = json.loads(re.findall(r'id="data">(.*)</script>', render(record, scaled, subspaces))[0])
    shown = torch.tensor([image["relevance"] for image in found["images"]], dtype=torch.float64)
    # Six digits are kept.
    torch.testing.assert_close(shown, scaled.relevance.double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("unknown", [None, float("nan")])
def test_numbers_that_are_not_defined_are_not_shown(parts, unknown: float | None) -> None:
    record, explained, subspaces = parts
    ablation = {**(record.ablation or {}), "correlation": unknown, "others": {"PCA": unknown, "DSA": 0.5}}
    changed = replace(record, ablation=ablation)
    verdict = make_verdict(changed, explained)
    assert not any(fact.startswith("Effect") for fact in verdict.facts)
    assert not any("another effect" in caution.text for caution in verdict.cautions)
    maps = explained.maps.clone()
    maps[:, 1] = -maps[:, 1].abs()  # a concept without positive maps has no area
    text = render(changed, replace(explained, maps=maps), subspaces)
    assert "Correlation not defined; for comparison PCA not defined, DSA 0.50." in text
    assert text.count("<dt>Half of it lies on</dt>") == 1
    assert not re.search(r"\bnan\b", text.split("<script")[0])


def certificate(share: float | None, kept: float | None, zero: float) -> dict[str, Any]:
    found: dict[str, Any] = {"is_complete": True, "maps_to_layer": zero, "share_of_score": share}
    found |= {"kept": None if kept is None else {"bias": kept}, "unaccounted": zero}
    return found | {"on_zero_activations": zero, "around_the_layer": None}


def test_shares_of_all_images_do_not_depend_on_the_batches() -> None:
    """A batch of four images with large scores, and one of a single image with a small one."""
    batches = [
        {"score": torch.tensor([10.0, 10, 10, 10]), "maps": torch.full((4, 1, 1, 1), 9.0)},
        {"score": torch.tensor([0.5]), "maps": torch.full((1, 1, 1, 1), 2.5)},
    ]
    joined = join_certificates([certificate(0.9, 0.1, 0.0), certificate(5.0, -4.0, 0.5)], batches)
    assert joined["share_of_score"] == pytest.approx((4 * 9 + 2.5) / 40.5)
    assert joined["kept"]["bias"] == pytest.approx((4 * 1 - 2.0) / 40.5)
    assert joined["unaccounted"] == pytest.approx(0.5 * 0.5 / 40.5)
    assert joined["on_zero_activations"] == pytest.approx(0.5 / 5)
    assert (joined["maps_to_layer"], joined["is_complete"], joined["around_the_layer"]) == (0.5, True, None)
    # Scores that cancel in a batch have no share there, but count in the whole; those that cancel have none.
    batches[1] = {"score": torch.tensor([0.5, -0.5]), "maps": torch.full((2, 1, 1, 1), 1.25)}
    joined = join_certificates([certificate(0.9, 0.1, 0.0), certificate(None, None, 0.5)], batches)
    assert joined["share_of_score"] == pytest.approx((4 * 9 + 2.5) / 40)
    batches[1]["score"] = torch.tensor([-20.0, -20.0])
    joined = join_certificates([certificate(0.9, 0.1, 0.0), certificate(-0.1, 1.1, 0.5)], batches)
    assert joined["share_of_score"] is joined["kept"] is None


def test_colours_are_different() -> None:
    colours = concept_colours(16)
    assert len(set(colours)) == 16
    assert rgb(colours[0]) == (0xD5, 0x5E, 0x00)
