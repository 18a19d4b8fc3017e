"""Scores of concept maps and prototypes (Notes F.1, E.2), maps for Quantus, statistics over classes (Note G).

The features p = 1 … P of Note F are pixels here: relevance is summed over colour channels first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..checks import HALF, Seed, as_float, as_hashable_labels, as_int, as_seed, check_finite
from ..objective import generalised_mean
from ..pairs import Pairs
from ..subspaces import Subspaces
from .flipping import check_maps

Label = TypeVar("Label", bound=Hashable)
Values: TypeAlias = "Tensor | np.ndarray[Any, Any] | Sequence[float]"
#: One label for each instance.
Labels: TypeAlias = "Sequence[Label] | Tensor | np.ndarray[Any, Any]"


# ------------------------------------------------------------------ scores of maps


def total_relevance(maps: Tensor) -> Tensor:
    """Σ_p R_pk, shape (N, K): for a single subspace U the total relevance that PRCA maximises (Note F.1).

    For Shapley values and Integrated Gradients it is known without maps (Note B.3):
    `DisentangledAttribution.exact_totals`.

    Parameters
    ----------
    maps : tensor, shape (N, K, C, H, W)
        `token_maps` (N, K, h, w) as `token_maps[:, :, None]`, one map (N, C, H, W) as `maps[:, None]`.
    """
    return _pixels(maps).sum(2)


def separability(maps: Tensor) -> Tensor:
    """Σ_p max_k R_pk − max_k Σ_p R_pk, shape (N,), of maps as in `total_relevance`.

    0 if one concept is the largest everywhere, e.g. for K = 1.
    """
    pixels = _pixels(maps)
    return pixels.amax(1).sum(1) - pixels.sum(2).amax(1)


def peakness(maps: Tensor) -> Tensor:
    """Σ_k max_p R_pk, shape (N,), of maps as in `total_relevance`."""
    return _pixels(maps).amax(2).sum(1)


def _pixels(maps: Tensor) -> Tensor:
    """Relevance (N, K, P) in float64: sums over 50 000 pixels need the digits."""
    return check_maps(maps).double().sum(2).flatten(2)


def explain_func(
    attribute: Callable[[nn.Module, Tensor, Tensor], Tensor], concept: int | None = None
) -> Callable[..., np.ndarray[Any, Any]]:
    """An `explain_func` for the metrics of Quantus from a function that gives K concept maps.

    Parameters
    ----------
    attribute : callable
        (model, inputs (N, C, H, W), targets (N,)) ↦ maps (N, K, C, H, W). It must explain the model that it
        is given: some metrics of Quantus hand in one with other weights.
    concept : int, optional
        Which concept to explain. Default: the sum of all concepts, the standard map of complete subspaces.
        Quantus' `explain_func_kwargs={"concept": k}` overrides it.

    Returns
    -------
    callable
        With Quantus' signature; attributions are summed over colour channels, shape (N, 1, H, W), in float32
        for half precision.

    Examples
    --------
    `quantus.RegionPerturbation()(model, x, y, explain_func=function)` is then the metric of concept 2.

    >>> def attribute(model, x, y):
    ...     attributor = DisentangledAttributor(Gradient(model, composite), "features.22", subspaces)
    ...     return attributor.explain(x, y, whole=False).maps
    >>> function = explain_func(attribute, concept=2)
    """
    default = concept

    def explain(model: nn.Module, inputs: Any, targets: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        # Quantus adds keywords (device, …) which say nothing about the concept.
        concept = kwargs.get("concept", default)
        parameter = next(model.parameters(), torch.empty(0))
        x = torch.as_tensor(inputs).to(parameter)
        y = torch.as_tensor(targets).long().reshape(-1).to(x.device)
        maps = check_maps(attribute(model, x, y), x)
        if maps.dtype in HALF:
            maps = maps.float()  # sums need the digits, and NumPy has no bfloat16
        if concept is not None:
            k = as_int(concept, "concept, if not None,", 0, maps.shape[1] - 1)
            maps = maps[:, k : k + 1]
        return maps.sum((1, 2))[:, None].cpu().numpy()

    return explain


# ------------------------------------------------------------------ images that stand for concepts


@dataclass(frozen=True)
class Prototypes:
    """The chosen images.

    Attributes
    ----------
    images : list of int
        Their numbers, ascending.
    objective : float
        DRSA objective of these images, on the pairs as they are (not normalised).
    """

    images: list[int]
    objective: float


def select_prototypes(
    pairs: Pairs,
    subspaces: Subspaces,
    n_prototypes: int = 6,
    n_candidates: int = 1000,
    q: float = 0.5,
    random_state: Seed = None,
) -> Prototypes:
    """The n images, of random subsets of that size, that express all subspaces best (Note E.2).

    A subset is scored by the DRSA objective M^q_k [M²_n [R⁺_kn]] of its activations and contexts: a soft
    minimum over subspaces, so that no subspace is left without an image.

    Parameters
    ----------
    pairs : Pairs
        Activations and contexts, with the number of their image; all positions, or some of each image.
    subspaces : Subspaces
        As learned by DRSA.
    n_prototypes : int
        Size n of the subsets.
    n_candidates : int
        Number of random subsets. The paper takes 1 000.
    q : float
        As in `DRSA`.
    random_state : int, optional
        Seed of the subsets.
    """
    numbers, row_image = torch.unique(pairs.image, return_inverse=True)
    n_prototypes = as_int(n_prototypes, "n_prototypes", 1, len(numbers))
    relevance = subspaces.relevance(pairs.a.double(), pairs.c.double()).clamp(min=0).cpu()
    # M² over the rows of a subset needs the sums of squares and the number of rows of its images only.
    squares = torch.zeros(len(numbers), subspaces.n_subspaces, dtype=torch.float64)
    squares.index_add_(0, row_image, relevance.square())
    rows = torch.bincount(row_image, minlength=len(numbers)).double()
    generator = np.random.default_rng(as_seed(random_state))
    best, images = 0.0, torch.empty(0)
    for _ in range(n_candidates):
        subset = torch.from_numpy(generator.choice(len(numbers), n_prototypes, replace=False))
        value, _ = generalised_mean((squares[subset].sum(0) / rows[subset].sum()).sqrt(), q)
        if value > best:
            best, images = value, numbers[subset]
    if best == 0:
        raise ValueError(
            "no subset of the images has positive relevance in the subspaces; check target and contexts"
        )
    return Prototypes(sorted(images.tolist()), best)


def top_images(relevance: Tensor, n_images: int = 6) -> Tensor:
    """The images in which each subspace is most relevant, shape (K, n), best first; ties in their order.

    Parameters
    ----------
    relevance : tensor, shape (N, K)
        R_k of each image, e.g. from `concept_relevance`.
    n_images : int
        How many for each subspace.
    """
    if relevance.ndim != 2:
        raise ValueError(f"relevance must have shape (n_images, n_subspaces), got {tuple(relevance.shape)}")
    check_finite(relevance, "relevance")
    n_images = as_int(n_images, "n_images", 1, len(relevance))
    return relevance.argsort(dim=0, descending=True, stable=True)[:n_images].T


# ------------------------------------------------------------------ statistics


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
    classes, level, n_resamples, random_state
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
        Class of each instance.
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
