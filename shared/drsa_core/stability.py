"""Do two fits find the same concepts? Concepts matched one to one by the relevance that they hold.

Blocks of D/K dimensions hold many directions in which nothing happens, and two fits share them out at random.
Overlap of the subspaces therefore understates how far two fits agree. What a concept says about the data is
its relevance R_k at each pair, and this is what is compared here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from tqdm.auto import tqdm

from .checks import Seed, as_float, as_int, as_seed, full_precision, unit_scale
from .drsa import DRSA, block_sizes
from .objective import Evaluation, Objective, below_blocks
from .optimizers import (
    COARSE_TOL,
    COARSE_WARM_UP,
    Reduction,
    leading_samples,
    quasi_newton,
    random_orthogonal,
    reduced_dims,
    revive,
)
from .pairs import Pairs, balanced, normalise
from .prca import learn_subspaces
from .subspaces import Subspaces


def correlations(first: Tensor, second: Tensor) -> Tensor:
    """Pearson correlation over pairs of the positive relevance of all concepts of two fits, shape (K, L).

    Parameters
    ----------
    first, second : tensor, shapes (N, K) and (N, L)
        R_k and R_l at the same N pairs. A concept that is the same everywhere has the correlation 0.
    """
    x, y = (_standardised(relevance) for relevance in (first, second))
    return (x.T @ y).clamp(-1, 1)


def match(first: Tensor, second: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """For each concept of the first fit its partner in the second, one to one, and their correlation.

    The sum of the correlations is the largest that there is. Both fits have the same number of concepts.

    Returns
    -------
    tuple of K int, tensor of float64, shape (K,)
    """
    return match_by(correlations(first, second))


def match_by(similarity: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """As `match`, from the matrix (K, K) of correlations."""
    rows, columns = linear_sum_assignment(similarity.cpu().numpy(), maximize=True)
    return tuple(columns.tolist()), similarity.cpu()[rows, columns]


def _standardised(relevance: Tensor) -> Tensor:
    positive = relevance.double().clamp(min=0)
    centred = positive - positive.mean(0)
    length = centred.norm(dim=0)
    # What is the same everywhere differs from its mean by rounding, which correlates with itself.
    varies = length > 1e-12 * positive.norm(dim=0)
    return torch.where(varies, centred / torch.where(varies, length, 1), 0)


Rows = dict[int, Tensor]


def rows_by_image(image: Tensor) -> Rows:
    """Rows of each image, by its number."""
    order = torch.argsort(image, stable=True)
    numbers, counts = torch.unique(image, return_counts=True)
    return dict(zip(numbers.tolist(), order.split(counts.tolist()), strict=True))


def bootstrap(rows: Rows, generator: np.random.Generator) -> Tensor:
    """How many times each row occurs, (N,), if as many images as there are get drawn with replacement.

    Of two images or more, at least one is left out: the rare draw of all of them is made again.
    """
    drawn = generator.integers(len(rows), size=len(rows))
    while len(rows) > 1 and len(np.unique(drawn)) == len(rows):
        drawn = generator.integers(len(rows), size=len(rows))
    counts = np.bincount(drawn, minlength=len(rows))
    times = torch.zeros(sum(len(own) for own in rows.values()))
    for own, count in zip(rows.values(), counts.tolist(), strict=True):
        times[own] = count
    return times


def shuffled_contexts(rows: Rows, generator: np.random.Generator) -> Tensor:
    """For each row the row of another image whose context it gets, shape (N,).

    All contexts of an image go to one other image. Activations and contexts are as they were, each for
    itself, but what they have to do with each other is lost.
    """
    order = generator.permutation(list(rows)).tolist()
    source = torch.empty(sum(len(own) for own in rows.values()), dtype=torch.long)
    for number, giver in zip(order, [*order[1:], order[0]], strict=True):  # a circle: nobody keeps its own
        own, theirs = rows[number], rows[giver]
        source[own] = theirs[torch.arange(len(own)) % len(theirs)]
    return source


def with_shuffled_contexts(pairs: Pairs, generator: np.random.Generator) -> Pairs:
    """Pairs in which the contexts of each image are those of another one."""
    source = shuffled_contexts(rows_by_image(pairs.image), generator)
    return Pairs(pairs.a, pairs.c[source.to(pairs.c.device)], pairs.image)


#: Part of the weighted energy that the directions hold, and of Σ_n R_n² that the pairs hold.
ENERGY, EVIDENCE = 0.95, 0.95
#: Random starts of each fit, of which the best is kept.
STARTS = 3
#: Of each start.
MAX_ITER = 300


class NoRelevanceError(ValueError):
    """No pair has positive relevance: there is nothing to fit."""


@dataclass(frozen=True)
class Run:
    """One fit.

    Attributes
    ----------
    basis : tensor, shape (r, r)
        In the directions of the `Repeated` that made it.
    relevance : tensor, shape (n, K)
        Positive R_k of the pairs that matter, be their images among those of the fit or not.
    objective, held_out : float
        J on the images of the fit, and on those left out; NaN if there are none.
    """

    basis: Tensor
    relevance: Tensor
    objective: float
    held_out: float


class Repeated:
    """Fits of K subspaces in the leading directions of the pairs, for the pairs that matter.

    As in `coarse`, few pairs and directions hold nearly all of the objective. They are found once, and every
    fit is small.

    Parameters
    ----------
    pairs : Pairs
    n_subspaces : int
    solver : DRSA
        Whose parameters `q`, `balance` and `n_init` are used.
    """

    def __init__(self, pairs: Pairs, n_subspaces: int, solver: DRSA) -> None:
        self.n_starts = STARTS if solver.n_init is None else solver.n_init
        a, c = balanced(unit_scale(pairs.a)[0], unit_scale(pairs.c)[0], float(solver.balance))
        dims = block_sizes(a.shape[1], n_subspaces, None)
        full = Objective(normalise(a), normalise(c), dims, float(solver.q))
        reduction = leading_part(full)
        self.problem, self._full, self._samples = reduction.objective, full, reduction.samples
        self.rows: Rows = rows_by_image(pairs.image[reduction.samples.cpu()])
        self.lift: Callable[[Tensor], Tensor] = lambda basis: reduction.lift(basis, full)

    def relevance(self, subspaces: Subspaces) -> tuple[Tensor, Tensor]:
        """Positive R_k of all pairs, and of those that the runs have; shapes (N, K) and (n, K)."""
        everywhere = subspaces.relevance(self._full.a, self._full.c).clamp_(min=0)
        return everywhere, everywhere[self._samples]

    def fit(self, resampled: bool, generator: np.random.Generator) -> Run:
        """One fit, the best of new random starts; on a bootstrap over images if `resampled`."""
        problem = self.problem
        times = torch.ones(problem.n_samples)
        if resampled:
            times = bootstrap(self.rows, generator)
        drawn = Small.of_rows(problem, times)
        results = []
        for _ in range(self.n_starts):
            start = random_orthogonal(problem.n_features, generator).to(problem.a)
            start = revive(drawn, start, generator)
            results.append(quasi_newton(drawn, start, MAX_ITER, COARSE_TOL, lambda _: None, COARSE_WARM_UP))
        best = max(results, key=lambda result: result.objective)
        left_out = times == 0
        return Run(
            best.basis,
            problem.evaluate(best.basis).relevance,
            best.objective,
            Small.of_rows(problem, left_out).evaluate(best.basis).value if left_out.any() else float("nan"),
        )


class Small(Objective):
    """The objective where D is small: one whole product costs less than many of pairs of blocks."""

    @classmethod
    def of_rows(cls, problem: Objective, times: Tensor) -> Small:
        """The objective if each sample occurred so many times, (N,).

        A sample counts by R², so that its vectors are scaled by the fourth root.
        """
        times = times.to(problem.a)
        rows = times.nonzero().flatten()
        scale = times[rows, None] ** 0.25
        # All samples of the full problem count, those that were left out as zero.
        n_total = round(problem.n_total * float(times.sum()) / problem.n_samples)
        return cls(problem.a[rows] * scale, problem.c[rows] * scale, problem.dims, problem.q, n_total)

    def tangent_gradient(self, at: Evaluation) -> Tensor:
        """As of `Objective`."""
        weights = at.weights @ self.membership.T
        whole = torch.addmm(
            at.activations.T @ (weights * at.contexts), at.contexts.T, weights * at.activations
        )
        return below_blocks(whole - whole.T, self.columns)


def leading_part(full: Objective) -> Reduction:
    """The problem in its leading directions, at least one for each block, for the pairs that matter.

    Other than in `coarse.reduce_problem`, nothing is kept for safety: a direction that holds no relevance is
    given to this or that block by chance, and fits would differ in it for no reason.
    """
    weights = (full.a * full.c).sum(1).clamp(min=0).double().square()
    if not weights.any():
        raise NoRelevanceError(
            "no pair has positive relevance a·c: nothing counts for the target. Check the target and the "
            "sign of the contexts"
        )
    weights = (weights / weights.sum()).to(full.a)
    moments = [((x * weights[:, None]).T @ x).double() for x in (full.a, full.c)]
    values, vectors = torch.linalg.eigh(sum(moment / moment.trace() for moment in moments))
    values, directions = values.flip(0).clamp_(min=0), vectors.flip(1).to(full.a)
    by_energy = int((values.cumsum(0) < ENERGY * values.sum()).sum()) + 1
    n_directions = min(max(by_energy, full.n_subspaces), full.n_features)
    samples = leading_samples(weights, EVIDENCE, min(full.n_samples, n_directions))
    dims = reduced_dims(full.dims, n_directions)
    a, c = (x[samples] @ directions[:, :n_directions] for x in (full.a, full.c))
    return Reduction(Objective(a, c, dims, full.q, full.n_total), directions, samples)


def mean_of_finite(values: Sequence[float]) -> float:
    """Mean of the numbers that are not NaN; NaN if there are none."""
    finite = [value for value in values if value == value]
    return sum(finite) / len(finite) if finite else float("nan")


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

    def __str__(self) -> str:
        if self.n_subspaces is None:
            verdict = "there is no K whose concepts are all stable and distinct"
        else:
            verdict = f"{self.n_subspaces} concepts: the largest K whose concepts are all stable and distinct"
        rows = ["  K  least stable  needed  overlap  held-out J  shuffled J  seconds"]
        for c in self.candidates:
            marks = [] if c.beats_chance else ["no better than shuffled"]
            marks += ["not stable"] if c.beats_chance and not c.all_stable else []
            marks += [] if c.are_distinct else ["two are parts of one"]
            row = (
                f"{c.n_subspaces:3}  {float(c.index.min()):12.2f}  {c.threshold:6.2f}  {c.overlap:7.2f}  "
                f"{c.held_out_objective:10.3f}  {c.null_objective:10.3f}  {c.seconds:7.1f}  "
            )
            rows.append(f"{row}{', '.join(marks)}".rstrip())
        return "\n".join([verdict, *rows])

    @property
    def subspaces(self) -> Subspaces | None:
        """The concepts that were chosen; None if there are none."""
        chosen = self.stability
        return None if chosen is None else chosen.subspaces


@full_precision()
def choose_k(
    pairs: Pairs,
    n_subspaces: Iterable[int] = range(2, 17),
    *,
    solver: DRSA | None = None,
    n_bootstraps: int = 5,
    n_starts: int = 1,
    n_shuffles: int = 2,
    threshold: float = THRESHOLD,
    margin: float = MARGIN,
    patience: int | None = 2,
    random_state: Seed = 0,
    progress: bool | None = None,
) -> ChoiceOfK:
    """The largest K whose concepts are all stable and distinct.

    Parameters
    ----------
    pairs, n_bootstraps, n_starts, n_shuffles, threshold, margin, random_state, progress
        As in `stability`.
    solver : DRSA, optional
        As in `stability`, but `DRSA(balance=1)` by default: a concept counts as one however strong it is.
        Without balance, weak concepts are merged while a strong one is split (Notes of `DRSA`).
    n_subspaces : iterable of int
        The K to try, from the smallest to the largest; those above the number of features are left out.
    patience : int or None
        Stop after so many K in a row in which two concepts are parts of one: more blocks only divide them
        further. None tries every K.

    Returns
    -------
    ChoiceOfK
        `print` it to read why; `drsa_core.plot.choice_of_k` draws it.
    """
    wanted = sorted({as_int(k, "every entry of n_subspaces", 1) for k in n_subspaces})
    if not wanted:
        raise ValueError("n_subspaces must name at least one K to try, e.g. range(2, 17); got none")
    patience = None if patience is None else as_int(patience, "patience", 1)
    check_images(pairs)
    # Before anything is fitted: a K that cannot be would otherwise cost what was found before it.
    n_features = pairs.a.shape[1]
    wanted = [k for k in wanted if k <= n_features]
    if not wanted:
        raise ValueError(f"no K of n_subspaces is at most D = {n_features}, the number of features")
    solver = DRSA(balance=1.0) if solver is None else solver
    hidden = None if progress is None else not progress
    candidates: list[Stability] = []
    for k in tqdm(wanted, desc="number of concepts", disable=hidden):
        found = stability(
            pairs,
            k,
            solver=solver,
            n_bootstraps=n_bootstraps,
            n_starts=n_starts,
            n_shuffles=n_shuffles,
            threshold=threshold,
            margin=margin,
            random_state=random_state,
            progress=progress,
        )
        candidates.append(found)
        last = candidates[-patience:] if patience else []
        if len(last) == patience and not any(c.are_distinct for c in last):
            break
    good = [c.n_subspaces for c in candidates if c.all_stable and c.are_distinct]
    return ChoiceOfK(max(good, default=None), tuple(candidates), _splits(candidates))


def _splits(candidates: Sequence[Stability]) -> tuple[Lineage, ...]:
    found = []
    for smaller, larger in pairwise(candidates):
        correlation = correlations(larger.relevance, smaller.relevance)
        found.append(Lineage(tuple(correlation.argmax(1).tolist()), correlation))
    return tuple(found)
