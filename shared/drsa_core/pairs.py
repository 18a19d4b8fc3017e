"""`Pairs`: activation vectors with their context vectors, as the solvers take them (Note E)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from .provenance import Provenance
from .scaling import unit_scale
from .storage import read_tensors, write_tensors
from .validation import ArrayLike, as_float_tensor, check_finite, check_pairs, check_positive_int

_KIND = "pairs"
_FORMAT_VERSION = 1


class Pairs:
    """N activation vectors and their contexts; unpacks as `a, c = pairs`.

    Parameters
    ----------
    a, c : array or tensor, shape (N, D)
        Activations and contexts, row by row.
    image : tensor of int, shape (N,), optional
        Which image each row comes from. Default: all from image 0.
    provenance : Provenance, optional
        How they were collected.
    """

    def __init__(
        self,
        a: ArrayLike,
        c: ArrayLike,
        image: Tensor | None = None,
        provenance: Provenance | None = None,
    ) -> None:
        self.provenance = provenance
        self.a, self.c = check_pairs(a, c)
        self.image = torch.zeros(len(self.a), dtype=torch.long) if image is None else image.long().cpu()
        if self.image.shape != (len(self.a),):
            raise ValueError(f"image must have shape ({len(self.a)},), got {tuple(self.image.shape)}")

    def __len__(self) -> int:
        return len(self.a)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.a, self.c))

    def __repr__(self) -> str:
        return f"Pairs({len(self)} pairs of {self.a.shape[1]} features)"

    @classmethod
    def concatenate(cls, parts: Sequence[Pairs]) -> Pairs:
        """All pairs in one; image numbers go on counting from part to part."""
        if not parts:
            raise ValueError("concatenate needs at least one Pairs, got none")
        features = {part.a.shape[1] for part in parts}
        if len(features) > 1:
            raise ValueError(f"all parts must have the same number of features, got {sorted(features)}")
        images, offset = [], 0
        for part in parts:
            images.append(part.image + offset)
            offset += int(part.image.max()) + 1
        return cls(torch.cat([p.a for p in parts]), torch.cat([p.c for p in parts]), torch.cat(images))

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file."""
        write_tensors(path, {"a": self.a, "c": self.c, "image": self.image}, _KIND, _FORMAT_VERSION, {})

    @classmethod
    def load(cls, path: str | PathLike[str], device: torch.device | str = "cpu") -> Pairs:
        """Read what `save` wrote."""
        tensors, _ = read_tensors(path, _KIND, _FORMAT_VERSION, device)
        return cls(tensors["a"], tensors["c"], tensors["image"])


class PairStore:
    """A folder to which a long collection adds pairs batch by batch, and from which it can go on.

    Every `append` is one file, written atomically: after a crash what was appended is there.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        """Number of batches stored."""
        return len(self._files())

    def append(self, pairs: Pairs) -> None:
        """Store one more batch."""
        pairs.save(self.folder / f"{len(self):06d}.safetensors")

    def load(self, device: torch.device | str = "cpu") -> Pairs:
        """All stored batches, in order."""
        if not len(self):
            raise ValueError(f"{self.folder} holds no pairs yet")
        return Pairs.concatenate([Pairs.load(file, device) for file in self._files()])

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]*.safetensors"))


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
    a = activation.detach().movedim(channel_dim, -1)
    c = context.detach().movedim(channel_dim, -1)
    n_images, n_features = a.shape[0], a.shape[-1]
    a, c = a.reshape(n_images, -1, n_features), c.reshape(n_images, -1, n_features)
    n_positions = a.shape[1]
    if positions is None or check_positive_int(positions, "positions") >= n_positions:
        chosen = torch.arange(n_positions).expand(n_images, -1)
    else:
        chosen = torch.stack(
            [torch.randperm(n_positions, generator=generator)[:positions] for _ in range(n_images)]
        )
    rows = torch.arange(n_images)[:, None].expand_as(chosen)
    where = (rows.to(a.device), chosen.to(a.device))
    return Pairs(a[where].flatten(0, 1), c[where].flatten(0, 1), rows.flatten())


def normalise(vectors: ArrayLike) -> Tensor:
    """Scale a collection (N, D) to x / (D^¼ · sqrt(E_ij[x_ij²])), as in Note E."""
    tensor = as_float_tensor(vectors, "vectors")
    check_finite(tensor, "vectors")
    if not tensor.any():
        raise ValueError("cannot normalise vectors that are all zero")
    tensor, _ = unit_scale(tensor)
    root_mean_square = tensor.double().square().mean().sqrt()
    return tensor / (root_mean_square * tensor.shape[1] ** 0.25).to(tensor.dtype)


def level(a: Tensor, c: Tensor, exponent: float) -> tuple[Tensor, Tensor]:
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
