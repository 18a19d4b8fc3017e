"""Subspace methods of section 5 and Note F, and what is read from the maps of their blocks.

Explanations are linear in the filtered context: the map of a union of blocks is the sum of their maps. One
explanation of fine blocks therefore gives several readings, e.g. PRCA at d = 1, 2, 4 from blocks of 1, 1, 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from drsa_core import (
    DRSA,
    DSA,
    PCA,
    PRCA,
    MaxRel,
    Pairs,
    RandomSubspaces,
    Subspaces,
    ibd_subspaces,
    netdissect_subspaces,
)

from .peers import ICA, NMF, Channels, Directions, KMeansDirections, SparseDictionary

SINGLE = ("max-rel", "pca", "prca")  # methods for one subspace of d dimensions
LEARNED = ("drsa", "drsa-balanced", "dsa")  # K subspaces of D/K dimensions
PEERS: dict[str, type[Directions]] = {
    "nmf": NMF,
    "ica": ICA,
    "kmeans": KMeansDirections,
    "channels": Channels,
    "dictionary": SparseDictionary,
}
LINES = ("drsa-lines", *PEERS)  # K subspaces of one dimension


@dataclass(frozen=True)
class Reading:
    """One evaluation: a method with K concepts, each the sum of the blocks in its group.

    `dims` is d for a single subspace and None for K subspaces of D/K dimensions.
    """

    method: str
    n_subspaces: int
    dims: int | None
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Job:
    """One fit, one explanation, and the readings of it."""

    name: str
    seed: int
    fit: Callable[[Pairs], Subspaces]
    readings: tuple[Reading, ...]


def of_concepts(job: Job) -> Reading:
    """The reading of the K concepts, not that of a part or the sum of them."""
    return max(job.readings, key=lambda reading: reading.n_subspaces)


def single_job(method: str, dims: list[int], seed: int) -> Job:
    """One subspace of d dimensions for each d in `dims`, ascending: nested blocks."""
    steps = [d - previous for previous, d in zip([0, *dims], dims, strict=False)]

    def fit(pairs: Pairs) -> Subspaces:
        solver: Any
        if method == "random":
            solver = RandomSubspaces(dims=[dims[-1]], random_state=seed)
        else:
            solver = {"max-rel": MaxRel, "pca": PCA, "prca": PRCA}[method](n_components=dims[-1])
        basis = solver.fit(pairs).subspaces_.basis[:, : dims[-1]]
        return Subspaces(basis, steps)

    readings = tuple(Reading(method, 1, d, (tuple(range(i + 1)),)) for i, d in enumerate(dims))
    return Job(f"{method}-d{'_'.join(map(str, dims))}-s{seed}", seed, fit, readings)


def random_job(n_subspaces: int, seed: int) -> Job:
    """Random subspaces: the first column alone for d = 1, and K blocks of D/K columns."""

    def fit(pairs: Pairs) -> Subspaces:
        found = RandomSubspaces(n_subspaces, random_state=seed).fit(pairs).subspaces_
        return Subspaces(found.basis, [1, found.dims[0] - 1, *found.dims[1:]])

    readings = (
        Reading("random", 1, 1, ((0,),)),
        Reading("random", n_subspaces, None, ((0, 1), *((k,) for k in range(2, n_subspaces + 1)))),
    )
    return Job(f"random-k{n_subspaces}-s{seed}", seed, fit, readings)


def learned_job(method: str, n_subspaces: int, seed: int, with_whole: bool = False) -> Job:
    """K subspaces that a solver learns; `with_whole` also reads the sum of all, U = I_D with K = 1.

    Parameters
    ----------
    method : str
        One of `LEARNED`: blocks of D/K dimensions that make up the whole, or of `LINES`: K directions, whose
        residual is left out.
    """

    def fit(pairs: Pairs) -> Subspaces:
        solver = _solver(method, n_subspaces, seed)
        found: Subspaces = solver.fit(pairs).subspaces_
        if method in LINES:  # without the residual
            return found.select(range(n_subspaces))
        return found.with_metadata(history=solver.history_)

    concepts = tuple((k,) for k in range(n_subspaces))
    readings = [Reading(method, n_subspaces, None, concepts)]
    if with_whole:
        readings.append(Reading("whole", 1, None, (tuple(range(n_subspaces)),)))
    return Job(f"{method}-k{n_subspaces}-s{seed}", seed, fit, tuple(readings))


def _solver(method: str, n_subspaces: int, seed: int) -> Any:
    if method == "dsa":
        return DSA(n_subspaces, random_state=seed)
    if method == "drsa-lines":
        return DRSA(dims=[1] * n_subspaces, random_state=seed)
    if method in PEERS:
        return PEERS[method](n_subspaces, random_state=seed)
    if method not in LEARNED:
        raise ValueError(f"method must be one of {', '.join((*LEARNED, *LINES))}, got {method!r}")
    return DRSA(n_subspaces, random_state=seed, balance=1.0 if method == "drsa-balanced" else 0.0)


def labelled_job(method: str, file: Path, n_subspaces: int) -> Job:
    """NetDissect's tally (CSV) or IBD's concept vectors (.npy, (K, D)), the K most relevant concepts."""

    def fit(pairs: Pairs) -> Subspaces:
        if method == "netdissect":
            return netdissect_subspaces(file, pairs.a, pairs.c, n_subspaces)
        if not file.exists():
            raise ValueError(f"there are no concept vectors in {file}")
        everything = ibd_subspaces(np.load(file, allow_pickle=False).astype(np.float32), residual=False)
        order = everything.relevance(pairs.a, pairs.c).mean(0).argsort(descending=True)
        return everything.select(order[:n_subspaces].tolist())

    concepts = tuple((k,) for k in range(n_subspaces))
    return Job(f"{method}-k{n_subspaces}", 0, fit, (Reading(method, n_subspaces, None, concepts),))
