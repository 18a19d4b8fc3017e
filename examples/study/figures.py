"""Figures of the benchmark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drsa_core import Subspaces
from drsa_core.evaluation import Summary

from .curves import delta_aupc_bars, flipping_curves, scores_against, training_curves
from .experiment import Record
from .results import Results, Series, depth_of, on_common_images
from .summary import gains, with_main
from .tables import NAMES, TITLES, name_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_figures(records: list[Record], out: Path, layer: str, n_subspaces: int) -> list[Path]:
    """Draw what the records allow, into OUT/figures."""
    results = Results(records)
    figures: dict[str, Figure] = {}
    main = results.find(stage="main", layer=layer)
    whole = [s for s in main if s.method == "whole"]
    single = [s for s in main if s.dims == 1]
    many = [s for s in main if s.n_subspaces == n_subspaces and s.dims is None and s.method != "whole"]
    for name, series in (("flipping_d1", whole + single), (f"flipping_k{n_subspaces}", whole + many)):
        if len(series) > 1 and (figure := _flipping(series)):
            figures[name] = figure
    if curve := results.find(stage="dims"):
        references = {}
        if whole and all(image in whole[0].images for image in curve[0].images):
            same = whole[0].restricted(curve[0].images)
            references = {TITLES[m]: same.summary(m).mean for m in ("aupc", "total_relevance")}
        dims = sorted({s.dims or 0 for s in curve})
        panels = _panels(curve, ("aupc", "total_relevance"), lambda s: s.dims, dims)
        figures["dims"] = scores_against(dims, panels, "subspace dimensions d", references)
    metrics = ("aupc", "separability", "peakness")
    if found := with_main(results, "subspaces", layer, n_subspaces):
        ks = sorted({s.n_subspaces for s in found})
        panels = _panels(found, metrics, lambda s: s.n_subspaces, ks)
        figures["subspaces"] = scores_against(ks, panels, "number of subspaces K")
    if found := with_main(results, "layers", layer, n_subspaces):
        layers = sorted({s.layer for s in found}, key=depth_of)
        panels = _panels(found, metrics, lambda s: s.layer, layers)
        figures["layers"] = scores_against(layers, panels, "layer")
    if whole and many:
        compared = gains(whole[0], [s for s in many if s.method in ("dsa", "drsa")])
        compared = {name_of(method): by_class for method, by_class in compared.items()}
        if len({frozenset(by_class) for by_class in compared.values()}) == 1:
            figures["delta_aupc"] = delta_aupc_bars(compared)
    histories = _histories(out, layer, n_subspaces)
    if histories:
        figures["training"] = training_curves(histories)
    folder = out / "figures"
    folder.mkdir(exist_ok=True)
    files = []
    for name, figure in figures.items():
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=100)
    return files


def _flipping(series: list[Series]) -> Figure | None:
    chosen = on_common_images(*sorted(series, key=lambda s: list(NAMES).index(s.method)))
    if not chosen:
        return None
    scores = {NAMES[s.method]: s.values["curves"] for s in chosen}
    return flipping_curves(chosen[0].share, scores, chosen[0].classes)


def _panels(
    series: list[Series], metrics: Sequence[str], place: Callable[[Series], object], places: Sequence[object]
) -> dict[str, dict[str, list[Summary]]]:
    """Score → method → a summary for each place; methods that lack one are left out."""
    lines = {}
    for m in metrics:
        by_method: dict[str, dict[object, Summary]] = defaultdict(dict)
        for s in series:
            by_method[NAMES[s.method]][place(s)] = s.summary(m)
        lines[TITLES[m]] = {
            method: [found[p] for p in places]
            for method, found in by_method.items()
            if len(found) == len(places)
        }
    return lines


def _histories(out: Path, layer: str, n_subspaces: int) -> dict[str, dict[str, list[float]]]:
    """Training curves, from the metadata of the fitted subspaces."""
    histories: dict[str, dict[str, list[float]]] = {}
    for method in ("dsa", "drsa"):
        for file in sorted((out / "subspaces" / layer).glob(f"*/{method}-k{n_subspaces}-*.safetensors")):
            history = Subspaces.load(file).metadata["history"]
            histories.setdefault(NAMES[method], {})[file.parent.name] = history
    return histories
