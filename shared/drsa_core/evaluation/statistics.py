"""Means over instances and then classes, standard errors, bootstrap intervals, ΔAUPC (section 5, Note G)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..checks import Seed, as_float, as_hashable_labels, as_int, as_seed, check_finite

Label = TypeVar("Label", bound=Hashable)
Values: TypeAlias = "Tensor | np.ndarray[Any, Any] | Sequence[float]"
#: One label for each instance.
Labels: TypeAlias = "Sequence[Label] | Tensor | np.ndarray[Any, Any]"


@dataclass(frozen=True)
class Summary:
    """A score over a data set: averaged over the instances of each class, then over classes.

    Attributes
    ----------
    mean : float
    standard_error : float
        Of the mean over classes, from the standard deviation of the class means (n − 1). NaN for one class,
        which has no spread over classes.
    interval : tuple of float
        Bootstrap interval of `mean`.
    n_classes, n_instances : int
    """

    mean: float
    standard_error: float
    interval: tuple[float, float]
    n_classes: int
    n_instances: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.standard_error:.3f}"


def class_means(values: Values, classes: Labels[Label]) -> dict[Label, float]:
    """Mean of values (N,) over the instances of each of the classes (N,), in order of first occurrence."""
    return {label: float(group.mean()) for label, group in _by_class(values, classes).items()}


def summarise(
    values: Values,
    classes: Labels[Label],
    *,
    level: float = 0.95,
    n_resamples: int = 2000,
    random_state: Seed = 0,
) -> Summary:
    """Mean over instances and then classes, its standard error over classes, and a bootstrap interval.

    Parameters
    ----------
    values : tensor or sequence, shape (N,)
        A score of each instance. Hand in differences to compare two methods image by image.
    classes : tensor, array or sequence, length N
        Class of each instance.
    level, n_resamples, random_state
        As in `bootstrap_interval`.
    """
    means = np.array(list(class_means(values, classes).values()))
    error = float(means.std(ddof=1) / len(means) ** 0.5) if len(means) > 1 else float("nan")
    options: Any = {"level": level, "n_resamples": n_resamples, "random_state": random_state}
    interval = bootstrap_interval(values, classes, **options)
    return Summary(float(means.mean()), error, interval, len(means), len(values))


def bootstrap_interval(
    values: Values,
    classes: Labels[Label],
    *,
    level: float = 0.95,
    n_resamples: int = 2000,
    random_state: Seed = 0,
    resample_classes: bool = False,
) -> tuple[float, float]:
    """Percentile interval of the mean over classes of class means.

    Parameters
    ----------
    values : tensor or sequence, shape (N,)
    classes : tensor, array or sequence, length N
    level : float
        Share of the resamples that lie inside.
    n_resamples : int
    random_state : int, optional
        Seed; None draws a new one.
    resample_classes : bool
        Whether classes are drawn with replacement before their instances are. By default the classes are
        taken as they are, and the interval speaks of these classes only.
    """
    level, n_resamples = as_float(level, "level", 0, 1), as_int(n_resamples, "n_resamples", 1)
    generator = np.random.default_rng(as_seed(random_state))
    groups = list(_by_class(values, classes).values())
    resampled = np.empty((n_resamples, len(groups)))
    # Which class stands in each place of each resample.
    drawn = np.broadcast_to(np.arange(len(groups)), resampled.shape)
    if resample_classes:
        drawn = generator.integers(len(groups), size=resampled.shape)
    for k, group in enumerate(groups):
        # Instances are drawn anew for each place: a class that is drawn twice is not the same sample twice.
        places = drawn == k
        resampled[places] = group[generator.integers(len(group), size=(places.sum(), len(group)))].mean(1)
    low, high = np.quantile(resampled.mean(1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def delta_aupc(whole: Values, disentangled: Values, classes: Labels[Label]) -> dict[Label, float]:
    """ΔAUPC(U) = AUPC(I, K = 1) − AUPC(U) of each class, the most disentangled class first (Note G).

    Parameters
    ----------
    whole, disentangled : tensor or sequence, shape (N,)
        AUPC of each image with the standard map, and with the K maps.
    classes : tensor, array or sequence, length N
    """
    before, after = _by_class(whole, classes, "whole"), _by_class(disentangled, classes, "disentangled")
    gains = {label: float(before[label].mean() - after[label].mean()) for label in before}
    return dict(sorted(gains.items(), key=lambda item: item[1], reverse=True))


def _by_class(
    values: Values, classes: Labels[Label], name: str = "values"
) -> dict[Label, np.ndarray[Any, Any]]:
    # Elements of a tensor are different objects with different hashes: each would be a class.
    labels = as_hashable_labels(classes, "classes")
    tensor = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    if tensor.shape != (len(labels),) or not labels:
        raise ValueError(
            f"{name} must be one number for each of the {len(labels)} instances, at least 1, got shape "
            f"{tuple(tensor.shape)}"
        )
    check_finite(tensor, name)
    groups: dict[Any, list[float]] = {}
    for label, value in zip(labels, tensor.tolist(), strict=True):
        groups.setdefault(label, []).append(value)
    return {label: np.array(group) for label, group in groups.items()}
