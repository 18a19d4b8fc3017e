"""`Pairs`: activation vectors with their context vectors, as the solvers take them (Note E)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checks import ArrayLike, as_float_tensor, as_int, check_finite, check_pairs, own_copy, unit_scale
from .provenance import Provenance
from .storage import read_rows, read_shapes, read_tensors, write_tensors

_KIND = "pairs"
_FORMAT_VERSION = 2


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
        self._image = _check_image(image, len(self._a)).clone()
        self._provenance = _check_type(provenance)

    @classmethod
    def _owning(cls, a: Tensor, c: Tensor, image: Tensor, provenance: Provenance | None) -> Pairs:
        """Take over tensors that nobody else holds. As checked as others, but not copied."""
        pairs = cls.__new__(cls)
        pairs._a, pairs._c = check_pairs(a, c, min_rows=0)
        pairs._image = _check_image(image, len(pairs._a))
        pairs._provenance = _check_type(provenance)
        return pairs

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
        pairs._provenance = _check_type(provenance)
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
        if not parts:
            raise ValueError("concatenate needs at least one Pairs, got none")
        features = {part.a.shape[1] for part in parts}
        if len(features) > 1:
            raise ValueError(f"all parts must have the same number of features, got {sorted(features)}")
        provenance = common_provenance([part.provenance for part in parts])
        images, offset = [], 0
        for part in parts:
            images.append(part.image + offset)
            offset += int(part.image.max()) + 1 if len(part) else 0
        a, c = torch.cat([part.a for part in parts]), torch.cat([part.c for part in parts])
        return cls._owning(a, c, torch.cat(images), provenance)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file, with the provenance as JSON in its header."""
        self._save(path)

    def _save(self, path: str | PathLike[str], batch: str | None = None) -> None:
        """As `save`, with the digest of the batch that the pairs were collected from."""
        tensors = {"a": self._a, "c": self._c, "image": self._image}
        provenance = None if self._provenance is None else self._provenance.as_dict()
        header = {"provenance": provenance} | ({} if batch is None else {"batch": batch})
        write_tensors(path, tensors, _KIND, _FORMAT_VERSION, header)

    @classmethod
    def load(cls, path: str | PathLike[str], device: torch.device | str = "cpu") -> Pairs:
        """Read what `save` wrote; ValueError with the path if the file is damaged. Nothing is unpickled."""
        tensors, header = read_tensors(path, _KIND, _FORMAT_VERSION, device)
        entries = header.get("provenance")
        try:
            provenance = None if entries is None else Provenance.from_dict(entries)
            # Copied: tensors from a file may be a view of it, and the file may change.
            return cls(tensors["a"], tensors["c"], tensors["image"], provenance)
        except KeyError as error:
            raise ValueError(f"{path} lacks the entry {error}; save the pairs again") from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} does not hold valid pairs: {error}") from error


def pair_file_shape(path: str | PathLike[str]) -> tuple[int, int, torch.dtype, Provenance | None]:
    """N, D, dtype and provenance of a file of pairs; only its header is read."""
    shapes, header = read_shapes(path, _KIND, _FORMAT_VERSION)
    try:
        (dtype, shape), (other, other_shape) = shapes["a"], shapes["c"]
    except KeyError as error:
        raise ValueError(f"{path} lacks the entry {error}; save the pairs again") from error
    if len(shape) != 2 or shape != other_shape:
        raise ValueError(f"{path} does not hold valid pairs: a has shape {shape} and c {other_shape}")
    entries = header.get("provenance")
    provenance = None if entries is None else Provenance.from_dict(entries)
    return shape[0], shape[1], torch.promote_types(dtype, other), provenance


def check_pair_file(path: str | PathLike[str]) -> None:
    """ValueError with the path if a file of pairs is damaged; it is read through a memory map."""
    tensors, _ = read_tensors(path, _KIND, _FORMAT_VERSION)
    try:
        check_pairs(tensors["a"], tensors["c"], min_rows=0)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold valid pairs: {error}") from error


def pair_file_images(path: str | PathLike[str]) -> int:
    """Number of images in a file of pairs of one batch; nothing but its last image number is read."""
    n_rows = pair_file_shape(path)[0]
    return 1 + int(read_rows(path, ("image",), n_rows - 1, n_rows)[0]) if n_rows else 0


def pair_file_batch(path: str | PathLike[str]) -> str | None:
    """Digest of the batch from which a file of pairs was collected, if that was kept."""
    _, header = read_shapes(path, _KIND, _FORMAT_VERSION)
    digest = header.get("batch")
    return digest if isinstance(digest, str) else None


def _check_image(image: Tensor | np.ndarray[Any, Any] | None, n_rows: int) -> Tensor:
    if image is None:
        return torch.zeros(n_rows, dtype=torch.long, device="cpu")
    if isinstance(image, np.ma.MaskedArray):
        raise TypeError("image must not be a masked array; drop the masked entries, or fill them")
    numbers = torch.as_tensor(image, device="cpu")
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise TypeError(f"image must hold integers, the numbers of the images, got {numbers.dtype}")
    if numbers.shape != (n_rows,):
        raise ValueError(f"image must have shape ({n_rows},), got {tuple(numbers.shape)}")
    numbers = numbers.long()  # first: torch knows no minimum of unsigned numbers
    if n_rows and int(numbers.min()) < 0:
        raise ValueError(f"image must count from 0, got {int(numbers.min())}")
    return numbers


def _check_type(provenance: Provenance | None) -> Provenance | None:
    if not isinstance(provenance, Provenance | None):
        raise TypeError(f"provenance must be a Provenance or None, got {type(provenance).__name__}")
    return provenance


def common_provenance(parts: Sequence[Provenance | None]) -> Provenance | None:
    """The provenance of pairs that are joined, from those of the parts; ValueError if they contradict."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    # A part that does not know its model agrees with every other, but those must agree with each other.
    first = replace(known[0], model=next((part.model for part in known if part.model), None))
    for other in known[1:]:
        differences = first.differences(other, exact=True)
        if differences:
            raise ValueError(
                f"the parts were not collected in one way: {'; '.join(differences)}. To join them all the "
                "same, give up what is known about them: part.with_provenance(None)"
            )
    free: dict[str, Any] = {
        name: getattr(first, name) if len({getattr(part, name) for part in known}) == 1 else None
        for name in ("positions", "random_state", "target_order", "skip_tokens")
    }
    return replace(first, **free)


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
    if not -activation.ndim < channel_dim < activation.ndim or channel_dim == 0:
        raise ValueError(
            f"channel_dim must be an axis after that of the images, got {channel_dim} for an activation of "
            f"shape {tuple(activation.shape)}"
        )
    a = activation.detach().movedim(channel_dim, -1)
    c = context.detach().movedim(channel_dim, -1)
    n_images, n_features = a.shape[0], a.shape[-1]
    n_positions = math.prod(a.shape[1:-1])
    shape = (n_images, n_positions, n_features)
    a, c = a.reshape(shape), c.reshape(shape)
    # On the CPU, also after torch.set_default_device("cuda"): the generator is one of the CPU.
    if positions is None or as_int(positions, "positions", 1) >= n_positions:
        chosen = torch.arange(n_positions, device="cpu").expand(n_images, -1)
    else:
        drawn = [
            torch.randperm(n_positions, generator=generator, device="cpu")[:positions]
            for _ in range(n_images)
        ]
        chosen = torch.stack(drawn) if drawn else torch.empty(0, positions, dtype=torch.long, device="cpu")
    rows = torch.arange(n_images, device="cpu")[:, None].expand_as(chosen)
    where = (rows.to(a.device), chosen.to(a.device))
    return Pairs._owning(a[where].flatten(0, 1), c[where].flatten(0, 1), rows.flatten(), None)


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
