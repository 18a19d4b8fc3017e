"""`PairShards`: pairs that are spread over ranks, or stay in files because memory could not hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .checks import as_int, check_pairs
from .distributed import ALONE, Ranks
from .pairs import Pairs, common_provenance, pair_file_shape
from .provenance import Provenance
from .storage import read_rows

#: Bytes that samples in work may take, by default.
MEMORY = 2**30
#: Arrays of a chunk's size that an evaluation of DRSA's objective holds at a time, generously counted.
COPIES = 12


class Chunk(Protocol):
    """Some rows of a collection."""

    @property
    def n_rows(self) -> int:
        """How many."""

    def read(self) -> tuple[Tensor, Tensor]:
        """Activations and contexts, shapes (n_rows, D)."""


@dataclass(frozen=True)
class HeldChunk:
    """Rows in memory, shapes (n, D)."""

    a: Tensor
    c: Tensor

    @property
    def n_rows(self) -> int:
        """How many."""
        return len(self.a)

    def read(self) -> tuple[Tensor, Tensor]:
        """The rows, not copied."""
        return self.a, self.c


@dataclass(frozen=True)
class FileRows:
    """Rows `begin` … `end` − 1 of one file of pairs."""

    path: Path
    begin: int
    end: int


@dataclass(frozen=True)
class FileChunk:
    """Rows of files, in order, read when they are asked for."""

    parts: tuple[FileRows, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def n_rows(self) -> int:
        """How many."""
        return sum(part.end - part.begin for part in self.parts)

    def read(self) -> tuple[Tensor, Tensor]:
        """The rows, copied out of the files."""
        read = []
        for part in self.parts:
            a, c = read_rows(part.path, ("a", "c"), part.begin, part.end)
            try:
                read.append(check_pairs(a, c))
            except ValueError as error:
                raise ValueError(f"{part.path} does not hold valid pairs: {error}") from error
        a, c = torch.cat([a for a, _ in read]), torch.cat([c for _, c in read])
        return a.to(self.device, self.dtype), c.to(self.device, self.dtype)


class PairShards:
    """The pairs of all ranks, of which this rank holds or reads its own; solvers take them like `Pairs`.

    `PRCA(…).fit(shards)` and `DRSA(…).fit(shards)` give on every rank what one process gives that has all
    pairs in memory, up to rounding. Pairs do not move between ranks: sums over them do.

    Parameters
    ----------
    pairs : Pairs
        Those of this rank. The order of all is rank after rank.
    ranks : Ranks
        From `joined_ranks`. All ranks must make the same calls.
    """

    def __init__(self, pairs: Pairs, ranks: Ranks = ALONE) -> None:
        chunk = HeldChunk(pairs.a, pairs.c)
        self._set([chunk], pairs.a.shape[1], pairs.a.dtype, ranks, pairs.provenance, MEMORY)

    @classmethod
    def from_files(
        cls,
        files: Sequence[str | PathLike[str]],
        ranks: Ranks = ALONE,
        *,
        shared: bool = True,
        memory: int = MEMORY,
        device: torch.device | str = "cpu",
    ) -> PairShards:
        """Pairs that stay in the files that `Pairs.save` wrote, and are read chunk by chunk.

        Parameters
        ----------
        files : sequence of path
            In order, of one collection as in `Pairs.concatenate`. Their digests are not checked: see
            `PairStore.damaged`.
        ranks : Ranks
        shared : bool
            Whether all ranks see the same files, which are then split evenly between them; else each rank
            names files of its own.
        memory : int
            Bytes that the samples in work may take at a time. What the solvers hold beside them does not
            depend on the number of pairs.
        device : device
            Where chunks are moved to.
        """
        memory = as_int(memory, "memory", 1)
        described = [(Path(file), *pair_file_shape(file)) for file in files]
        if not described:
            raise ValueError("from_files needs at least one file of pairs, got none")
        widths = {width for _, _, width, _, _ in described}
        if len(widths) > 1:
            raise ValueError(f"all files must have the same number of features, got {sorted(widths)}")
        (n_features,) = widths
        provenance = common_provenance([made for *_, made in described])
        dtype = described[0][3]
        for _, _, _, other, _ in described:
            dtype = torch.promote_types(dtype, other)
        n_rows = sum(rows for _, rows, _, _, _ in described)
        mine = ranks.share(n_rows) if shared else range(n_rows)
        # A chunk has at least 256 rows, so that products are large enough to be fast.
        chunk_rows = max(256, memory // (COPIES * n_features * dtype.itemsize))
        rows = _slices([(file, rows) for file, rows, _, _, _ in described], mine)
        device = torch.device(device)
        chunks = [FileChunk(parts, dtype, device) for parts in _grouped(rows, chunk_rows)]
        shards = cls.__new__(cls)
        shards._set(chunks, n_features, dtype, ranks, provenance, memory)
        return shards

    def _set(
        self,
        chunks: Sequence[Chunk],
        n_features: int,
        dtype: torch.dtype,
        ranks: Ranks,
        provenance: Provenance | None,
        memory: int,
    ) -> None:
        self._chunks, self.n_features, self.dtype, self.ranks = tuple(chunks), n_features, dtype, ranks
        self.provenance, self.memory, self._blind = provenance, memory, False
        widths = set(ranks.all_gather(n_features))
        if len(widths) > 1:
            raise ValueError(f"all ranks must have the same number of features, got {sorted(widths)}")

    def __repr__(self) -> str:
        return (
            f"PairShards({len(self)} pairs of {self.n_features} features, {self.n_own} of them here, in "
            f"{len(self._chunks)} chunks, rank {self.ranks.rank} of {self.ranks.size})"
        )

    def __len__(self) -> int:
        """Number of pairs of all ranks."""
        return sum(self.counts)

    @property
    def n_own(self) -> int:
        """Number of pairs of this rank."""
        return sum(chunk.n_rows for chunk in self._chunks)

    @cached_property
    def counts(self) -> list[int]:
        """Number of pairs of each rank."""
        return self.ranks.all_gather(self.n_own)

    @property
    def in_memory(self) -> bool:
        """Whether this rank holds its pairs."""
        return all(isinstance(chunk, HeldChunk) for chunk in self._chunks)

    @property
    def chunks(self) -> Iterator[Chunk]:
        """This rank's pairs, chunk by chunk."""
        for chunk in self._chunks:
            yield _Blind(chunk) if self._blind else chunk

    def without_contexts(self) -> PairShards:
        """The same activations, with c = a, for methods that are blind to the model."""
        blind = copy(self)
        blind._blind = True
        return blind

    def gathered(self) -> Pairs:
        """All pairs on every rank: for collections that are smaller than what the solvers send anyway."""
        empty = torch.empty(0, self.n_features, dtype=self.dtype)
        read = [chunk.read() for chunk in self.chunks] or [(empty, empty)]
        a, c = (torch.cat(rows) for rows in zip(*read, strict=True))
        return Pairs(self.ranks.rows(a), self.ranks.rows(c), provenance=self.provenance)


@dataclass(frozen=True)
class _Blind:
    """A chunk with c = a."""

    chunk: Chunk

    @property
    def n_rows(self) -> int:
        return self.chunk.n_rows

    def read(self) -> tuple[Tensor, Tensor]:
        a, _ = self.chunk.read()
        return a, a


def _slices(files: Sequence[tuple[Path, int]], wanted: range) -> list[FileRows]:
    """The rows `wanted` of files, counted over all of them."""
    slices, first = [], 0
    for file, n_rows in files:
        begin, end = max(wanted.start, first), min(wanted.stop, first + n_rows)
        if begin < end:
            slices.append(FileRows(file, begin - first, end - first))
        first += n_rows
    return slices


def _grouped(slices: Sequence[FileRows], size: int) -> Iterator[tuple[FileRows, ...]]:
    """The same rows in groups of `size`, the last one smaller."""
    group: list[FileRows] = []
    room = size
    for piece in slices:
        begin = piece.begin
        while begin < piece.end:
            end = min(piece.end, begin + room)
            group.append(FileRows(piece.path, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield tuple(group)
                group, room = [], size
    if group:
        yield tuple(group)
