"""Records of a run, averaged over seeds and summarised over images and classes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from drsa_core.evaluation import ConceptAblation, Summary, class_means, summarise
from torch import Tensor

from .experiment import Record

METRICS = ("aupc", "aupc_of_removed", "total_relevance", "separability", "peakness")
#: Known of each class, not of each image: see `checks`.
CLASS_METRICS = ("ablation", "ablation_within", "stability")
BEST_IS_LOW = {"aupc", "aupc_of_removed"}


@dataclass(frozen=True)
class Series:
    """One method with K or d at a layer: scores of each image, averaged over seeds.

    `values` maps a metric to (N,), and "curves" to (N, T + 1), in the order of the pairs (class, file) of
    `images`. `by_class` maps the metrics of classes to class ↦ value. A series of the stage "checks" has no
    images: its ablation and stability were run without maps.
    """

    stage: str
    layer: str
    method: str
    n_subspaces: int
    dims: int | None
    images: tuple[tuple[str, str], ...]
    values: dict[str, Tensor]
    share: list[float]
    n_seeds: int
    by_class: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def classes(self) -> list[str]:
        """Class of each image."""
        return [name for name, _ in self.images]

    def has(self, metric: str) -> bool:
        """Whether the metric was computed, for all classes: a run may have been cut short."""
        found = self.by_class.get(metric)
        return metric in self.values or (found is not None and set(self.classes) <= set(found))

    def summary(self, metric: str) -> Summary:
        """Mean over images and classes, with its standard error."""
        if metric in CLASS_METRICS:
            found = self.by_class[metric]
            return summarise(list(found.values()), list(found))
        return summarise(self.values[metric], self.classes)

    def class_means(self, metric: str) -> dict[str, float]:
        """Mean over the images of each class."""
        if metric in CLASS_METRICS:
            return self.by_class[metric]
        return class_means(self.values[metric], self.classes)

    def restricted(self, images: Sequence[tuple[str, str]]) -> Series:
        """The same for these images only, in this order, and for their classes."""
        where = [self.images.index(image) for image in images]
        values = {metric: value[where] for metric, value in self.values.items()}
        classes = {name for name, _ in images}
        by_class = {
            metric: {name: value for name, value in found.items() if name in classes}
            for metric, found in self.by_class.items()
        }
        return replace(self, images=tuple(images), values=values, by_class=by_class)


def depth_of(layer: str) -> list[tuple[bool, int, str]]:
    """What sorts names of layers: blocks.2 comes before blocks.10."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in layer.split(".")]


def on_common_images(*series: Series) -> list[Series]:
    """The series on the images that all of them have; none if there is no such image."""
    common = [image for image in series[0].images if all(image in s.images for s in series)]
    return [s.restricted(common) for s in series] if common else []


class Results:
    """All series of a run."""

    def __init__(self, records: list[Record]) -> None:
        groups: dict[tuple[str, str, str, int, int | None], list[Record]] = defaultdict(list)
        checks: dict[tuple[str, str, int], list[Record]] = defaultdict(list)
        for r in records:
            if r["stage"] in ("ablation", "stability"):
                checks[(r["layer"], r["method"], r["n_subspaces"])].append(r)
            else:
                groups[(r["stage"], r["layer"], r["method"], r["n_subspaces"], r["dims"])].append(r)
        self.series = []
        for key, group in groups.items():
            stage, layer, method, n_subspaces, dims = key
            checked = checks[(layer, method, n_subspaces)] if stage == "main" and dims is None else []
            self.series.append(replace(_series(key, group), by_class=_by_class(checked)))
        # Checks may have been run alone, without maps.
        with_maps = {(s.layer, s.method, s.n_subspaces) for s in self.find(stage="main", dims=None)}
        for (layer, method, n_subspaces), checked in checks.items():
            if checked and (layer, method, n_subspaces) not in with_maps:
                alone = Series("checks", layer, method, n_subspaces, None, (), {}, [], 1, _by_class(checked))
                self.series.append(alone)

    def find(self, **fields: object) -> list[Series]:
        """Series whose fields have these values."""
        return [s for s in self.series if all(getattr(s, name) == value for name, value in fields.items())]

    def get(self, **fields: object) -> Series | None:
        """The one series with these fields, if it is there."""
        found = self.find(**fields)
        return found[0] if found else None


def _by_class(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Metric ↦ class ↦ mean over seeds, of the records of `checks`."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in records:
        if r["stage"] == "stability":
            values = [value for split in r["index"] for value in split]
            found["stability"][r["class"]].append(sum(values) / len(values))
        else:
            relevance, drop = (torch.tensor(r[name], dtype=torch.float64) for name in ("relevance", "drop"))
            result = ConceptAblation(relevance, drop, drop.sum(1), ())
            found["ablation"][r["class"]].append(result.correlation)
            found["ablation_within"][r["class"]].append(result.correlation_within_images)
    return {
        metric: {name: sum(values) / len(values) for name, values in sorted(by_class.items())}
        for metric, by_class in found.items()
    }


def _series(key: tuple[str, str, str, int, int | None], group: list[Record]) -> Series:
    by_seed: dict[int, list[Record]] = defaultdict(list)
    for record in group:
        by_seed[record["seed"]].append(record)
    # A run that was cut short may have a seed for some classes only; it is left out.
    most = max(len(records) for records in by_seed.values())
    complete = [
        sorted(records, key=lambda r: r["class"]) for records in by_seed.values() if len(records) == most
    ]
    images = tuple((r["class"], file) for r in complete[0] for file in r["files"])

    def mean(read: Callable[[Record], list[float]]) -> Tensor:
        seeds = [
            torch.tensor([v for r in records for v in read(r)], dtype=torch.float64) for records in complete
        ]
        return torch.stack(seeds).mean(0)

    values = {metric: mean(lambda r, m=metric: r[m]) for metric in METRICS}  # type: ignore[misc]
    values["curves"] = mean(lambda r: r["curves"])
    return Series(*key, images, values, complete[0][0]["share"], len(complete))
