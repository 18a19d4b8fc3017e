"""What a benchmark found, as a small value that a JSON file can hold: all that its tables need.

It has no photographs, curves or single images in it, so that a page can be written again anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drsa_core.evaluation import class_means, delta_aupc, summarise

from .experiment import Record
from .results import BEST_IS_LOW, CLASS_METRICS, METRICS, Results, Series, depth_of, on_common_images

#: Digits after the point; more than anybody needs.
DIGITS = 5
MANY_METRICS = ("aupc", "aupc_of_removed", "separability", "peakness")


def summarise_records(
    records: list[Record],
    layer: str,
    n_subspaces: int,
    about: dict[str, Any] | None = None,
    same_images: bool = False,
) -> dict[str, Any]:
    """Means, standard errors and paired differences of all tables.

    Parameters
    ----------
    records : list of dict
        Of one run, or of several on the same network.
    layer : str
        Of the main tables.
    n_subspaces : int
        K of the main tables.
    about : dict, optional
        Settings, for the reader.
    same_images : bool
        Whether the table of K subspaces is about the images that all its methods have.

    Returns
    -------
    dict
        `tables`: name ↦ `title`, `metrics`, `rows` (method ↦ metric ↦ `mean`, `error`, `by_class`),
        `differences` and `of`, the method that the others are taken from; `grids`: name ↦ the same by place
        (method ↦ place ↦ metric, for rows and differences alike);
        `gains`: method ↦ class ↦ ΔAUPC; `times`.
    """
    results, k = Results(records), n_subspaces
    main = results.find(stage="main", layer=layer)
    whole = [s for s in main if s.method == "whole"]
    single = [s for s in main if s.n_subspaces == 1 and s.dims == 1]
    many = [s for s in main if s.n_subspaces == k and s.dims is None and s.method != "whole"]
    if same_images and many:
        kept = on_common_images(*many, *whole)
        many, whole_of_many = kept[: len(many)], kept[len(many) :]
    else:
        whole_of_many = whole
    tables: dict[str, Any] = {}
    if single:
        title = f"One subspace, d = 1, at {layer} (as Tables 1 and F.1)"
        tables["single"] = _table(title, whole + single, "prca", ("aupc", "total_relevance"))
    if many:
        title = f"K = {k} subspaces at {layer} (as Tables 2 and F.2)"
        extra = tuple(m for m in CLASS_METRICS if any(s.has(m) for s in many))
        tables["many"] = _table(title, whole_of_many + many, "drsa", MANY_METRICS + extra)
    if checks := results.find(stage="checks", layer=layer, n_subspaces=k):
        title = f"K = {k} subspaces at {layer}, without maps"
        known = tuple(m for m in CLASS_METRICS if any(s.has(m) for s in checks))
        tables["checks"] = _table(title, checks, None, known)
    if attributions := results.find(stage="attribution"):
        tables["attribution"] = _table(
            "Attribution methods in one step (as Table D.1)", attributions, "lrp", ("aupc",)
        )
    if gammas := results.find(stage="gamma"):
        title = f"Which γ below {layer}? Standard maps of training images"
        tables["gamma"] = _table(title, gammas, None, ("aupc", "aupc_of_removed"))
    grids: dict[str, Any] = {}
    if curve := results.find(stage="dims"):
        grids["dims"] = _grid("Subspace dimensions d", curve, "prca", "d", ("aupc", "total_relevance"))
    for stage, axis, title in (
        ("subspaces", "K", "Number of subspaces K (Note F.2)"),
        ("layers", "layer", f"Layers, K = {k} (Note F.2)"),
    ):
        if found := with_main(results, stage, layer, k):
            grids[stage] = _grid(title, found, "drsa", axis, MANY_METRICS)
    return {
        "about": about or {},
        "layer": layer,
        "n_subspaces": k,
        "tables": tables,
        "grids": grids,
        "gains": gains(whole_of_many[0], many) if whole_of_many and many else {},
        "times": _times(records),
    }


def with_main(results: Results, stage: str, layer: str, n_subspaces: int) -> list[Series]:
    """Series of an ablation with those of the main stage, on the images of the ablation."""
    found = results.find(stage=stage)
    if not found:
        return []
    main = [
        s
        for method in dict.fromkeys(s.method for s in found)
        for s in results.find(stage="main", layer=layer, method=method, n_subspaces=n_subspaces)
    ]
    return on_common_images(*main, *found) or found


def gains(whole: Series, series: Sequence[Series]) -> dict[str, dict[str, float]]:
    """Method ↦ class ↦ ΔAUPC, for the methods that share images with the whole (Note G)."""
    found = {}
    for s in series:
        if pair := on_common_images(whole, s):
            before, after = (p.values["aupc"] for p in pair)
            found[s.method] = delta_aupc(before, after, pair[0].classes)
    return found


def rows_of(results: Results) -> list[dict[str, Any]]:
    """Every score of every series, for tables.csv and tables.json."""
    return [
        {
            "stage": s.stage,
            "layer": s.layer,
            "method": s.method,
            "n_subspaces": s.n_subspaces,
            "dims": s.dims,
            "metric": metric,
            "mean": summary.mean,
            "standard_error": summary.standard_error if summary.n_classes > 1 else None,  # JSON has no NaN
            "interval_low": summary.interval[0],
            "interval_high": summary.interval[1],
            "n_classes": summary.n_classes,
            "n_images": len(s.images),
            "n_seeds": s.n_seeds,
            "by_class": s.class_means(metric),
        }
        for s in results.series
        for metric in (*METRICS, *CLASS_METRICS)
        if s.has(metric)
        for summary in [s.summary(metric)]
    ]


def _table(title: str, series: Sequence[Series], ours: str | None, metrics: Sequence[str]) -> dict[str, Any]:
    rows = {
        s.method: {"n_seeds": s.n_seeds, "n_images": len(s.images)}
        | {m: _value(s, m) for m in metrics if s.has(m)}
        for s in series
    }
    # The standard map is no rival: it has one map where the others have K.
    rivals = [s for s in series if s.method != "whole"]
    differences = _differences(ours, rivals, metrics) if ours else {}
    return {"title": title, "metrics": list(metrics), "rows": rows, "of": ours, "differences": differences}


def _value(series: Series, metric: str) -> dict[str, Any]:
    summary = series.summary(metric)
    by_class = {name: round(value, DIGITS) for name, value in series.class_means(metric).items()}
    return {
        "mean": round(summary.mean, DIGITS),
        "error": round(summary.standard_error, DIGITS) if summary.n_classes > 1 else None,
        "by_class": by_class,
    }


def _differences(ours: str, series: Sequence[Series], metrics: Sequence[str]) -> dict[str, Any]:
    """The proposed method minus each other, paired by image."""
    mine = [s for s in series if s.method == ours]
    found: dict[str, Any] = {}
    for other in series:
        if not mine or other.method == ours or not (pair := on_common_images(mine[0], other)):
            continue
        found[other.method] = {"n_images": len(pair[0].images)} | {
            m: _difference(pair[0], pair[1], m) for m in metrics if all(s.has(m) for s in pair)
        }
    return found


def _difference(ours: Series, other: Series, metric: str) -> dict[str, Any]:
    """Mean, standard error over classes, bootstrap over the images of classes, classes where ours wins."""
    if metric in CLASS_METRICS:
        mine, theirs = ours.class_means(metric), other.class_means(metric)
        names = [name for name in mine if name in theirs]
        gain, classes = [mine[name] - theirs[name] for name in names], names
    else:
        # Image by image: far sharper than the difference of two means with their errors.
        gain, classes = (ours.values[metric] - other.values[metric]).tolist(), ours.classes
    summary, by_class = summarise(gain, classes), class_means(gain, classes)
    better = sum(value < 0 if metric in BEST_IS_LOW else value > 0 for value in by_class.values())
    low, high = summary.interval
    return {
        "mean": round(summary.mean, DIGITS),
        "error": round(summary.standard_error, DIGITS) if summary.n_classes > 1 else None,
        # One number for each class leaves nothing to draw from.
        "interval": None if len(by_class) == len(gain) else [round(low, DIGITS), round(high, DIGITS)],
        "better": better,
        "n_classes": len(by_class),
    }


def _grid(
    title: str, series: Sequence[Series], ours: str, axis: str, metrics: Sequence[str]
) -> dict[str, Any]:
    read = {"d": lambda s: s.dims, "K": lambda s: s.n_subspaces, "layer": lambda s: s.layer}[axis]
    by_place: dict[str, list[Series]] = {}
    for s in sorted(series, key=lambda s: depth_of(str(read(s)))):
        by_place.setdefault(str(read(s)), []).append(s)
    rows: dict[str, dict[str, Any]] = {}
    differences: dict[str, dict[str, Any]] = {}
    for place, there in by_place.items():
        for s in there:
            rows.setdefault(s.method, {})[place] = {m: _value(s, m) for m in metrics}
        for method, found in _differences(ours, there, metrics).items():
            differences.setdefault(method, {})[place] = found
    about = {"title": title, "axis": axis, "places": list(by_place), "metrics": list(metrics)}
    return about | {"rows": rows, "of": ours, "differences": differences, "n_images": len(series[0].images)}


def _times(records: list[Record]) -> list[dict[str, Any]]:
    """Seconds per image for each number of maps."""
    keys, found = ("explain_seconds", "fill_seconds", "network_seconds"), []
    for stage in ("main", "subspaces"):
        of_stage = [r for r in records if r["stage"] == stage and not r["dims"]]
        for k in sorted({r["n_subspaces"] for r in of_stage}):
            same = [r for r in of_stage if r["n_subspaces"] == k and r["blocks"] == k]
            n = sum(len(r["files"]) for r in same)
            if n:
                found.append({"K": k, "n_images": n} | {key: sum(r[key] for r in same) / n for key in keys})
    return found
