"""Which concepts come back in other fits, and how many there are.

Concepts of two fits are matched one to one by the correlation of their relevance R_k over pairs. Overlap of
the subspaces would understate how far two fits agree: blocks of D/K dimensions hold many directions in which
nothing happens, and two fits share them out at random.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from tqdm.auto import tqdm

from .checks import Seed, as_float, as_int, as_seed, full_precision
from .drsa import DRSA
from .objective import Objective, prepared
from .optimizers import COARSE_TOL, Budget, from_random_starts, leading_part, roughly
from .pairs import Pairs
from .prca import block_sizes
from .subspaces import Subspaces

#: From which index on a concept is stable.
THRESHOLD = 0.75
#: How far the objective on images left out must exceed that of shuffled contexts, as a part of the latter.
#: Shuffles of 30 images differ by some 5 % (standard deviation).
MARGIN = 0.15
#: Correlation of the relevance of two concepts above which they are parts of one.
OVERLAP = 0.0
#: Tolerance of the finish on all pairs: the start is good, and what is left to gain is no other concept.
FINAL_TOL = 1e-4
#: Fewer images are nothing to draw from.
FEWEST_IMAGES = 5
#: Fits of each shuffle, at most: shuffles differ more than the fits of one.
NULL_FITS = 2
#: Part of the weighted energy that the directions of a fit hold, and of Σ_n R_n² that its pairs hold.
ENERGY, EVIDENCE = 0.95, 0.95
#: Random starts of each fit, of which the best is kept, and iterations of each.
STARTS, MAX_ITER = 3, 300


def correlations(first: Tensor, second: Tensor) -> Tensor:
    """Pearson correlation of the positive relevance of concepts over N pairs, (K, L), from (N, K) and (N, L).

    A concept that is the same everywhere has the correlation 0.
    """

    def standardised(relevance: Tensor) -> Tensor:
        positive = relevance.double().clamp(min=0)
        centred = positive - positive.mean(0)
        length = centred.norm(dim=0)
        # What is the same everywhere differs from its mean by rounding, which correlates with itself.
        varies = length > 1e-12 * positive.norm(dim=0)
        return torch.where(varies, centred / torch.where(varies, length, 1), 0)

    return (standardised(first).T @ standardised(second)).clamp(-1, 1)


def match(first: Tensor, second: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """For each concept of the first fit (N, K) its partner in the second, one to one, and their correlation.

    The sum of the correlations is the largest that there is.
    """
    similarity = correlations(first, second).cpu()
    rows, columns = linear_sum_assignment(similarity.numpy(), maximize=True)
    return tuple(columns.tolist()), similarity[rows, columns]


def centrotype(relevances: Sequence[Tensor]) -> tuple[int, Tensor]:
    """The run that agrees best with all others, and its concepts' correlations with partners, (n − 1, K).

    `relevances` are R_k of each of n runs at the same pairs, shapes (N, K).
    """
    agreement = [
        torch.stack([match(mine, other)[1] for other in relevances if other is not mine])
        for mine in relevances
    ]
    best = max(range(len(agreement)), key=lambda i: float(agreement[i].mean()))
    return best, agreement[best]


def bootstrap(image: Tensor, generator: np.random.Generator) -> Tensor:
    """How many times each row occurs, (N,), if as many images as there are get drawn with replacement."""
    numbers, index = torch.unique(image, return_inverse=True)
    n = len(numbers)
    counts = np.bincount(generator.integers(n, size=n), minlength=n)
    while n > 1 and counts.all():  # at least one image is left out
        counts = np.bincount(generator.integers(n, size=n), minlength=n)
    return torch.from_numpy(counts).to(index.device)[index]


def with_shuffled_contexts(pairs: Pairs, generator: np.random.Generator) -> Pairs:
    """Pairs in which all contexts of an image are those of one other image."""
    rows = [(pairs.image == number).nonzero().flatten() for number in torch.unique(pairs.image)]
    order = generator.permutation(len(rows)).tolist()
    source = torch.empty(len(pairs), dtype=torch.long)
    for taker, giver in zip(order, [*order[1:], order[0]], strict=True):  # a circle: nobody keeps its own
        places = torch.arange(len(rows[taker])) % len(rows[giver])
        source[rows[taker]] = rows[giver][places]
    return Pairs(pairs.a, pairs.c[source.to(pairs.c.device)], pairs.image)


class NoRelevanceError(ValueError):
    """No pair has positive relevance: there is nothing to fit."""


class Run(NamedTuple):
    """One fit: its basis (r, r), R⁺_k at the pairs that matter (n, K), and J there and on images left out."""

    basis: Tensor
    relevance: Tensor
    objective: float
    held_out: float


class Repeated:
    """Fits of K subspaces in the leading directions of the pairs, for the pairs that matter.

    Other than in the coarse starts of `DRSA`, nothing is kept for safety: a direction without relevance is
    given to this or that block by chance, and fits would differ in it for no reason.
    """

    def __init__(self, pairs: Pairs, n_subspaces: int, solver: DRSA) -> None:
        self.n_starts = STARTS if solver.n_init is None else as_int(solver.n_init, "n_init", 1)
        q, balance = as_float(solver.q, "q"), as_float(solver.balance, "balance", 0, 1)
        dims = block_sizes(pairs.a.shape[1], n_subspaces, None)
        self.full = Objective(*prepared(pairs.a, pairs.c, balance), dims, q)
        reduction = leading_part(self.full, ENERGY, EVIDENCE, n_subspaces, 1)
        if reduction is None:
            raise NoRelevanceError(
                "no pair has positive relevance a·c: nothing counts for the target. Check the target and the "
                "sign of the contexts"
            )
        self.reduction, self.image = reduction, pairs.image[reduction.samples.cpu()]

    def fit(self, resampled: bool, generator: np.random.Generator) -> Run:
        """One fit, the best of new random starts; on a bootstrap over images if `resampled`."""
        problem = self.reduction.objective
        times = bootstrap(self.image, generator) if resampled else torch.ones(len(self.image))
        budget = Budget(MAX_ITER, COARSE_TOL, generator)
        results = from_random_starts(roughly, repeated_rows(problem, times), self.n_starts, budget)
        best, left_out = max(results, key=lambda result: result.objective), times == 0
        held_out = float("nan")
        if left_out.any():
            held_out = repeated_rows(problem, left_out).evaluate(best.basis).value
        return Run(best.basis, problem.evaluate(best.basis).relevance, best.objective, held_out)


def repeated_rows(problem: Objective, times: Tensor) -> Objective:
    """The objective if each sample occurred so many times, (N,)."""
    times = times.to(problem.a)
    rows = times.nonzero().flatten()
    scale = times[rows, None] ** 0.25  # a sample counts by R²
    # All samples of the full problem count, those that were left out as zero.
    n_total = round(problem.n_total * float(times.sum()) / problem.n_samples)
    a, c = problem.a[rows] * scale, problem.c[rows] * scale
    return Objective(a, c, problem.dims, problem.q, n_total=n_total)


@dataclass(frozen=True)
class Stability:
    """How far K concepts come back in other fits.

    Attributes
    ----------
    subspaces : Subspaces
        The centrotype: the run that agrees best with all others, finished on all pairs. Its metadata hold
        `index` and `threshold` under "stability".
    index : tensor, shape (K,)
        Correlation of each concept's relevance with that of its partner in another run, mean over runs. 1:
        it always comes back.
    null : tensor, shape (n_shuffles, K)
        The same where the contexts are those of other images, ascending. They are far from 0.
    threshold : float
        From which index on a concept is stable.
    agreement : tensor, shape (n_runs − 1, K)
        What `index` is the mean of: a row for each other run.
    objective, held_out_objective, null_objective : float
        J on the images of a fit, on those that its bootstrap left out, and there for the best shuffle of
        contexts; means over runs. NaN if one image holds nearly all evidence and cannot be left out.
    relevance : tensor, shape (N, K)
        Positive R_k of the concepts at all pairs, scaled as the solver sees them.
    seconds : float
        Time that it took.
    """

    subspaces: Subspaces
    index: Tensor
    null: Tensor
    threshold: float
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
        """For each concept whether its index reaches the threshold, in data that beat chance."""
        return tuple(self.beats_chance and index >= self.threshold for index in self.index.tolist())

    @property
    def beats_chance(self) -> bool:
        """Whether activations meet more relevance in their own contexts than in those of other images.

        Both objectives are of images left out: on its own images a fit is good whatever their contexts.
        """
        return 0 < self.held_out_objective >= (1 + MARGIN) * self.null_objective

    @property
    def all_stable(self) -> bool:
        """Whether every concept is stable."""
        return all(self.is_stable)

    @property
    def overlap(self) -> float:
        """Largest correlation of the relevance of two concepts; −1 for a single one.

        Concepts exclude each other. If it is positive, two are at the same places and are parts of one.
        """
        return float(correlations(self.relevance, self.relevance).fill_diagonal_(-1).max())

    @property
    def are_distinct(self) -> bool:
        """Whether no two concepts are parts of one."""
        return self.overlap <= OVERLAP

    def __str__(self) -> str:
        width = max(len(name) for name in self.subspaces.names)
        entries = zip(self.subspaces.names, self.index.tolist(), self.is_stable, strict=True)
        verdict = "" if self.beats_chance else ": NO BETTER THAN CHANCE"
        if self.held_out_objective != self.held_out_objective:  # NaN: there are no images to leave out
            verdict = ": NOT KNOWN, AS ONE IMAGE HOLDS NEARLY ALL EVIDENCE"
        head = f"{self.n_subspaces} concepts over {len(self.agreement) + 1} fits; 1 always comes back"
        rows = [f"{name:{width}}  {index:.3f}  {'' if ok else 'NOT '}stable" for name, index, ok in entries]
        held_out = f"{self.held_out_objective:.2f}, with shuffled contexts {self.null_objective:.2f}{verdict}"
        tail = f"objective on images left out {held_out}"
        return "\n".join([f"{head}, stable from {self.threshold:.2f} on", *rows, tail])


@full_precision()
def stability(
    pairs: Pairs,
    n_subspaces: int = 4,
    *,
    solver: DRSA | None = None,
    n_bootstraps: int = 5,
    n_shuffles: int = 2,
    threshold: float = THRESHOLD,
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
    n_bootstraps : int
        Fits on bootstraps over images, beside one fit on all images. Each has its own random starts.
    n_shuffles : int
        How many times contexts are shuffled over images, for the null. Each has up to two fits.
    threshold : float
        From which index on a concept is stable, up to 1.
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
    n_subspaces, n_shuffles = as_int(n_subspaces, "n_subspaces", 1), as_int(n_shuffles, "n_shuffles", 1)
    n_bootstraps, threshold = as_int(n_bootstraps, "n_bootstraps", 1), as_float(threshold, "threshold", 0, 1)
    _check_images(pairs)
    solver = DRSA() if solver is None else solver
    if not isinstance(solver, DRSA) or solver._ignores_contexts:
        raise TypeError(f"solver must be a DRSA, whose parameters are used, got {type(solver).__name__}")
    repeated, seed = Repeated(pairs, n_subspaces, solver), as_seed(random_state)
    generator = np.random.default_rng(seed)
    resampled = [True] * n_bootstraps + [False]
    hidden = None if progress is None else not progress
    total = len(resampled) + n_shuffles * len(resampled[:NULL_FITS])
    with tqdm(total=total, desc=f"stability, K = {n_subspaces}", disable=hidden, leave=False) as bar:

        def fits(repeated: Repeated, resampled: Sequence[bool]) -> list[Run]:
            return [(repeated.fit(again, generator), bar.update())[0] for again in resampled]

        runs = fits(repeated, resampled)
        of_null, by_chance = [], []
        for _ in range(n_shuffles):
            try:
                shuffled = Repeated(with_shuffled_contexts(pairs, generator), n_subspaces, solver)
            except NoRelevanceError:  # activations never meet contexts of other images
                of_null.append(torch.zeros(n_subspaces, dtype=torch.float64))
                by_chance.append(0.0)
                continue
            null = fits(shuffled, resampled[:NULL_FITS])
            of_null.append(centrotype([run.relevance for run in null])[1].mean(0).sort().values)
            by_chance.append(_mean_of_finite([run.held_out for run in null]))

    chosen, _ = centrotype([run.relevance for run in runs])
    # On all pairs and in all directions: what the user's solver finds from there.
    parameters = solver.get_params() | {"n_subspaces": n_subspaces, "dims": None, "random_state": seed}
    finished = DRSA(**parameters | {"tol": FINAL_TOL if solver.tol is None else solver.tol})
    finished.fit(pairs, init=repeated.reduction.lift(runs[chosen].basis, repeated.full))
    subspaces = finished.subspaces_
    relevance = subspaces.relevance(repeated.full.a, repeated.full.c).clamp_(min=0)
    of_runs = relevance[repeated.reduction.samples]
    others = [run.relevance for i, run in enumerate(runs) if i != chosen]
    agreement = torch.stack([match(of_runs, other)[1] for other in others])
    index = agreement.mean(0)
    metadata = {"index": index.tolist(), "threshold": threshold, "n_runs": len(runs)}
    return Stability(
        subspaces=subspaces.with_metadata(stability=metadata, history=[float(v) for v in finished.history_]),
        index=index,
        null=torch.stack(of_null),
        threshold=threshold,
        agreement=agreement,
        objective=_mean_of_finite([run.objective for run in runs]),
        held_out_objective=_mean_of_finite([run.held_out for run in runs]),
        null_objective=max((value for value in by_chance if value == value), default=float("nan")),
        relevance=relevance,
        seconds=time.perf_counter() - begin,
    )


def _check_images(pairs: Pairs) -> None:
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


def _mean_of_finite(values: Iterable[float]) -> float:
    finite = [value for value in values if value == value]
    return sum(finite) / len(finite) if finite else float("nan")


@dataclass(frozen=True)
class Lineage:
    """How the concepts of one K become those of the next.

    Attributes
    ----------
    parent : tuple of int
        For each concept of the larger K the concept of the smaller K that it correlates with most.
    correlation : tensor, shape (L, K)
        Correlation of the relevance of each concept of the larger K with each of the smaller.
    """

    parent: tuple[int, ...]
    correlation: Tensor

    @property
    def divided(self) -> tuple[int, ...]:
        """Concepts of the smaller K that have more than one child."""
        return tuple(sorted({k for k in self.parent if self.parent.count(k) > 1}))


@dataclass(frozen=True)
class ChoiceOfK:
    """How many concepts there are, with the evidence for it.

    Attributes
    ----------
    n_subspaces : int or None
        The chosen K; None if there is none: no K has concepts that are all stable and distinct.
    candidates : tuple of Stability
        One for each K that was tried, ascending.
    splits : tuple of Lineage
        From each candidate to the next.
    """

    n_subspaces: int | None
    candidates: tuple[Stability, ...]
    splits: tuple[Lineage, ...]

    @property
    def stability(self) -> Stability | None:
        """The candidate that was chosen."""
        return next((c for c in self.candidates if c.n_subspaces == self.n_subspaces), None)

    @property
    def subspaces(self) -> Subspaces | None:
        """The concepts that were chosen; None if there are none."""
        return None if self.stability is None else self.stability.subspaces

    def __str__(self) -> str:
        if self.n_subspaces is None:
            verdict = "there is no K whose concepts are all stable and distinct"
        else:
            verdict = f"{self.n_subspaces} concepts: the largest K whose concepts are all stable and distinct"
        rows = ["  K  least stable  needed  overlap  held-out J  shuffled J  seconds"]
        for c in self.candidates:
            marks = ["no better than shuffled"] if not c.beats_chance else []
            marks += ["not stable"] if c.beats_chance and not c.all_stable else []
            marks += [] if c.are_distinct else ["two are parts of one"]
            row = (
                f"{c.n_subspaces:3}  {float(c.index.min()):12.2f}  {c.threshold:6.2f}  {c.overlap:7.2f}  "
                f"{c.held_out_objective:10.3f}  {c.null_objective:10.3f}  {c.seconds:7.1f}  "
            )
            rows.append(f"{row}{', '.join(marks)}".rstrip())
        return "\n".join([verdict, *rows])


def choose_k(
    pairs: Pairs,
    n_subspaces: Iterable[int] = range(2, 17),
    *,
    solver: DRSA | None = None,
    patience: int | None = 2,
    progress: bool | None = None,
    **options: Any,
) -> ChoiceOfK:
    """The largest K whose concepts are all stable and distinct.

    Parameters
    ----------
    pairs, progress, **options
        As in `stability`.
    n_subspaces : iterable of int
        The K to try, from the smallest to the largest; those above the number of features are left out.
    solver : DRSA, optional
        As in `stability`, but `DRSA(balance=1)` by default: a concept counts as one however strong it is.
        Without balance, weak concepts are merged while a strong one is split (Notes of `DRSA`).
    patience : int or None
        Stop after so many K in a row in which two concepts are parts of one: more blocks only divide them
        further. None tries every K.

    Returns
    -------
    ChoiceOfK
        `print` it to read why; `drsa_core.plot.choice_of_k` draws it.
    """
    _check_images(pairs)
    wanted = sorted({as_int(k, "every entry of n_subspaces", 1) for k in n_subspaces})
    wanted = [k for k in wanted if k <= pairs.a.shape[1]]
    if not wanted:
        raise ValueError(f"n_subspaces must name at least one K from 1 to D = {pairs.a.shape[1]}")
    patience = None if patience is None else as_int(patience, "patience", 1)
    options = {"solver": DRSA(balance=1.0) if solver is None else solver, "progress": progress, **options}
    candidates: list[Stability] = []
    for k in tqdm(wanted, desc="number of concepts", disable=None if progress is None else not progress):
        candidates.append(stability(pairs, k, **options))
        last = candidates[-patience:] if patience else []
        if len(last) == patience and not any(c.are_distinct for c in last):
            break
    good = [c.n_subspaces for c in candidates if c.all_stable and c.are_distinct]
    splits = []
    for smaller, larger in pairwise(candidates):
        correlation = correlations(larger.relevance, smaller.relevance)
        splits.append(Lineage(tuple(correlation.argmax(1).tolist()), correlation))
    return ChoiceOfK(max(good, default=None), tuple(candidates), tuple(splits))
