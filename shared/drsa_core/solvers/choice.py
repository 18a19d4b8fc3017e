"""How many concepts? The largest K whose concepts all come back, and none of which is a part of another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor
from tqdm.auto import tqdm

from ..checks import Seed, as_int, full_precision
from ..pairs import Pairs
from ..subspaces import Subspaces
from .agreement import correlations
from .drsa import DRSA
from .stability import MARGIN, THRESHOLD, Stability, check_images, stability


@dataclass(frozen=True)
class Split:
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
    splits : tuple of Split
        From each candidate to the next.
    """

    n_subspaces: int | None
    candidates: tuple[Stability, ...]
    splits: tuple[Split, ...]

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


def _splits(candidates: Sequence[Stability]) -> tuple[Split, ...]:
    found = []
    for smaller, larger in pairwise(candidates):
        correlation = correlations(larger.relevance, smaller.relevance)
        found.append(Split(tuple(correlation.argmax(1).tolist()), correlation))
    return tuple(found)
