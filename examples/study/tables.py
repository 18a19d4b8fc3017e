"""Tables of the benchmark: Markdown to read, CSV and JSON to go on with."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drsa_core.storage import write_atomically

from .experiment import Record
from .results import BEST_IS_LOW, CLASS_METRICS, Results
from .summary import rows_of, summarise_records

TITLES = {
    "aupc": "AUPC ↓",
    "aupc_of_removed": "AUPC over removed ↓",
    "total_relevance": "total relevance ↑",
    "separability": "separability ↑",
    "peakness": "peakness ↑",
    "ablation": "ablation ↑",
    "ablation_within": "ablation within images ↑",
    "stability": "stability ↑",
}
NAMES = {
    "whole": "no subspaces (U = I)",
    "random": "random",
    "max-rel": "Max-Rel",
    "pca": "PCA",
    "prca": "PRCA",
    "netdissect": "NetDissect",
    "ibd": "IBD",
    "ibd-classes": "IBD, class labels",
    "channels": "channels (CRP)",
    "kmeans": "k-means (ACE)",
    "nmf": "NMF (CRAFT)",
    "ica": "ICA",
    "dictionary": "sparse dictionary",
    "drsa-lines": "DRSA, d = 1 each",
    "dsa": "DSA",
    "drsa": "DRSA",
    "drsa-balanced": "DRSA, balance 1",
    "gxi": "Gradient × Input",
    "ig": "Integrated Gradients",
    "shapley": "Shapley value sampling",
    "lrp": "LRP",
    "noise": "random map",
}
#: Explained below tables in which they occur.
LEGENDS = {
    "ablation": "Ablation: correlation, over images and concepts of a class, of R_k with what the output "
    "loses when the concept is taken out of the activation; “within images” after each image's mean is taken "
    "off.",
    "stability": "Stability: correlation of R_k of concepts learned from two halves of the training images, "
    "matched one to one; mean over concepts.",
}


def write_tables(
    records: list[Record], out: Path, layer: str, n_subspaces: int, about: dict[str, Any] | None = None
) -> str:
    """Write tables.md, tables.csv, tables.json and summary.json, and return the Markdown."""
    summary = summarise_records(records, layer, n_subspaces, about)
    text = render(summary)
    rows = rows_of(Results(records))
    sheet = io.StringIO(newline="")
    writer = csv.DictWriter(sheet, [name for name in (rows[0] if rows else {}) if name != "by_class"])
    writer.writeheader()
    writer.writerows({name: v for name, v in row.items() if name != "by_class"} for row in rows)
    files = {
        "tables.md": text,
        "summary.json": json.dumps(summary, indent=1, default=str),
        "tables.json": json.dumps(rows, indent=1),
        "tables.csv": sheet.getvalue(),
    }
    for name, content in files.items():
        write_atomically(out / name, content.encode())
    return text


def render(summary: dict[str, Any], with_times: bool = True) -> str:
    """The tables of a summary as Markdown."""
    parts = []
    for table in summary["tables"].values():
        parts += [f"### {table['title']}", table_of(table), differences_of(table), _legend(table)]
    for grid in summary["grids"].values():
        parts += [f"### {grid['title']}", grid_of(grid)]
    if summary["gains"]:
        parts += ["### ΔAUPC by class (Note G)", gains_of(summary["gains"])]
    if with_times:
        parts += ["### Time", _times(summary["times"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def ordered(methods: Any) -> list[str]:
    """Methods in the order of `NAMES`; what is not there, such as "γ = 0.1", comes last."""
    known = list(NAMES)
    return sorted(methods, key=lambda method: known.index(method) if method in NAMES else len(known))


def name_of(method: str) -> str:
    """What a method is called in tables."""
    return NAMES.get(method, method)


def table_of(table: dict[str, Any]) -> str:
    """Rows are methods; the best subspace method of a column is bold."""
    metrics, rows = table["metrics"], table["rows"]
    of_images = any(row["n_images"] for row in rows.values())  # not what is known of classes alone
    rivals = [method for method in rows if method not in ("whole", "noise")]
    best = {}
    for m in metrics:
        choose = min if m in BEST_IS_LOW else max
        having = [method for method in rivals if m in rows[method]]
        best[m] = choose(having, key=lambda method: rows[method][m]["mean"]) if len(having) > 1 else ""
    titles = [TITLES[m] for m in metrics] + ["images"] * of_images
    lines = [f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for method in ordered(rows):
        row = rows[method]
        cells = [cell(row[m]) if m in row else "" for m in metrics]
        cells = [f"**{c}**" if best[m] == method else c for m, c in zip(metrics, cells, strict=True)]
        seeds = f" ({row['n_seeds']} seeds)" if row["n_seeds"] > 1 else ""
        cells += [str(row["n_images"])] * of_images
        lines.append(f"| {name_of(method)}{seeds} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(value: dict[str, Any]) -> str:
    """Mean ± standard error over classes; without it where there is one class."""
    return number(value["mean"]) + ("" if value["error"] is None else f" ± {number(value['error'])}")


def number(value: float) -> str:
    """Three digits after the point, or three significant ones for small numbers."""
    return f"{value:.3f}" if round(abs(value), 4) >= 0.1 or value == 0 else f"{value:.3g}"


def differences_of(table: dict[str, Any]) -> str:
    """The proposed method minus each other, paired by image."""
    if not table["differences"]:
        return ""
    ours, metrics = name_of(table["of"]), table["metrics"]
    lines = [
        _how_compared(
            ours, [found[m] for found in table["differences"].values() for m in metrics if m in found]
        ),
        "",
        f"| {ours} minus | {' | '.join(TITLES[m] for m in metrics)} |",
        "|---" * (len(metrics) + 1) + "|",
    ]
    for method in ordered(table["differences"]):
        found = table["differences"][method]
        cells = [difference(found[m]) if m in found else "" for m in metrics]
        lines.append(f"| {name_of(method)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _how_compared(ours: str, cells: Sequence[dict[str, Any]]) -> str:
    """What the cells of `difference` mean."""
    drawn = " [95 % bootstrap over the images of each class]" if any(c["interval"] for c in cells) else ""
    return (
        f"{ours} minus the others, image by image: mean ± standard error over classes{drawn}, "
        "classes in which it is better."
    )


def difference(value: dict[str, Any]) -> str:
    """Mean ± standard error [interval], classes in which it is better."""
    interval = value["interval"]
    between = "" if interval is None else f" [{number(interval[0])}, {number(interval[1])}]"
    return f"{cell(value)}{between}, {value['better']}/{value['n_classes']}"


def _legend(table: dict[str, Any]) -> str:
    return " ".join(text for m, text in LEGENDS.items() if m in table["metrics"] and m in CLASS_METRICS)


def grid_of(grid: dict[str, Any]) -> str:
    """A table for each metric: methods and paired differences in rows, d, K or layers in columns."""
    axis, places, ours, apart = grid["axis"], grid["places"], name_of(grid["of"]), grid["differences"]
    tables = []
    for m in grid["metrics"]:
        lines = [f"| {TITLES[m]} | {' | '.join(f'{axis} = {p}' for p in places)} |"]
        lines.append("|---" * (len(places) + 1) + "|")
        for method in ordered(grid["rows"]):
            found = grid["rows"][method]
            cells = [cell(found[p][m]) if p in found else "" for p in places]
            lines.append(f"| {name_of(method)} | {' | '.join(cells)} |")
        for method in ordered(apart):
            cells = [difference(apart[method][p][m]) if p in apart[method] else "" for p in places]
            lines.append(f"| {ours} minus {name_of(method)} | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    compared = [found[m] for of in apart.values() for found in of.values() for m in grid["metrics"]]
    legend = f" {_how_compared(ours, compared)}" if compared else ""
    return "\n\n".join([*tables, f"({grid['n_images']} images.{legend})"])


def gains_of(by_method: dict[str, dict[str, float]]) -> str:
    """ΔAUPC: classes in rows, methods in columns."""
    methods = ordered(by_method)
    lines = [f"| class | {' | '.join(map(name_of, methods))} |", "|---" * (len(methods) + 1) + "|"]
    for name in by_method[methods[-1]]:
        cells = [f"{by_method[m][name]:.3f}" if name in by_method[m] else "" for m in methods]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _times(times: list[dict[str, Any]]) -> str:
    lines = ["| seconds per image | maps | inpainting | network | images |", "|---|---|---|---|---|"]
    for row in times:
        cells = [f"{row[key]:.2f}" for key in ("explain_seconds", "fill_seconds", "network_seconds")]
        lines.append(f"| K = {row['K']} | {' | '.join(cells)} | {row['n_images']} |")
    return "\n".join(lines)
