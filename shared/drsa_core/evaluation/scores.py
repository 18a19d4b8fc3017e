"""Scores of concept maps (Note F.1), prototypes (Note E.2), and concept maps for the metrics of Quantus.

The features p = 1 … P of Note F are pixels here: relevance is summed over colour channels first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..checks import HALF, Seed, as_int, as_seed, check_finite
from ..objective import generalised_mean
from ..pairs import Pairs
from ..subspaces import Subspaces
from .flipping import check_maps


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
    """Σ_p max_k R_pk − max_k Σ_p R_pk, shape (N,). 0 if one concept is the largest everywhere, e.g. K = 1.

    Parameters
    ----------
    maps : tensor, shape (N, K, C, H, W)
        As in `total_relevance`.
    """
    pixels = _pixels(maps)
    return pixels.amax(1).sum(1) - pixels.sum(2).amax(1)


def peakness(maps: Tensor) -> Tensor:
    """Σ_k max_p R_pk, shape (N,).

    Parameters
    ----------
    maps : tensor, shape (N, K, C, H, W)
        As in `total_relevance`.
    """
    return _pixels(maps).amax(2).sum(1)


def _pixels(maps: Tensor) -> Tensor:
    """Relevance (N, K, P) in float64: sums over 50 000 pixels need the digits."""
    return check_maps(maps).double().sum(2).flatten(2)


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
    n_candidates = as_int(n_candidates, "n_candidates", 1)
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
    >>> function(model, images.numpy(), labels.numpy()).shape
    (2, 1, 32, 32)
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
