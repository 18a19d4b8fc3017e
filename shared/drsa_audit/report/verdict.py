"""The verdict in sentences: what the model relies on, how sure that is, and what to be careful about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..findings import Outlier, TwoGroups, is_known, outliers, share_against, shares, two_groups
from ..results import AuditRecord, Explained

#: Fewer images than these are few.
FEW_TRAIN, FEW_TEST = 30, 10
#: Shares of relevance below or above which a reader should know.
LOW_COVERAGE, HIGH_LOSS = 0.7, 0.05
#: Why maps add up to another total than the score, by backend.
DIFFERENCES = {
    "lrp": "biases and stabilisers hold the difference",
    "gxi": "biases and curved activations make the difference",
    "ig": "they measure the change from an input of zeros, in a limited number of steps (--samples)",
    "shapley": "they measure the change from an input of zeros",
}


@dataclass(frozen=True)
class Caution:
    """Something to be careful about, in one or two sentences; names of concepts stand as {S0}, {S1}, …"""

    text: str
    concept: int | None = None
    images: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """What a hurried reader must know."""

    lead: str  # what the model relies on
    facts: list[str]  # how stable, how much is covered, whether concepts matter
    look_first: list[Caution]  # what may be a shortcut
    cautions: list[Caution]
    shares: Tensor  # (K,)
    groups: list[TwoGroups]
    outliers: list[Outlier]


def make_verdict(record: AuditRecord, explained: Explained) -> Verdict:
    """The verdict of an audit."""
    relevance, n_images = explained.relevance, len(explained)
    of_concepts = shares(relevance)
    groups = two_groups(relevance)
    reference = torch.tensor(record.train_relevance or relevance.tolist())
    unusual = outliers(relevance, reference)
    n_right = int((explained.rank == 1).sum())
    name = _plain(record.target["name"])
    means = relevance.mean(0).tolist()
    listed = _listed(
        [
            f"{{S{k}}} ({share:.0%}{', on average against the class' if mean < 0 else ''})"
            for k, (share, mean) in enumerate(zip(of_concepts.tolist(), means, strict=True))
        ]
    )
    predicts = f"The model predicts “{name}” for {n_right} of {n_images} test images."
    if not explained.rank.any():
        predicts = f"The model has one output, “{name}”."
    parts = _counted(len(of_concepts), "concept")
    lead = f"{predicts} Its evidence for that class splits into {parts}: {listed}."
    first = [_of_group(group, n_images) for group in groups]
    return Verdict(
        lead,
        [*_stability_facts(record), *_coverage_facts(explained.certificate), *_effect_facts(record)],
        first,
        _cautions(record, explained, unusual, n_right),
        of_concepts,
        groups,
        unusual,
    )


def _of_group(group: TwoGroups, n_images: int) -> Caution:
    listed = _listed([f"{{S{k}}}" for k in group.concepts])
    one = len(group.concepts) == 1
    text = (
        f"{listed} {'is' if one else 'are'} either there or not: {'it carries' if one else 'they carry'} "
        f"{group.share_there:.0%} of the evidence in {len(group.images)} of {n_images} images and "
        f"{group.share_elsewhere:.0%} in the others. Look at what these images share. If it does not belong "
        "to the class (a watermark, a frame, a background), the model has learned a shortcut."
    )
    return Caution(text, group.concepts[0], group.images)


def _stability_facts(record: AuditRecord) -> list[str]:
    found = record.stability
    if found is None:
        return ["It was not tested whether the concepts come back in other fits."]
    if not found.get("beats_chance", True):
        return ["Stable: no. Fits to evidence that is shuffled over the images come out as good as these."]
    n_stable, n_all = sum(found["is_stable"]), len(found["is_stable"])
    lowest, highest = min(found["index"]), max(found["index"])
    how = f"stability {lowest:.2f} to {highest:.2f}, {found['threshold']:.2f} is needed"
    if n_stable == n_all:
        return [f"Stable: all {n_all} concepts come back when the fit is repeated on other images ({how})."]
    return [f"Stable: {n_stable} of {n_all} concepts come back when the fit is repeated ({how})."]


def _coverage_facts(certificate: dict[str, Any]) -> list[str]:
    share = certificate.get("share_of_score")
    lost, around = (certificate.get(name) or 0.0 for name in ("on_zero_activations", "around_the_layer"))
    # Shares of different wholes: of what crosses the layer, and of what reaches the input.
    held = f"{(1 - lost) * (1 - around):.0%} of the evidence passes through the concepts"
    if share is None:
        return [f"Coverage: {held}."]
    return [f"Coverage: {held}, and the maps add up to {_percent(share)} of the model's score."]


def _effect_facts(record: AuditRecord) -> list[str]:
    facts = []
    if record.ablation and is_known(record.ablation["correlation"]):
        facts.append(
            "Effect: a concept's relevance and what the score loses without the concept correlate with "
            f"{record.ablation['correlation']:.2f} (1 would be perfect)."
        )
    if record.flipping:
        curves = record.flipping["curves"]
        ours, one, chance = (curves[name]["aupc"] for name in ("concepts", "one map", "random"))
        if chance > 0:
            faster = "faster" if ours < chance else "no faster"
            facts.append(
                f"Pixels: removing what the maps point at makes the score fall {faster} than removing "
                f"patches at random (area under the curve {ours:.3g} against {chance:.3g}; by the one map "
                f"{one:.3g})."
            )
    return facts


def _cautions(
    record: AuditRecord, explained: Explained, unusual: list[Outlier], n_right: int
) -> list[Caution]:
    found: list[Caution] = []
    if record.stability and not all(record.stability["is_stable"]):
        weak = [k for k, stable in enumerate(record.stability["is_stable"]) if not stable]
        listed = _listed([f"{{S{k}}}" for k in weak])
        verb = "does" if len(weak) == 1 else "do"
        why = f"{verb} not come back in other fits"
        if not record.stability.get("beats_chance", True):
            why = "may be chance: shuffled evidence gives concepts as strong"
        found.append(Caution(f"{listed} {why}. Give no name and draw no conclusion."))
    if unusual:
        n = len(unusual)
        what = "image has an" if n == 1 else "images have an"
        found.append(
            Caution(
                f"{n} test {what} unusual mixture of concepts; see “Unusual images”.",
                images=[outlier.image for outlier in unusual],
            )
        )
    found += _method_cautions(record, explained.certificate)
    if explained.rank.any() and n_right < 0.7 * len(explained):
        found.append(
            Caution(
                f"The model predicts the class for only {n_right} of {len(explained)} test images: check "
                "that images, class and preprocessing belong together."
            )
        )
    against = share_against(explained.relevance)
    if against > 0.25:
        found.append(
            Caution(f"{against:.0%} of what the concepts hold counts against the class; shares leave it out.")
        )
    if record.n_train < FEW_TRAIN or len(explained) < FEW_TEST:
        found.append(
            Caution(
                f"Concepts were learned from {record.n_train} images and shown on {len(explained)}; with "
                f"fewer than {FEW_TRAIN} and {FEW_TEST} they may be those of a few pictures."
            )
        )
    return found + [Caution(_plain(note)) for note in record.notes]


def _method_cautions(record: AuditRecord, certificate: dict[str, Any]) -> list[Caution]:
    found = []
    around, lost = certificate.get("around_the_layer") or 0.0, certificate.get("on_zero_activations") or 0.0
    if around > HIGH_LOSS:
        found.append(Caution(f"{around:.0%} of the evidence goes around the layer, and is in no map."))
    if lost > HIGH_LOSS:
        found.append(Caution(f"{lost:.0%} of the evidence sits on zero activations, and is in no map."))
    share = certificate.get("share_of_score")
    if share is not None and not LOW_COVERAGE <= share <= 2 - LOW_COVERAGE:
        why = DIFFERENCES[record.method["backend"]]
        if kept := certificate.get("kept"):
            listed = _listed([f"{name} ({_percent(part)})" for name, part in kept.items()])
            why = f"{listed} hold the difference"
        found.append(Caution(f"The maps add up to {_percent(share)} of the score: {why}."))
    effect = record.ablation["correlation"] if record.ablation else None
    if is_known(effect) and effect < 0.5:
        found.append(
            Caution("Taking concepts out of the network has another effect than their relevance says.")
        )
    return found


def _percent(share: float) -> str:
    """A share that may be negative, as a whole number; no "-0%"."""
    return f"{round(share, 2) + 0.0:.0%}"


def _counted(number: int, what: str) -> str:
    """ "1 concept", "2 concepts"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _listed(items: list[str]) -> str:
    """ "a, b and c"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _plain(text: str) -> str:
    """Braces are for names of concepts."""
    return text.replace("{", "(").replace("}", ")")
