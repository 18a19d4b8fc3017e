"""Activation vectors with their context vectors, as the solvers take them (Note E)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checks import ArrayLike, as_float_tensor, as_int, check_finite, check_pairs, own_copy, unit_scale
from .distributed import ALONE, Ranks
from .provenance import Provenance, common_provenance
from .storage import PathLike, read_header, read_rows, read_tensors, write_tensors

_KIND, _FORMAT_VERSION = "pairs", 3

#: Bytes that pairs in work may take, by default.
MEMORY = 2**30


class Pairs:
    """N activation vectors and their contexts; unpacks as `a, c = pairs`.

    Parameters
    ----------
    a, c : array or tensor, shape (N, D)
        Activations and contexts, row by row. They are copied. N may be 0, as in an empty batch.
    image : tensor or array of int, shape (N,), optional
        Which image each row comes from. Default: all from image 0.
    provenance : Provenance, optional
        How they were collected.

    Notes
    -----
    A `Pairs` is a value: nothing can be assigned, and methods return new ones. Treat its tensors as
    read-only.
    """

    def __init__(
        self,
        a: ArrayLike,
        c: ArrayLike,
        image: Tensor | np.ndarray[Any, Any] | None = None,
        provenance: Provenance | None = None,
    ) -> None:
        checked_a, checked_c = check_pairs(a, c, min_rows=0)
        self._a, self._c = own_copy(checked_a), own_copy(checked_c)
        if image is None:
            image = torch.zeros(len(self._a), dtype=torch.long, device="cpu")
        self._image = torch.as_tensor(image, device="cpu").long().clone()
        if self._image.shape != (len(self._a),):
            raise ValueError(f"image must have shape ({len(self._a)},), got {tuple(self._image.shape)}")
        self._provenance = provenance

    @property
    def a(self) -> Tensor:
        """Activations, shape (N, D)."""
        return self._a

    @property
    def c(self) -> Tensor:
        """Contexts, shape (N, D)."""
        return self._c

    @property
    def image(self) -> Tensor:
        """Number of the image of each row, shape (N,), on the CPU."""
        return self._image

    @property
    def provenance(self) -> Provenance | None:
        """How the pairs were collected, if that is known."""
        return self._provenance

    def __len__(self) -> int:
        return len(self._a)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self._a, self._c))

    def __repr__(self) -> str:
        made = self._provenance
        where = "" if made is None else f" at {made.layer!r}, target {made.target!r}, {made.backend}"
        return f"Pairs({len(self)} pairs of {self._a.shape[1]} features{where})"

    def with_provenance(self, provenance: Provenance | None) -> Pairs:
        """The same pairs with another provenance, or none."""
        pairs = copy(self)  # with the same tensors: neither of the two changes them
        pairs._provenance = provenance
        return pairs

    def to(self, device: torch.device | str) -> Pairs:
        """The same pairs on another device."""
        pairs = copy(self)
        pairs._a, pairs._c = self._a.to(device), self._c.to(device)
        return pairs

    @classmethod
    def concatenate(cls, parts: Sequence[Pairs]) -> Pairs:
        """All pairs in one; image numbers go on counting from part to part.

        Raises
        ------
        ValueError
            If the parts differ in their features, or in their provenance other than positions, seed and
            skipped tokens. Those become None where they differ. Parts without provenance go with all others.
        """
        if not parts or len({part.a.shape[1] for part in parts}) > 1:
            raise ValueError(
                "concatenate needs at least one Pairs, and all with the same number of features, got "
                f"{[part.a.shape[1] for part in parts]}"
            )
        images, offset = [], 0
        for part in parts:
            images.append(part.image + offset)
            offset += int(part.image.max()) + 1 if len(part) else 0
        joined = copy(parts[0])
        joined._a, joined._c = torch.cat([part.a for part in parts]), torch.cat([part.c for part in parts])
        joined._image = torch.cat(images)
        return joined.with_provenance(common_provenance([part.provenance for part in parts]))

    def save(self, path: PathLike) -> None:
        """Write a safetensors file, with the provenance as JSON in its header."""
        self._save(path)

    def _save(self, path: PathLike, **about: Any) -> None:
        header = {"provenance": None if self._provenance is None else self._provenance.as_dict(), **about}
        tensors = {"a": self._a, "c": self._c, "image": self._image}
        write_tensors(path, tensors, _KIND, _FORMAT_VERSION, header)

    @classmethod
    def load(cls, path: PathLike, device: torch.device | str = "cpu") -> Pairs:
        """Read what `save` wrote; ValueError with the path if the file is damaged. Nothing is unpickled."""
        tensors, header = read_tensors(path, _KIND, _FORMAT_VERSION, device)
        made = header["provenance"] and Provenance.from_dict(header["provenance"])
        # Copied: tensors from a file may be a view of it, and the file may change.
        return cls(tensors["a"], tensors["c"], tensors["image"], made)


def pairs_header(path: PathLike) -> dict[str, Any]:
    """What a file of pairs says beside its tensors."""
    return read_header(path, _KIND, _FORMAT_VERSION)[1]


def sample_pairs(
    activation: Tensor,
    context: Tensor,
    positions: int | None,
    generator: torch.Generator | None = None,
    channel_dim: int = 1,
) -> Pairs:
    """Pairs at random positions of each image, without repetition (Note E: 20 of each image).

    Parameters
    ----------
    activation, context : tensor, shape (N, …, D, …)
        Activations and contexts of N images at one layer, features along `channel_dim`.
    positions : int or None
        Positions per image; all of them if None or if the layer has no more.
    generator : torch.Generator, optional
        A CPU generator, so that a seed gives the same positions on every device.
    """
    if activation.shape != context.shape:
        raise ValueError(
            f"activation and context must have one shape, got {tuple(activation.shape)} "
            f"and {tuple(context.shape)}"
        )
    if channel_dim in (0, -activation.ndim):
        raise ValueError(f"channel_dim must be an axis after that of the images, got {channel_dim}")
    a = activation.detach().movedim(channel_dim, -1)
    c = context.detach().movedim(channel_dim, -1)
    n_images, n_positions = a.shape[0], math.prod(a.shape[1:-1])
    shape = (n_images, n_positions, a.shape[-1])
    a, c = a.reshape(shape), c.reshape(shape)
    # On the CPU, also after torch.set_default_device("cuda"): the generator is one of the CPU.
    if positions is None or as_int(positions, "positions", 1) >= n_positions:
        chosen = torch.arange(n_positions, device="cpu").expand(n_images, -1)
    else:
        chosen = torch.empty(n_images, positions, dtype=torch.long, device="cpu")
        for row in chosen:
            row[:] = torch.randperm(n_positions, generator=generator, device="cpu")[:positions]
    images = torch.arange(n_images, device="cpu")[:, None].expand_as(chosen)
    where = (images.to(a.device), chosen.to(a.device))
    return Pairs(a[where].flatten(0, 1), c[where].flatten(0, 1), images.flatten())


def normalise(vectors: ArrayLike) -> Tensor:
    """Scale a collection (N, D) to x / (D^¼ · sqrt(E_ij[x_ij²])), as in Note E."""
    tensor = as_float_tensor(vectors, "vectors")
    check_finite(tensor, "vectors")
    if not tensor.any():
        raise ValueError("cannot normalise vectors that are all zero")
    tensor, _ = unit_scale(tensor)
    root_mean_square = tensor.double().square().mean().sqrt()
    return tensor / (root_mean_square * tensor.shape[1] ** 0.25).to(tensor.dtype)


def balanced(a: Tensor, c: Tensor, exponent: float) -> tuple[Tensor, Tensor]:
    """Scale each pair so that its relevance, in every subspace, is divided by (‖a_n‖ ‖c_n‖)^exponent.

    Both vectors get the same share of the factor, and pairs of zero length stay zero. With exponent 1 the
    relevance in the whole space is the cosine between a_n and c_n.
    """
    if exponent == 0:
        return a, c
    # In float64: squares of float32 numbers leave float32's range.
    a_double, c_double = a.double(), c.double()
    lengths = a_double.norm(dim=1, keepdim=True) * c_double.norm(dim=1, keepdim=True)
    factor = torch.where(lengths > 0, torch.where(lengths > 0, lengths, 1) ** (-exponent / 2), 0)
    return (a_double * factor).to(a.dtype), (c_double * factor).to(c.dtype)


@dataclass(frozen=True)
class Chunk:
    """Rows `begin` … `end` − 1 of pairs in memory or in a file, which is read when they are asked for."""

    source: Pairs | Path
    begin: int
    end: int
    dtype: torch.dtype
    device: torch.device

    def read(self) -> tuple[Tensor, Tensor]:
        """Activations and contexts, shapes (n, D)."""
        if isinstance(self.source, Pairs):
            return self.source.a[self.begin : self.end], self.source.c[self.begin : self.end]
        a, c = read_rows(self.source, ("a", "c"), self.begin, self.end)
        a, c = check_pairs(a, c)
        return a.to(self.device, self.dtype), c.to(self.device, self.dtype)


class PairShards:
    """The pairs of all ranks, of which this rank holds or reads its own; solvers take them like `Pairs`.

    `PRCA(…).fit(shards)` and `DRSA(…).fit(shards)` give on every rank what one process gives that has all
    pairs, up to rounding. Pairs do not move between ranks: sums over them do.

    Parameters
    ----------
    pairs : Pairs
        Those of this rank. The order of all is rank after rank.
    ranks : Ranks
        From `joined_ranks`. All ranks must make the same calls.
    """

    def __init__(self, pairs: Pairs, ranks: Ranks = ALONE) -> None:
        whole = Chunk(pairs, 0, len(pairs), pairs.a.dtype, pairs.a.device)
        self._set([whole], pairs.a.shape[1], pairs.a.dtype, ranks, pairs.provenance)

    @classmethod
    def from_files(
        cls,
        files: Sequence[PathLike],
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
            In order, of one collection as in `Pairs.concatenate`. Their checksums are not compared: see
            `PairStore.damaged`.
        ranks : Ranks
        shared : bool
            Whether all ranks see the same files, which are then split evenly between them; else each rank
            names its own.
        memory : int
            Bytes that the chunk in work may take, in float64 and with its products. `PRCA` needs no more;
            `DRSA` holds the pairs of its rank.
        device : device
            Where chunks are moved to.
        """
        memory = as_int(memory, "memory", 1)
        described = [read_header(file, _KIND, _FORMAT_VERSION) for file in files]
        shapes = [found["a"] for found, _ in described]
        widths = {shape[1] for _, shape in shapes}
        if len(widths) != 1:
            raise ValueError(f"all files must have the same number of features, got {sorted(widths)}")
        (n_features,) = widths
        provenance = common_provenance(
            [Provenance.from_dict(h["provenance"]) if h["provenance"] else None for _, h in described]
        )
        dtype = torch.float64 if any(dtype == torch.float64 for dtype, _ in shapes) else torch.float32
        n_rows = sum(shape[0] for _, shape in shapes)
        mine = ranks.share(n_rows) if shared else range(n_rows)
        # A chunk has at least 256 rows, so that products are large enough to be fast.
        size = max(256, memory // (32 * n_features))
        chunks, first = [], 0
        for file, (_, (n, _)) in zip(files, shapes, strict=True):
            here = range(max(mine.start - first, 0), min(mine.stop - first, n))
            for begin in here[::size]:
                end = min(begin + size, here.stop)
                chunks.append(Chunk(Path(file), begin, end, dtype, torch.device(device)))
            first += n
        shards = cls.__new__(cls)
        shards._set(chunks, n_features, dtype, ranks, provenance)
        return shards

    def _set(
        self,
        chunks: Sequence[Chunk],
        n_features: int,
        dtype: torch.dtype,
        ranks: Ranks,
        provenance: Provenance | None,
    ) -> None:
        self.chunks, self.n_features, self.dtype, self.ranks = tuple(chunks), n_features, dtype, ranks
        self.provenance = provenance
        widths = set(ranks.all_gather(n_features))
        if len(widths) > 1:
            raise ValueError(f"all ranks must have the same number of features, got {sorted(widths)}")
        self._n_pairs = sum(ranks.all_gather(sum(chunk.end - chunk.begin for chunk in chunks)))

    def __repr__(self) -> str:
        return (
            f"PairShards({len(self)} pairs of {self.n_features} features in {len(self.chunks)} chunks here, "
            f"rank {self.ranks.rank} of {self.ranks.size})"
        )

    def __len__(self) -> int:
        """Number of pairs of all ranks."""
        return self._n_pairs
