"""The DRSA objective over pairs that are on several ranks, in files, or both.

All that the solvers ask of an `Objective` is a sum over samples, or follows from such sums. Each part of the
samples therefore computes its own with the code for one process, and the sums are added: over the parts of
this rank, then over ranks. Every rank gets the same numbers, makes the same decisions and ends at the same U.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..pair_shards import COPIES, Chunk, HeldChunk
from ..ranks import Ranks
from .objective import CURVATURE_SAMPLES, Curvature, Evaluation, Objective, below_blocks

Prepare = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rows:
    """Rows of a chunk, prepared for the objective each time they are read.

    Attributes
    ----------
    chunk : Chunk
        Where they are read from.
    prepare : function
        (a, c) as they were collected ↦ as the objective takes them.
    chosen : tensor of int or None
        Those of the chunk that count, ascending; None for all.
    """

    chunk: Chunk
    prepare: Prepare
    chosen: Tensor | None = None

    @property
    def n_rows(self) -> int:
        """How many."""
        return self.chunk.n_rows if self.chosen is None else len(self.chosen)

    def read(self) -> tuple[Tensor, Tensor]:
        """Activations and contexts, shapes (n_rows, D)."""
        a, c = self.chunk.read()
        if self.chosen is not None:
            chosen = self.chosen.to(a.device)
            a, c = a[chosen], c[chosen]
        return self.prepare(a, c)

    def select(self, rows: Tensor) -> Rows:
        """Some of these rows."""
        return replace(self, chosen=rows if self.chosen is None else self.chosen[rows])


@dataclass(frozen=True)
class ShardedEvaluation(Evaluation):
    """The objective at one U over several parts.

    Attributes
    ----------
    basis : tensor, shape (D, D)
        U.
    parts : tuple of Evaluation
        Those of this rank's parts, with the factors of all. Parts that are read from files keep their
        relevances alone; `activations`, `contexts` and `relevance` of the whole are empty.
    unscaled_gradient : tensor, shape (D, D), or None
        ∂J/∂U of this rank's parts before its columns are multiplied by the factors of their blocks; only
        where parts are read from files: it is summed up on the way, so that an iteration reads them once.
    """

    basis: Tensor
    parts: tuple[Evaluation, ...]
    unscaled_gradient: Tensor | None


class ShardedObjective(Objective):
    """`Objective` over samples in parts, on one rank or many; the same methods with the same results.

    Parameters
    ----------
    parts : sequence of HeldChunk or Rows
        This rank's samples, normalised, in order. Samples are numbered rank after rank.
    ranks : Ranks
    template : tensor
        Of the dtype, device and number of features of the samples.
    dims, q, n_total
        As in `Objective`.
    counts : sequence of int
        Number of samples of each rank.
    memory : int
        Bytes for samples: a selection that fits is held, not read again.
    """

    def __init__(
        self,
        parts: Sequence[HeldChunk | Rows],
        ranks: Ranks,
        template: Tensor,
        dims: Sequence[int],
        q: float,
        counts: Sequence[int],
        memory: int,
        n_total: int | None = None,
    ) -> None:
        none = template[:0]
        super().__init__(none, none, dims, q, sum(counts) if n_total is None else n_total)
        self.parts, self.ranks, self.counts, self.memory = tuple(parts), ranks, tuple(counts), memory
        self.n_samples = sum(counts)
        self._held = [
            Objective(part.a, part.c, dims, q, self.n_total) if isinstance(part, HeldChunk) else None
            for part in self.parts
        ]

    @property
    def in_memory(self) -> bool:
        """Whether this rank holds all of its samples."""
        return all(part is not None for part in self._held)

    def _objectives(self) -> Iterator[Objective]:
        """Each part by itself, as an objective that divides by the number of all samples."""
        for part, held in zip(self.parts, self._held, strict=True):
            yield held if held is not None else Objective(*part.read(), self.dims, self.q, self.n_total)

    def of_samples(self, rows: Tensor) -> ShardedObjective:
        """The objective if all samples but these, numbered over all ranks, were zero."""
        rows = rows.cpu()
        ends = torch.tensor(self.counts).cumsum(0)
        counts = torch.bincount(torch.searchsorted(ends, rows, right=True), minlength=len(ends))
        first = int(ends[self.ranks.rank]) - self.counts[self.ranks.rank]
        parts: list[HeldChunk | Rows] = []
        for part in self.parts:
            mine = rows[(rows >= first) & (rows < first + part.n_rows)] - first
            first += part.n_rows
            if isinstance(part, HeldChunk):
                where = mine.to(part.a.device)
                parts.append(HeldChunk(part.a[where], part.c[where]))
            else:
                parts.append(part.select(mine))
        size = COPIES * sum(part.n_rows for part in parts) * self.n_features * self.a.element_size()
        if size <= self.memory:
            parts = [self._joined(part.read() for part in parts)]
        return self._with(parts, self.a, self.dims, counts.tolist())

    def in_directions(self, directions: Tensor, dims: Sequence[int]) -> ShardedObjective:
        """The objective in coordinates `directions`ᵀ a; these are held in memory, also those of files."""
        template = self.a @ directions
        coordinates = ((part.a @ directions, part.c @ directions) for part in self._objectives())
        return self._with([self._joined(coordinates, template)], template, dims, self.counts)

    def _joined(self, rows: Iterator[tuple[Tensor, Tensor]], template: Tensor | None = None) -> HeldChunk:
        none = self.a if template is None else template
        pairs = [(none, none), *rows]
        return HeldChunk(torch.cat([a for a, _ in pairs]), torch.cat([c for _, c in pairs]))

    def _with(
        self, parts: Sequence[HeldChunk | Rows], template: Tensor, dims: Sequence[int], counts: Sequence[int]
    ) -> ShardedObjective:
        return ShardedObjective(parts, self.ranks, template, dims, self.q, counts, self.memory, self.n_total)

    def evaluate(self, basis: Tensor) -> ShardedEvaluation:
        """The objective at U = `basis` (D, D): products as in `Objective`; K numbers are sent.

        Samples in files are read once, and also give the gradient then: four products of N×D×D.
        """
        squares = torch.zeros(self.n_subspaces, dtype=torch.float64, device=self.a.device)
        parts: list[Evaluation] = []
        gradient = None if self.in_memory else torch.zeros_like(basis)
        for objective in self._objectives():
            at = objective.evaluate(basis)
            squares += at.relevance.square().sum(0)
            if gradient is not None:
                gradient += objective.gradient(replace(at, factors=torch.ones_like(at.factors)))
                at = replace(at, activations=self.a, contexts=self.a)
            parts.append(at)
        value, means, factors = self._from_squares(self.ranks.sum(squares).to(self.a))
        parts = [replace(at, value=value, block_means=means, factors=factors) for at in parts]
        none = self.a.new_zeros(0, self.n_subspaces)
        return ShardedEvaluation(value, means, self.a, self.a, none, factors, basis, tuple(parts), gradient)

    def gradient(self, at: Evaluation) -> Tensor:
        """Euclidean gradient ∂J/∂U, shape (D, D); D² numbers are sent."""
        return self.ranks.sum(self._own_gradient(_sharded(at)))

    def _own_gradient(self, at: ShardedEvaluation) -> Tensor:
        if at.unscaled_gradient is not None:
            return at.unscaled_gradient * (self.membership @ at.factors)
        total = torch.zeros_like(at.basis)
        for objective, part in zip(self._objectives(), at.parts, strict=True):
            total += objective.gradient(part)
        return total

    def tangent_gradient(self, at: Evaluation) -> Tensor:
        """As in `Objective`; D² numbers are sent."""
        at = _sharded(at)
        if at.unscaled_gradient is not None:
            whole = at.basis.T @ self._own_gradient(at)
            total = below_blocks(whole - whole.T, self.columns)
        else:
            total = torch.zeros_like(at.basis)
            for objective, part in zip(self._objectives(), at.parts, strict=True):
                total += objective.tangent_gradient(part)
        return self.ranks.sum(total)

    def curvature(self, at: Evaluation) -> Curvature:
        """As in `Objective`, from the same samples; Σ d_k² and D² numbers are sent."""
        at = _sharded(at)
        stride = max(1, self.n_samples // CURVATURE_SAMPLES)
        first = sum(self.counts[: self.ranks.rank])
        sums = [self.a.new_zeros(here.stop - here.start, here.stop - here.start) for here in self.columns]
        picked = []
        for objective, part in zip(self._objectives(), at.parts, strict=True):
            if not self.in_memory:
                part = replace(objective.evaluate(at.basis), factors=at.factors)
            for total, matrix in zip(sums, objective._contrasts(part), strict=True):
                total += matrix
            some = slice(-first % stride, None, stride)  # those whose number over all ranks it divides
            picked.append((part.activations[some], part.contexts[some], part.relevance[some]))
            first += objective.n_samples
        flat = self.ranks.sum(torch.cat([matrix.flatten() for matrix in sums]))
        pieces = flat.split([matrix.numel() for matrix in sums])
        sums = [piece.view_as(matrix) for piece, matrix in zip(pieces, sums, strict=True)]
        rotations = [torch.linalg.eigh(matrix + matrix.T).eigenvectors for matrix in sums]
        factors = at.factors * (self.n_samples / len(range(0, self.n_samples, stride)))
        diagonal = self.a.new_zeros(self.n_features, self.n_features)
        if picked:
            activations, contexts, relevance = (torch.cat(rows) for rows in zip(*picked, strict=True))
            diagonal += self._diagonal(rotations, activations, contexts, relevance, factors)
        return Curvature(rotations, self.ranks.sum(diagonal))

    def shares(self, at: Evaluation) -> Tensor:
        """What each sample of all ranks adds to J, shape (N,)."""
        return self._of_all([(part.weights * part.relevance).sum(1) for part in _sharded(at).parts])

    def pair_relevance(self) -> Tensor:
        """Relevance a_n·c_n of each pair of all ranks, shape (N,)."""
        return self._of_all([objective.pair_relevance() for objective in self._objectives()])

    def _of_all(self, numbers: list[Tensor]) -> Tensor:
        return self.ranks.rows(torch.cat([self.a.new_zeros(0), *numbers]))

    def moments(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """As in `Objective`, for weights (N,) of the samples of all ranks."""
        first = sum(self.counts[: self.ranks.rank])
        total = self.a.new_zeros(2, self.n_features, self.n_features, dtype=torch.float64)
        for objective in self._objectives():
            end = first + objective.n_samples
            total += torch.stack(objective.moments(weights[first:end]))
            first = end
        of_a, of_c = self.ranks.sum(total)
        return of_a, of_c

    def linearised(self, at: Evaluation, directions: Tensor) -> Tensor:
        """As in `Objective`; one matrix (r, r) for each block is sent."""
        r = directions.shape[1]
        total = self.a.new_zeros(len(self.columns), r, r)
        for objective, part in zip(self._objectives(), _sharded(at).parts, strict=True):
            total += objective.linearised(part, directions)
        return self.ranks.sum(total)


def _sharded(at: Evaluation) -> ShardedEvaluation:
    if not isinstance(at, ShardedEvaluation):
        raise TypeError(f"expected what this objective's evaluate returned, got {type(at).__name__}")
    return at
