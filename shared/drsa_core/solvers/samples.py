"""What DRSA asks of the pairs it is fitted to, in memory or in shards: their objective and a few numbers."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..checks import check_finite, check_nonzero, times_power_of_two, unit_scale
from ..pair_shards import Chunk, HeldChunk, PairShards
from ..pairs import balanced, normalise
from ..subspaces import Subspaces
from .objective import Objective
from .sharded import Rows, ShardedObjective


class Samples(Protocol):
    """Pairs whose scale does not matter any more."""

    @property
    def n_samples(self) -> int:
        """Number N of pairs, of all ranks."""

    @property
    def template(self) -> Tensor:
        """An empty tensor (0, D) with the dtype and device of the pairs."""

    @property
    def provenance(self) -> Any:
        """A `Provenance`, or None."""

    def objective(self, dims: Sequence[int], q: float, balance: float) -> Objective:
        """The objective on normalised pairs (Note E)."""

    def mean_relevance(self, subspaces: Subspaces) -> Tensor:
        """E[(U_kᵀa)ᵀ(U_kᵀc)] up to a factor that is the same for all, shape (K,)."""

    def seed(self, seed: int | None) -> int | None:
        """The seed on all ranks."""


class HeldSamples:
    """Pairs in the memory of one process.

    Parameters
    ----------
    a, c : tensor, shape (N, D)
        Checked.
    provenance : Provenance or None
    """

    def __init__(self, a: Tensor, c: Tensor, provenance: Any) -> None:
        check_nonzero(a, c)
        # Neither the objective nor the order of the blocks depends on the scale of the data.
        self.a, self.c, self.provenance = unit_scale(a)[0], unit_scale(c)[0], provenance
        self.n_samples, self.template = len(a), a[:0]

    def objective(self, dims: Sequence[int], q: float, balance: float) -> Objective:
        """The objective on normalised pairs (Note E)."""
        a, c = balanced(self.a, self.c, balance)
        return Objective(normalise(a), normalise(c), dims, q)

    def mean_relevance(self, subspaces: Subspaces) -> Tensor:
        """E[(U_kᵀa)ᵀ(U_kᵀc)] up to a factor, shape (K,)."""
        return subspaces.relevance(self.a, self.c).mean(0)

    def seed(self, seed: int | None) -> int | None:
        """The seed."""
        return seed


class ShardedSamples:
    """Pairs on several ranks or in files. Every number is one of all ranks, so every rank has the same."""

    def __init__(self, shards: PairShards) -> None:
        self.shards, self.provenance = shards, shards.provenance
        self.n_samples = len(shards)
        device = next((chunk.read()[0].device for chunk in shards.chunks), torch.device("cpu"))
        self.template = torch.empty(0, shards.n_features, dtype=shards.dtype, device=device)
        largest = self._largest(shards.chunks)
        self._exponents = [math.frexp(value)[1] for value in largest]
        if self.n_samples:
            check_nonzero(*torch.tensor(largest, dtype=torch.float64))

    def _largest(self, chunks: Iterator[Chunk] | Iterator[Rows]) -> list[float]:
        """The largest moduli of a and of c."""
        here = torch.zeros(1, 2, dtype=torch.float64)
        for chunk in chunks:
            pair = chunk.read()
            for x, name in zip(pair, ("a (activations)", "c (contexts)"), strict=True):
                check_finite(x, name)
            found = [float(x.abs().amax()) if x.numel() else 0.0 for x in pair]
            here = torch.maximum(here, torch.tensor([found], dtype=torch.float64))
        return self.shards.ranks.rows(here).amax(0).tolist()

    def _scaled(self, a: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        a, c = (times_power_of_two(x, -e) for x, e in zip((a, c), self._exponents, strict=True))
        return a, c

    def objective(self, dims: Sequence[int], q: float, balance: float) -> ShardedObjective:
        """The objective on normalised pairs (Note E); three passes over them."""

        def levelled(a: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            return balanced(*self._scaled(a, c), balance)

        # The steps of `normalise`, with numbers of all ranks.
        largest = self._largest(Rows(chunk, levelled) for chunk in self.shards.chunks)
        exponents = [math.frexp(value)[1] for value in largest]
        squares = torch.zeros(2, dtype=torch.float64)
        for chunk in self.shards.chunks:
            pair = levelled(*chunk.read())
            for i in range(2):
                squares[i] += times_power_of_two(pair[i], -exponents[i]).double().square().sum().cpu()
        n_features = self.shards.n_features
        roots = (self.shards.ranks.sum(squares) / (self.n_samples * n_features)).sqrt()
        divisors = (roots * n_features**0.25).to(self.template)

        def prepare(a: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            a, c = (times_power_of_two(x, -exponents[i]) / divisors[i] for i, x in enumerate(levelled(a, c)))
            return a, c

        rows = [Rows(chunk, prepare) for chunk in self.shards.chunks]
        held = self.shards.in_memory
        parts = [HeldChunk(*part.read()) for part in rows] if held else rows
        return ShardedObjective(
            parts, self.shards.ranks, self.template, dims, q, self.shards.counts, self.shards.memory
        )

    def mean_relevance(self, subspaces: Subspaces) -> Tensor:
        """E[(U_kᵀa)ᵀ(U_kᵀc)] up to a factor, shape (K,)."""
        total = torch.zeros(subspaces.n_subspaces, dtype=torch.float64, device=self.template.device)
        for chunk in self.shards.chunks:
            total += subspaces.relevance(*self._scaled(*chunk.read())).double().sum(0)
        return self.shards.ranks.sum(total) / self.n_samples

    def seed(self, seed: int | None) -> int | None:
        """The seed; where there is none, one that all ranks share."""
        if seed is None and self.shards.ranks.size > 1:
            return int(self.shards.ranks.from_first(secrets.randbits(63)))
        return seed
