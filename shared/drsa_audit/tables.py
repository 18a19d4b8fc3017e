"""Tables of the benchmark: Markdown to read, CSV and JSON to go on with."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from drsa_core.evaluation import Summary, class_means, delta_aupc, summarise

from .experiment import Record
from .results import BEST_IS_LOW, METRICS, Results, Series, on_common_images

TITLES = {
    "aupc": "AUPC ↓",
    "aupc_of_removed": "AUPC over removed ↓",
    "total_relevance": "total relevance ↑",
    "separability": "separability ↑",
    "peakness": "peakness ↑",
}
NAMES = {
    "whole": "no subspaces (U = I)",
    "random": "random",
    "max-rel": "Max-Rel",
    "pca": "PCA",
    "prca": "PRCA",
    "netdissect": "NetDissect",
    "ibd": "IBD",
    "dsa": "DSA",
    "drsa": "DRSA",
    "gxi": "Gradient × Input",
    "ig": "Integrated Gradients",
    "shapley": "Shapley value sampling",
    "lrp": "LRP",
    "noise": "random map",
}


def write_tables(records: list[Record], out: Path, layer: str, n_subspaces: int) -> str:
    """Write tables.md, tables.csv and tables.json, and return the Markdown."""
    results = Results(records)
    k = n_subspaces
    whole = results.find(stage="main", layer=layer, method="whole")
    single = [s for s in results.find(stage="main", layer=layer, n_subspaces=1) if s.dims == 1]
    many = [
        s for s in results.find(stage="main", layer=layer, n_subspaces=k, dims=None) if s.method != "whole"
    ]
    parts = []
    if single:
        parts += [f"### One subspace, d = 1, at {layer} (as Tables 1 and F.1)"]
        parts += [_table(whole + single, ("aupc", "total_relevance"))]
        parts += [_differences("prca", single, ("aupc", "total_relevance"))]
    if many:
        metrics = ("aupc", "aupc_of_removed", "separability", "peakness")
        parts += [f"### K = {k} subspaces at {layer} (as Tables 2 and F.2)"]
        parts += [_table(whole + many, metrics), _differences("drsa", many, metrics)]
    if attributions := results.find(stage="attribution"):
        parts += ["### Attribution methods in one step (as Table D.1)", _table(attributions, ("aupc",))]
    if curve := results.find(stage="dims"):
        parts += ["### Subspace dimensions d", _grid(curve, "d", ("aupc", "total_relevance"))]
    for stage, axis in (("subspaces", "K"), ("layers", "layer")):
        if found := with_main(results, stage, layer, k):
            title = f"### {'Number of subspaces K' if axis == 'K' else f'Layers, K = {k}'} (Note F.2)"
            parts += [title, _grid(found, axis, ("aupc", "separability", "peakness"))]
    if whole and many:
        parts += ["### ΔAUPC by class (Note G)", _gains(gains(whole[0], many))]
    parts += ["### Time", _times(records)]
    text = "\n\n".join(part for part in parts if part) + "\n"
    (out / "tables.md").write_text(text)
    rows = [
        {
            "stage": s.stage,
            "layer": s.layer,
            "method": s.method,
            "n_subspaces": s.n_subspaces,
            "dims": s.dims,
            "metric": metric,
            "mean": summary.mean,
            "standard_error": summary.standard_error,
            "interval_low": summary.interval[0],
            "interval_high": summary.interval[1],
            "n_classes": summary.n_classes,
            "n_images": summary.n_instances,
            "n_seeds": s.n_seeds,
            "by_class": class_means(s.values[metric], s.classes),
        }
        for s in results.series
        for metric in METRICS
        for summary in [s.summary(metric)]
    ]
    (out / "tables.json").write_text(json.dumps(rows, indent=1))
    with (out / "tables.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [name for name in (rows[0] if rows else {}) if name != "by_class"])
        writer.writeheader()
        writer.writerows({name: v for name, v in row.items() if name != "by_class"} for row in rows)
    return text


def with_main(results: Results, stage: str, layer: str, n_subspaces: int) -> list[Series]:
    """Series of an ablation with those of the main stage, on the images of the ablation."""
    found = results.find(stage=stage)
    if not found:
        return []
    main = [
        s
        for method in ("dsa", "drsa")
        for s in results.find(stage="main", layer=layer, method=method, n_subspaces=n_subspaces)
    ]
    return on_common_images(*main, *found) or found


def _order(series: Sequence[Series]) -> list[Series]:
    return sorted(series, key=lambda s: list(NAMES).index(s.method))


def _table(series: Sequence[Series], metrics: Sequence[str]) -> str:
    """Rows are methods; the best subspace method of a column is bold."""
    ordered = _order(series)
    summaries = {s.method: {m: s.summary(m) for m in metrics} for s in ordered}
    rivals = [s.method for s in ordered if s.method not in ("whole", "noise")]
    best = {}
    for m in metrics:
        choose = min if m in BEST_IS_LOW else max
        best[m] = choose(rivals, key=lambda method: summaries[method][m].mean) if rivals else ""
    rows = []
    for s in ordered:
        cells = [f"**{v}**" if best[m] == s.method else v for m, v in _cells(summaries[s.method])]
        seeds = f" ({s.n_seeds} seeds)" if s.n_seeds > 1 else ""
        rows.append(f"| {NAMES[s.method]}{seeds} | {' | '.join(cells)} | {len(s.images)} |")
    head = f"| | {' | '.join(TITLES[m] for m in metrics)} | images |"
    return "\n".join([head, "|---" * (len(metrics) + 2) + "|", *rows])


def _cells(summaries: dict[str, Summary]) -> list[tuple[str, str]]:
    return [(m, f"{number(s.mean)} ± {number(s.standard_error)}") for m, s in summaries.items()]


def number(value: float) -> str:
    """Three digits after the point, or three significant ones for small numbers."""
    return f"{value:.3f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"


def _differences(method: str, series: Sequence[Series], metrics: Sequence[str]) -> str:
    """The proposed method minus each other, paired by image."""
    ours = [s for s in series if s.method == method]
    if not ours:
        return ""
    lines = [
        f"{NAMES[method]} minus the others, image by image: mean ± standard error over classes "
        "[95 % bootstrap over images], classes in which it is better.",
        "",
        f"| {NAMES[method]} minus | {' | '.join(TITLES[m] for m in metrics)} |",
        "|---" * (len(metrics) + 1) + "|",
    ]
    for other in _order(series):
        pair = on_common_images(ours[0], other)
        if other.method == method or not pair:
            continue
        cells = []
        for m in metrics:
            # Image by image: far sharper than the difference of two means with their errors.
            gain = pair[0].values[m] - pair[1].values[m]
            summary, by_class = summarise(gain, pair[0].classes), class_means(gain, pair[0].classes)
            better = sum((value < 0) == (m in BEST_IS_LOW) for value in by_class.values())
            low, high = summary.interval
            cells.append(
                f"{number(summary.mean)} ± {number(summary.standard_error)} [{number(low)}, {number(high)}], "
                f"{better}/{len(by_class)}"
            )
        lines.append(f"| {NAMES[other.method]} | {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 4 else ""


def _grid(series: Sequence[Series], axis: str, metrics: Sequence[str]) -> str:
    """A table for each metric: methods in rows, d, K or layers in columns."""
    read = {"d": lambda s: s.dims, "K": lambda s: s.n_subspaces, "layer": lambda s: s.layer}[axis]
    places = sorted({read(s) for s in series})
    methods = sorted({s.method for s in series}, key=list(NAMES).index)
    tables = []
    for m in metrics:
        lines = [f"| {TITLES[m]} | {' | '.join(f'{axis} = {p}' for p in places)} |"]
        lines.append("|---" * (len(places) + 1) + "|")
        for method in methods:
            cells = []
            for place in places:
                found = [s for s in series if s.method == method and read(s) == place]
                cells.append(_cells({m: found[0].summary(m)})[0][1] if found else "")
            lines.append(f"| {NAMES[method]} | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return "\n\n".join([*tables, f"({len(series[0].images)} images)"])


def gains(whole: Series, series: Sequence[Series]) -> dict[str, dict[str, float]]:
    """Method → class → ΔAUPC, for the methods that share images with the whole."""
    found = {}
    for s in _order(series):
        if pair := on_common_images(whole, s):
            before, after = (p.values["aupc"] for p in pair)
            found[NAMES[s.method]] = delta_aupc(before, after, pair[0].classes)
    return found


def _gains(by_method: dict[str, dict[str, float]]) -> str:
    lines = [f"| class | {' | '.join(by_method)} |", "|---" * (len(by_method) + 1) + "|"]
    for name in list(by_method.values())[-1]:
        cells = [f"{by_class[name]:.3f}" if name in by_class else "" for by_class in by_method.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _times(records: list[Record]) -> str:
    """Seconds per image for each number of maps."""
    lines = ["| seconds per image | maps | inpainting | network | images |", "|---|---|---|---|---|"]
    for stage, title in (("main", "K"), ("subspaces", "K")):
        for k in sorted({r["n_subspaces"] for r in records if r["stage"] == stage and not r["dims"]}):
            found = [r for r in records if r["stage"] == stage and r["n_subspaces"] == k and r["blocks"] == k]
            n = sum(len(r["files"]) for r in found)
            if n:
                keys = ("explain_seconds", "fill_seconds", "network_seconds")
                times = [f"{sum(r[key] for r in found) / n:.2f}" for key in keys]
                lines.append(f"| {title} = {k} | {' | '.join(times)} | {n} |")
    return "\n".join(lines)
