"""`write_report`: one HTML file from a record, explained images and subspaces."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from drsa_core import Subspaces
from drsa_core.storage import write_atomically
from markupsafe import Markup, escape

from ..findings import correlation_text, half_area, mixtures
from ..progress import duration
from ..results import AuditRecord, Explained
from ..work import check_out
from . import pictures as draw
from .verdict import Verdict, make_verdict

TEMPLATES = Path(__file__).parent / "templates"
#: Images of each concept in the gallery, and of those the first ones at the top of the page.
N_PROTOTYPES, N_FIRST = 6, 4
#: Side of small pictures in the page.
PHOTO_SIDE = 320


def write_report(folder: Path, out: Path) -> Path:
    """Write the page of a finished audit, from its work folder."""
    check_out(out)
    record = AuditRecord.load(folder)
    explained = Explained.load(folder / record.explained)
    subspaces = Subspaces.load(folder / record.subspaces)
    write_atomically(out, render(record, explained, subspaces).encode(errors="replace"))
    return out


def render(record: AuditRecord, explained: Explained, subspaces: Subspaces) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = duration
    environment.filters["correlation"] = correlation_text
    names = list(subspaces.names)
    environment.filters["named"] = lambda text: _with_names(text, names)
    verdict = make_verdict(record, explained)
    colours = draw.concept_colours(len(names))
    page = environment.get_template("report.html.j2").render(
        record=record,
        verdict=verdict,
        names=names,
        concepts=_concepts(record, explained, subspaces, verdict),
        images=_images(explained),
        groups=_groups(explained, verdict),
        classes=_classes(record, explained),
        charts=_charts(record, colours),
        choice_rows=draw.choice_rows(record.choice_of_k),
        certificate=_certificate(explained.certificate),
        data=_as_script(_data(record, explained, names)),
        css=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        js=Markup((TEMPLATES / "report.js").read_text(encoding="utf-8")),
        n_first=N_FIRST,
    )
    return str(page)


def _concepts(
    record: AuditRecord, explained: Explained, subspaces: Subspaces, verdict: Verdict
) -> list[dict[str, Any]]:
    found = []
    areas = half_area(explained.maps)
    flagged = {k for group in verdict.groups for k in group.concepts}
    for k, colour in enumerate(draw.concept_colours(subspaces.n_subspaces)):
        order = explained.relevance[:, k].argsort(descending=True, stable=True)[:N_PROTOTYPES].tolist()
        limit = draw.strength(explained.maps[order, k])
        prototypes = []
        for n in order:
            pixels, map_ = explained.pixels[n], explained.maps[n, k]
            shown = draw.over_photograph(pixels, map_, limit, colour)
            prototypes.append(
                {
                    "image": n,
                    "name": explained.names[n],
                    "relevance": float(explained.relevance[n, k]),
                    "crop": draw.jpeg(draw.cropped(pixels, map_), 128),
                    "map": draw.jpeg(shown, 192, 80),
                }
            )
        stability = record.stability
        found.append(
            {
                "number": k,
                "name": subspaces.names[k],
                "colour": colour,
                "share": float(verdict.shares[k]),
                "mean": float(explained.relevance[:, k].mean()),
                "area": float(areas[order, k].nanmean()),
                "dims": subspaces.dims[k],
                "stability": None if stability is None else stability["index"][k],
                "is_stable": stability is None or stability["is_stable"][k],
                "is_flagged": k in flagged,
                "prototypes": prototypes,
            }
        )
    return found


def _images(explained: Explained) -> list[dict[str, Any]]:
    # Pictures of a few pixels are enlarged here: a browser would blur them.
    side = PHOTO_SIDE if explained.pixels.shape[-1] < 128 else None
    return [
        {
            "number": n,
            "name": name,
            "photo": draw.jpeg(explained.pixels[n], side, 82),
            "score": float(explained.score[n]),
            "rank": int(explained.rank[n]),
        }
        for n, name in enumerate(explained.names)
    ]


def _groups(explained: Explained, verdict: Verdict) -> list[dict[str, Any]]:
    """Crops of the images in which a flagged concept is strong."""
    found = []
    for caution in verdict.look_first:
        k = caution.concept
        strongest = sorted(caution.images, key=lambda n, k=k: -float(explained.relevance[n, k]))  # type: ignore[misc]
        crops = [
            {
                "name": explained.names[n],
                "crop": draw.jpeg(draw.cropped(explained.pixels[n], explained.maps[n, k]), 128),
            }
            for n in strongest[:6]
        ]
        found.append({"concept": k, "text": caution.text, "crops": crops})
    return found


def _classes(record: AuditRecord, explained: Explained) -> list[dict[str, Any]]:
    """Mean R_k of each class for the explained output, and of the images that concepts were learned from."""
    rows = [(f"{record.target['name']} (test)", explained.relevance)]
    if record.train_relevance:
        rows.append((f"{record.target['name']} (learned from)", torch.tensor(record.train_relevance)))
    rows += [(name, torch.tensor(values)) for name, values in record.other_classes.items() if values]
    largest = max(float(values.mean(0).abs().max()) for _, values in rows) or 1.0
    return [
        {
            "name": name,
            "n_images": len(values),
            "means": [{"value": v, "width": 100 * abs(v) / largest} for v in values.mean(0).tolist()],
        }
        for name, values in rows
    ]


def _charts(record: AuditRecord, colours: list[str]) -> dict[str, Markup]:
    charts: dict[str, Markup] = {}
    if len(record.history) > 1:
        steps = list(range(len(record.history)))
        charts["training"] = draw.line_chart(
            [draw.Line("objective", steps, record.history, "one")],
            "iteration",
            "objective J",
            f"The objective rises from {record.history[0]:.3g} to {record.history[-1]:.3g} in "
            f"{len(steps) - 1} iterations.",
        )
    if record.flipping:
        styles = {"concepts": "one", "one map": "two", "random": "faint"}
        labels = {"concepts": "by the concepts", "one map": "by the one map", "random": "at random"}
        curves = record.flipping["curves"]
        lines = [
            draw.Line(labels[k], [100 * x for x in c["share"]], c["score"], styles[k])
            for k, c in curves.items()
        ]
        areas = "; ".join(f"{labels[k]}: area {c['aupc']:.3g}" for k, c in curves.items())
        charts["flipping"] = draw.line_chart(lines, "patches removed (%)", "score of the class", areas)
    if record.ablation:
        found = record.ablation
        groups = [
            (colours[k], [row[k] for row in found["relevance"]], [row[k] for row in found["drop"]])
            for k in range(len(colours))
        ]
        charts["ablation"] = draw.point_chart(
            groups,
            "relevance R of the concept",
            "drop of the score without it",
            f"Relevance of a concept against the drop of the score without it: correlation "
            f"{correlation_text(found['correlation'])}.",
        )
    if record.choice_of_k:
        charts |= draw.choice_charts(record.choice_of_k)
    return charts


def _certificate(certificate: dict[str, Any]) -> list[tuple[str, str]]:
    texts = {
        "is_complete": "The concepts together span the whole layer",
        "maps_to_whole": "Sum of the maps against the one map, largest difference in a pixel",
        "maps_to_layer": "Sum of each map against the concept's relevance at the layer, largest difference",
        "layer_to_score": "Sum of the concepts' relevance at the layer against the score, difference",
        "share_of_score": "Sum of all maps, as a part of the score",
        "on_zero_activations": "Lost on zero activations",
        "around_the_layer": "Goes around the layer",
        "unaccounted": "Score without the one map and what is kept on the way, as a part of the score",
    }
    rows = []
    for name, value in certificate.items():
        if name == "kept":  # only some models keep relevance on the way, e.g. in position embeddings
            rows += [
                (f"Kept by {part}, as a part of the score", _shown(v)) for part, v in (value or {}).items()
            ]
        elif name != "unaccounted" or value is not None:
            rows.append((texts.get(name, name.replace("_", " ")), _shown(value)))
    return rows


def _shown(value: Any) -> str:
    if value is None:
        return "not defined for this method"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.1%}"
    return str(value)


def _data(record: AuditRecord, explained: Explained, names: list[str]) -> dict[str, Any]:
    """What the page's script needs: maps as bytes, R_k, colours and names."""
    height, width = draw.shrunk(explained.whole).shape[-2:]
    small = draw.shrunk(explained.maps)
    images = []
    for n in range(len(explained)):
        limit = draw.strength(small[n])
        images.append(
            {
                "maps": draw.packed(small[n], limit),
                # To six digits of their own: scores may be of any scale.
                "relevance": [float(f"{value:.6g}") for value in explained.relevance[n].tolist()],
                "shares": [round(value, 4) for value in mixtures(explained.relevance[n : n + 1])[0].tolist()],
                "score": float(explained.score[n]),
                "rank": int(explained.rank[n]),
                "name": explained.names[n],
            }
        )
    identity = hashlib.sha256(json.dumps([record.created, record.model, record.command]).encode()).hexdigest()
    return {
        "id": identity[:16],
        "height": height,
        "width": width,
        "colours": [draw.rgb(colour) for colour in draw.concept_colours(len(names))],
        "defaults": names,
        "target": record.target["name"],
        "images": images,
    }


def _as_script(data: Any) -> Markup:
    """JSON inside of a script element: nothing in it can end the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def _with_names(text: str, names: list[str]) -> Markup:
    """Names of concepts in place of {S0}, {S1}, …, so that the page can change them."""

    def name(match: re.Match[str]) -> str:
        return f'<b data-name="{match[1]}">{escape(names[int(match[1])])}</b>'

    return Markup(re.sub(r"\{S(\d+)\}", name, str(escape(text))))
