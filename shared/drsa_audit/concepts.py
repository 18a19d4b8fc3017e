"""Concepts from pairs: how many, which, whether they come back, and what taking them out does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from drsa_core import DRSA, DSA, PCA, Pairs, RandomSubspaces, Stability, Subspaces, choose_k, stability
from drsa_core.evaluation import concept_ablation
from drsa_core.prca import learn_subspaces
from drsa_core.stability import FEWEST_IMAGES, Repeated, number_of_fits
from torch import Tensor

from .backends import repeatable
from .errors import BadInput
from .session import Session

AUTO = "auto"
#: Numbers of concepts that "auto" tries.
TRIED = range(2, 17)
#: Other ways to find as many subspaces, which a good one should surpass.
OTHERS: dict[str, Callable[[int, int, Pairs], Subspaces]] = {
    "DSA": lambda k, seed, pairs: DSA(k, random_state=seed).fit(pairs).subspaces_,
    # `PCA(k)` is one subspace of k dimensions, and the rest: the k first components are k subspaces.
    "PCA": lambda k, seed, pairs: Subspaces(PCA().fit(pairs).basis_[:, :k], [1] * k),
    "random": lambda k, seed, pairs: RandomSubspaces(k, random_state=seed).fit(pairs).subspaces_,
}


@dataclass(frozen=True)
class Learned:
    """The concepts, and what is known of them.

    Attributes
    ----------
    subspaces : Subspaces
    history : list of float
        Objective along the fit.
    stability : dict or None
        `index`, `is_stable`, `beats_chance`, `threshold`, `null_mean`; None if it was not tested.
    choice : dict or None
        Why there are so many: `best`; `is_chosen`, False if no K had stable and distinct concepts; for each K
        `n_subspaces`, `index` of its least stable concept, `threshold`, `overlap`, `held_out` and
        `null_objective`; `splits`, the parents of the concepts of each next K. None if the user said how
        many.
    """

    subspaces: Subspaces
    history: list[float]
    stability: dict[str, Any] | None = None
    choice: dict[str, Any] | None = None


def learn(session: Session, pairs: Pairs, n_subspaces: int | str, balance: float, repeat: bool) -> Learned:
    """Learn K concepts, or as many as are stable.

    Parameters
    ----------
    session : Session
        Whose seed and progress are used.
    pairs : Pairs
    n_subspaces : int or "auto"
    balance : float
        As in `DRSA`.
    repeat : bool
        Whether to repeat the fit on other images and from other starts, to see which concepts come back.
    """
    n_images, n_features = len(torch.unique(pairs.image)), pairs.a.shape[1]
    solver, shown = DRSA(balance=balance), session.progress.shown
    if n_subspaces == AUTO:
        if n_images < FEWEST_IMAGES:
            raise BadInput(f"--subspaces auto needs at least {FEWEST_IMAGES} images to learn from")
        tried = [k for k in TRIED if k <= n_features // 2]
        choice = choose_k(pairs, tried, solver=solver, random_state=session.seed, progress=shown)
        best = choice.stability
        if best is None:
            best = max(choice.candidates, key=lambda c: float(c.index.min()) - c.threshold)
            session.progress.note(
                f"no number of concepts from {tried[0]} to {tried[-1]} gives concepts that are all stable; "
                f"shown are the {best.n_subspaces} that come closest"
            )
        return _learned(
            best,
            {
                "best": best.n_subspaces,
                "is_chosen": choice.n_subspaces is not None,
                "n_subspaces": [c.n_subspaces for c in choice.candidates],
                "index": [float(c.index.min()) for c in choice.candidates],
                "threshold": [c.threshold for c in choice.candidates],
                "overlap": [c.overlap for c in choice.candidates],
                "held_out": [c.held_out_objective for c in choice.candidates],
                "null_objective": [c.null_objective for c in choice.candidates],
                "splits": [list(split.parent) for split in choice.splits],
            },
        )
    if not isinstance(n_subspaces, int) or not 1 <= n_subspaces <= n_features:
        raise BadInput(f"--subspaces must be 'auto' or a number from 1 to {n_features}, got {n_subspaces}")
    if repeat and n_images < FEWEST_IMAGES:
        session.progress.note(f"with {n_images} images it cannot be tested whether concepts are stable")
    if repeat and n_images >= FEWEST_IMAGES:
        found = stability(pairs, n_subspaces, solver=solver, random_state=session.seed, progress=shown)
        return _learned(found, None)
    solver = DRSA(n_subspaces, balance=balance, random_state=session.seed, progress=shown)
    return Learned(learn_subspaces(solver, pairs), [float(value) for value in solver.history_])


def learning_seconds(pairs: Pairs, n_subspaces: int | str, balance: float, repeat: bool) -> float:
    """About how long `learn` takes, from the time of one small fit."""
    tried = [k for k in TRIED if k <= pairs.a.shape[1] // 2] if n_subspaces == AUTO else []
    k = tried[len(tried) // 2] if tried else int(n_subspaces)
    begin = time.perf_counter()
    Repeated(pairs, k, DRSA(balance=balance)).fit(True, np.random.default_rng(0))
    one = time.perf_counter() - begin
    # The last fit, on all pairs and in all directions, takes about as long as three small ones.
    return one * ((number_of_fits() if tried or repeat else 0) + 3) * max(1, len(tried))


def take_out(session: Session, inputs: Tensor, subspaces: Subspaces, pairs: Pairs | None) -> dict[str, Any]:
    """What the score loses with each concept, against its relevance, as JSON; also for other subspaces.

    Others are learned from the pairs, if there are any, and compared where a context costs little (LRP and
    gradients). A correlation that is not defined, such as that of one concept within an image, is None.
    """
    target, size = session.target.output, session.batch_size
    explainer = session.backend.explainer(subspaces)
    with repeatable():
        found = concept_ablation(explainer, inputs, target, batch_size=size)
    others: dict[str, float | None] = {}
    if pairs is not None and session.choice.backend in ("lrp", "gxi"):
        for name, find in OTHERS.items():
            other = find(subspaces.n_subspaces, session.seed, pairs)
            of_other = concept_ablation(explainer, inputs, target, other, batch_size=size).correlation
            others[name] = _or_none(of_other)
    return {
        "relevance": found.relevance.tolist(),
        "drop": found.drop.tolist(),
        "correlation": _or_none(found.correlation),
        "within_images": _or_none(found.correlation_within_images),
        "others": others,
    }


def _or_none(value: float) -> float | None:
    """None for NaN, which JSON does not have."""
    return None if math.isnan(value) else value


def _learned(found: Stability, choice: dict[str, Any] | None) -> Learned:
    about = {
        "index": found.index.tolist(),
        "is_stable": [bool(stable) for stable in found.is_stable],
        "beats_chance": bool(found.beats_chance),
        "threshold": found.threshold,
        "null_mean": float(found.null.mean()),
    }
    history = found.subspaces.metadata.get("history", [])
    return Learned(found.subspaces, [float(value) for value in history], about, choice)
