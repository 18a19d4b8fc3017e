"""Are the concepts stable? Fits from other starts and other images, matched concept by concept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..checks import Seed, as_float, as_int, as_seed, full_precision
from ..pairs import Pairs
from ..subspaces import Subspaces
from .agreement import correlations, match
from .drsa import DRSA
from .estimator import learn_subspaces
from .repeated import NoRelevanceError, Repeated, Run, mean_of_finite
from .resampling import with_shuffled_contexts

#: From which index on a concept is stable.
THRESHOLD = 0.75
#: How far the objective must exceed that of shuffled contexts, as a part of the latter. Shuffles of 30 images
#: differ by some 5 % (standard deviation).
MARGIN = 0.15
#: Correlation of the relevance of two concepts above which they are parts of one.
OVERLAP = 0.0
#: Tolerance of the finish on all pairs: the start is good, and what is left to gain is no other concept.
FINAL_TOL = 1e-4
#: Fewer images are nothing to draw from.
FEWEST_IMAGES = 5
#: Fits of each shuffle, at most: shuffles differ more than the fits of one.
NULL_FITS = 2


@dataclass(frozen=True)
class Stability:
    """How far K concepts come back in other fits.

    Attributes
    ----------
    subspaces : Subspaces
        The centrotype: the run that agrees best with all others, finished on all pairs. Its metadata hold
        `index` and `threshold` under "stability".
    index : tensor, shape (K,)
        Stability of each concept of `subspaces`: the correlation of its relevance with that of its partner in
        another run, mean over runs. 1: it always comes back.
    null : tensor, shape (n_shuffles, K)
        The same indices where the contexts are those of other images, ascending. They are far from 0:
        activations and contexts have a structure of their own.
    threshold : float
        From which index on a concept is stable.
    margin : float
        How far the objective must exceed that of shuffled contexts, as a part of the latter.
    agreement : tensor, shape (n_runs − 1, K)
        What `index` is the mean of: a row for each other run.
    objective, held_out_objective : float
        J on the images of a fit and on those left out by its bootstrap, means over runs. NaN if none could be
        left out, as one image holds nearly all evidence: then no concept counts as stable.
    null_objective : float
        J of shuffled contexts on the images left out of a fit, mean over runs: of the best shuffle.
    relevance : tensor, shape (N, K)
        Positive R_k of the concepts at all pairs, scaled as the solver sees them: for comparisons of fits.
    seconds : float
        Time that it took.
    """

    subspaces: Subspaces
    index: Tensor
    null: Tensor
    threshold: float
    margin: float
    agreement: Tensor
    objective: float
    held_out_objective: float
    null_objective: float
    relevance: Tensor
    seconds: float

    @property
    def n_subspaces(self) -> int:
        """Number of concepts K."""
        return len(self.index)

    @property
    def is_stable(self) -> tuple[bool, ...]:
        """For each concept whether its index reaches the threshold, in data that beat chance.

        A concept that is not stable deserves no name.
        """
        return tuple(self.beats_chance and index >= self.threshold for index in self.index.tolist())

    @property
    def beats_chance(self) -> bool:
        """Whether activations meet more relevance in their own contexts than in those of other images.

        Shuffled data may have stable directions as well: activations and contexts each have theirs. But only
        if an image's contexts belong to it is the objective higher than for shuffled ones.
        """
        # Both on images left out: on those of a fit, few images are fitted well whatever their contexts.
        return 0 < self.held_out_objective >= (1 + self.margin) * self.null_objective

    @property
    def all_stable(self) -> bool:
        """Whether every concept is stable."""
        return all(self.is_stable)

    @property
    def overlap(self) -> float:
        """Largest correlation of the relevance of two concepts; −1 for a single one.

        Different concepts exclude each other: where one is, another is less likely, and the correlation is
        negative. If it is positive, two of them are at the same places and are parts of one concept.
        """
        similarity = correlations(self.relevance, self.relevance)
        return float(similarity.fill_diagonal_(-1).max())

    @property
    def are_distinct(self) -> bool:
        """Whether no two concepts are parts of one."""
        return self.overlap <= OVERLAP

    def __str__(self) -> str:
        width = max(len(name) for name in self.subspaces.names)
        rows = [
            f"{name:{width}}  {index:.3f}  {'stable' if stable else 'NOT STABLE'}"
            for name, index, stable in zip(
                self.subspaces.names, self.index.tolist(), self.is_stable, strict=True
            )
        ]
        n_runs = len(self.agreement) + 1
        verdict = "" if self.beats_chance else ": NO BETTER THAN CHANCE"
        if self.held_out_objective != self.held_out_objective:  # NaN: there are no images to leave out
            verdict = ": NOT KNOWN, AS ONE IMAGE HOLDS NEARLY ALL EVIDENCE"
        return "\n".join(
            [
                f"{self.n_subspaces} concepts over {n_runs} fits; 1 always comes back, stable from "
                f"{self.threshold:.2f} on",
                *rows,
                f"objective on images left out {self.held_out_objective:.2f}, with shuffled contexts "
                f"{self.null_objective:.2f}{verdict}",
            ]
        )


@full_precision()
def stability(
    pairs: Pairs,
    n_subspaces: int = 4,
    *,
    solver: DRSA | None = None,
    n_bootstraps: int = 5,
    n_starts: int = 1,
    n_shuffles: int = 2,
    threshold: float = THRESHOLD,
    margin: float = MARGIN,
    random_state: Seed = 0,
    progress: bool | None = None,
) -> Stability:
    """Fit K subspaces again and again, and see which concepts come back.

    Parameters
    ----------
    pairs : Pairs
        With the image of each pair: images are drawn with replacement, not pairs.
    n_subspaces : int
        Number K of concepts.
    solver : DRSA, optional
        Its `q`, `balance` and `n_init` are used; its number of subspaces is not. Default `DRSA()`.
    n_bootstraps, n_starts : int
        Fits on bootstraps over images, and fits on all images. Each has random starts of its own.
    n_shuffles : int
        How many times contexts are shuffled over images, for the null. Each has up to two fits.
    threshold : float
        From which index on a concept is stable, up to 1.
    margin : float
        How far the objective on images left out must exceed that of shuffled contexts, as a part of the
        latter: otherwise no concept is stable.
    random_state : int, optional
        Seed of everything. The same seed gives the same result; None draws a new one.
    progress : bool, optional
        Show a progress bar. Default: on a terminal.

    Returns
    -------
    Stability

    Examples
    --------
    >>> images = torch.rand(12, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    >>> pairs = collect(model, composite, "features.22", [images], target=430, random_state=0)
    >>> result = stability(pairs, 2, n_bootstraps=2)
    >>> result.subspaces.dims, len(result.index)
    ((4, 4), 2)
    """
    begin = time.perf_counter()
    n_subspaces = as_int(n_subspaces, "n_subspaces", 1)
    n_bootstraps, n_starts = as_int(n_bootstraps, "n_bootstraps", 1), as_int(n_starts, "n_starts", 0)
    n_shuffles, margin = as_int(n_shuffles, "n_shuffles", 1), as_float(margin, "margin", 0)
    threshold = as_float(threshold, "threshold", 0, 1)
    if n_bootstraps + n_starts < 2:
        raise ValueError("stability compares fits: n_bootstraps + n_starts must be at least 2")
    check_images(pairs)
    solver = _checked_solver(DRSA() if solver is None else solver)
    repeated = Repeated(pairs, n_subspaces, solver)
    generator = np.random.default_rng(as_seed(random_state))
    resampled = [True] * n_bootstraps + [False] * n_starts
    total = number_of_fits(n_bootstraps, n_starts, n_shuffles)
    hidden = None if progress is None else not progress
    with tqdm(total=total, desc=f"stability, K = {n_subspaces}", disable=hidden, leave=False) as bar:

        def fits(repeated: Repeated, resampled: Sequence[bool] = resampled) -> list[Run]:
            runs = []
            for is_resampled in resampled:
                runs.append(repeated.fit(is_resampled, generator))
                bar.update()
            return runs

        runs = fits(repeated)
        null: list[list[Run]] = []
        for _ in range(n_shuffles):
            shuffled = with_shuffled_contexts(pairs, generator)
            try:
                null.append(fits(Repeated(shuffled, n_subspaces, solver), resampled[:NULL_FITS]))
            except NoRelevanceError:
                null.append([])  # activations never meet contexts of other images: chance has no concepts
    return _summary(pairs, solver, repeated, runs, null, threshold, margin, as_seed(random_state), begin)


def number_of_fits(n_bootstraps: int = 5, n_starts: int = 1, n_shuffles: int = 2) -> int:
    """How many fits `stability` makes, those of shuffled contexts included."""
    n_runs = n_bootstraps + n_starts
    return n_runs + n_shuffles * min(n_runs, NULL_FITS)


def check_images(pairs: Pairs) -> None:
    """Raise unless the pairs come from enough images to draw from."""
    if not isinstance(pairs, Pairs):
        raise TypeError(
            f"stability needs Pairs, which know the image of each pair, got {type(pairs).__name__}; use "
            "Pairs(a, c, image)"
        )
    n_images = len(torch.unique(pairs.image))
    if n_images < FEWEST_IMAGES:
        raise ValueError(
            f"stability draws images with replacement and needs pairs of at least {FEWEST_IMAGES}, got "
            f"{n_images}; give Pairs(a, c, image) the number of each pair's image, or collect more images"
        )


def _checked_solver(solver: DRSA) -> DRSA:
    """Raise unless it is DRSA: what is repeated is DRSA, whatever the solver is called."""
    if not isinstance(solver, DRSA):
        raise TypeError(f"solver must be a DRSA, whose parameters are used, got {type(solver).__name__}")
    if solver._ignores_contexts:
        raise TypeError(
            f"solver must be a DRSA, got {type(solver).__name__}, which ignores contexts; give DRSA() and "
            "Pairs(pairs.a, pairs.a, pairs.image)"
        )
    solver._checked_parameters()  # before anything is fitted, and with one sentence for each mistake
    return solver


def _summary(
    pairs: Pairs,
    solver: DRSA,
    repeated: Repeated,
    runs: Sequence[Run],
    null: Sequence[Sequence[Run]],
    threshold: float,
    margin: float,
    seed: int | None,
    begin: float,
) -> Stability:
    chosen = centrotype([run.relevance for run in runs])
    others = [run for i, run in enumerate(runs) if i != chosen]
    # On all pairs and in all directions: what the user's solver finds from there.
    parameters = solver.get_params() | {"n_subspaces": runs[0].relevance.shape[1], "dims": None}
    if solver.tol is None:
        parameters["tol"] = FINAL_TOL
    finished = _FromStart(DRSA(**parameters | {"random_state": seed}), repeated.lift(runs[chosen].basis))
    subspaces = learn_subspaces(finished, pairs)
    relevance, of_runs = repeated.relevance(subspaces)
    agreement = torch.stack([match(of_runs, run.relevance)[1] for run in others])
    index = agreement.mean(0)
    of_null = torch.stack(
        [_index(shuffled).sort().values if shuffled else torch.zeros_like(index) for shuffled in null]
    )
    by_chance = [mean_of_finite([run.held_out for run in shuffled]) if shuffled else 0.0 for shuffled in null]
    metadata = {"index": index.tolist(), "threshold": threshold, "n_runs": len(runs)}
    return Stability(
        subspaces=subspaces.with_metadata(stability=metadata, history=finished.history),
        index=index,
        null=of_null,
        threshold=threshold,
        margin=margin,
        agreement=agreement,
        objective=mean_of_finite([run.objective for run in runs]),
        held_out_objective=mean_of_finite([run.held_out for run in runs]),
        null_objective=max((value for value in by_chance if value == value), default=float("nan")),
        relevance=relevance,
        seconds=time.perf_counter() - begin,
    )


def _index(runs: Sequence[Run]) -> Tensor:
    """Indices of the centrotype of some runs, shape (K,)."""
    chosen = centrotype([run.relevance for run in runs])
    others = [run for i, run in enumerate(runs) if i != chosen]
    return torch.stack([match(runs[chosen].relevance, run.relevance)[1] for run in others]).mean(0)


def centrotype(relevances: Sequence[Tensor]) -> int:
    """The run whose concepts agree best with those of all others, by the mean correlation of partners.

    Parameters
    ----------
    relevances : sequence of tensor, shape (N, K)
        R_k of each run at the same pairs.
    """
    n = len(relevances)
    similarity = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(i):
            similarity[i, j] = similarity[j, i] = match(relevances[i], relevances[j])[1].mean()
    return int(similarity.sum(1).argmax())


class _FromStart:
    """A solver with its start, as `learn_subspaces` takes it."""

    def __init__(self, solver: DRSA, start: Tensor) -> None:
        self._solver, self._start = solver, start

    @property
    def subspaces_(self) -> Subspaces:
        """What was learned."""
        return self._solver.subspaces_

    @property
    def history(self) -> list[float]:
        """Objective along the fit."""
        return [float(value) for value in self._solver.history_]

    def fit(self, a: Tensor, c: Tensor) -> None:
        """Learn from the start."""
        self._solver.fit(a, c, init=self._start)
