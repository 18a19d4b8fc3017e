"""Images that stand for the subspaces (Note E.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..checks import Seed, as_float, as_float_tensor, as_int, as_seed, check_finite, unit_scale, unscaled
from ..objective import generalised_mean
from ..pairs import Pairs
from ..subspaces import Subspaces


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
    n_prototypes = as_int(n_prototypes, "n_prototypes", 1)
    n_candidates = as_int(n_candidates, "n_candidates", 1)
    q, seed = as_float(q, "q"), as_seed(random_state)
    numbers, row_image = torch.unique(pairs.image, return_inverse=True)
    if n_prototypes > len(numbers):
        raise ValueError(
            f"n_prototypes must be at most the {len(numbers)} images of the pairs, got {n_prototypes}"
        )
    (a, of_a), (c, of_c) = unit_scale(pairs.a), unit_scale(pairs.c)
    relevance = subspaces.relevance(a, c).double().clamp(min=0).cpu()
    # M² over the rows of a subset needs the sums of squares and the number of rows of its images only.
    squares = torch.zeros(len(numbers), subspaces.n_subspaces, dtype=torch.float64)
    squares.index_add_(0, row_image, relevance.square())
    rows = torch.bincount(row_image, minlength=len(numbers)).double()
    generator = np.random.default_rng(seed)
    best: tuple[float, Tensor] | None = None
    for _ in range(n_candidates):
        subset = torch.from_numpy(generator.choice(len(numbers), n_prototypes, replace=False))
        block_means = (squares[subset].sum(0) / rows[subset].sum()).sqrt()
        value, _ = generalised_mean(block_means, q)
        if best is None or value > best[0]:
            best = value, subset
    if best is None or best[0] == 0:
        raise ValueError(
            "no subset of the images has positive relevance in the subspaces; check target and contexts"
        )
    objective = unscaled(torch.tensor(best[0], dtype=torch.float64), of_a + of_c, "the objective")
    return Prototypes(sorted(numbers[best[1]].tolist()), float(objective))


def top_images(relevance: Tensor, n_images: int = 6) -> Tensor:
    """The images in which each subspace is most relevant, shape (K, n), best first; ties in their order.

    Parameters
    ----------
    relevance : tensor, shape (N, K)
        R_k of each image, e.g. from `concept_relevance`.
    n_images : int
        How many for each subspace.
    """
    relevance = as_float_tensor(relevance, "relevance")
    if relevance.ndim != 2 or 0 in relevance.shape:
        raise ValueError(f"relevance must have shape (n_images, n_subspaces), got {tuple(relevance.shape)}")
    check_finite(relevance, "relevance")
    n_images = as_int(n_images, "n_images", 1)
    if n_images > len(relevance):
        raise ValueError(f"n_images must be at most the {len(relevance)} images, got {n_images}")
    return relevance.argsort(dim=0, descending=True, stable=True)[:n_images].T
