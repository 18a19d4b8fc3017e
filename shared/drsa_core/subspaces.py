"""`Subspaces`: the value that collection, solvers, adapters and evaluation exchange."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import scipy.linalg
import torch
from torch import Tensor

from .checks import (
    HALF,
    ArrayLike,
    as_float_tensor,
    as_int,
    check_finite,
    check_floating,
    full_precision,
    own_copy,
)
from .provenance import Provenance
from .storage import PathLike, read_header, read_tensors, write_tensors

_KIND, _FORMAT_VERSION = "subspaces", 3

RESIDUAL = "residual"


class Subspaces:
    """K subspaces of a D-dimensional activation space: the virtual layer U = (U_1|…|U_K).

    Parameters
    ----------
    basis : array or tensor, shape (D, Σ dims)
        Columns are the basis vectors, block after block. Orthonormal, unless `dual` is given.
    dims : sequence of int, length K
        Block sizes d_1 … d_K.
    names : sequence of str, length K, optional
        Default "S1" … "SK".
    dual : array or tensor, shape (D, Σ dims), optional
        For concept vectors that are not orthogonal (Note I): V with VᵀU = I, e.g. V = (U⁺)ᵀ. The virtual
        layer is then V_k U_kᵀ and R_k = (U_kᵀa)ᵀ(V_kᵀc).
    metadata : mapping, optional
        JSON-serialisable provenance: layer, model fingerprint, target, backend, solver, seed, …

    Attributes
    ----------
    n_subspaces, n_features : int
        Number of blocks K, and dimension D of the activation space.
    blocks, dual_blocks : tuple of tensor, shapes (D, d_k)
        The bases U_k, and the dual bases V_k, which are the same for orthonormal subspaces.

    Notes
    -----
    A `Subspaces` is a value: it copies what it is given, nothing can be assigned, and methods return new
    ones. Treat its tensors as read-only. `len(s)` is K; `s[0]`, `s["S1"]` and `s[1:]` are `Subspaces`, as
    are the blocks that iteration gives.
    """

    basis: Tensor
    dual: Tensor | None
    dims: tuple[int, ...]
    names: tuple[str, ...]
    n_subspaces: int
    n_features: int
    blocks: tuple[Tensor, ...]
    dual_blocks: tuple[Tensor, ...]
    _metadata: dict[str, Any]

    def __init__(
        self,
        basis: ArrayLike,
        dims: Sequence[int],
        names: Sequence[str] | None = None,
        dual: ArrayLike | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        basis = own_copy(as_float_tensor(basis, "basis"))
        dims = tuple(as_int(d, "every entry of dims", 1) for d in dims)
        if basis.ndim != 2 or not dims or sum(dims) != basis.shape[1]:
            raise ValueError(
                f"basis must have shape (D, sum(dims)), got {tuple(basis.shape)}; dims must add up to its "
                f"columns, got dims {dims} with sum {sum(dims)}"
            )
        check_finite(basis, "basis")
        if dual is not None:
            dual = own_copy(as_float_tensor(dual, "dual").to(basis))
            if dual.shape != basis.shape:
                raise ValueError(f"dual must have basis' shape {tuple(basis.shape)}, got {tuple(dual.shape)}")
        given, names = names, [f"S{k + 1}" for k in range(len(dims))] if names is None else list(names)
        # A single string is a sequence too, of its letters.
        are_texts = not isinstance(given, str) and all(isinstance(name, str) for name in names)
        if not are_texts or not len(set(names)) == len(names) == len(dims):
            raise ValueError(f"names must be {len(dims)} different strings, got {given!r}")
        v = basis if dual is None else dual
        vars(self).update(
            basis=basis,
            dual=dual,
            dims=dims,
            names=tuple(names),
            n_subspaces=len(dims),
            n_features=len(basis),
            blocks=basis.split(dims, dim=1),
            dual_blocks=v.split(dims, dim=1),
            _metadata=json.loads(json.dumps(dict(metadata or {}))),
        )
        # Rounding of an orthonormal matrix grows like sqrt(D)·eps; real mistakes are orders above this. The
        # eps is that of float32 for all: a basis learned in float32 may be used in float64.
        tolerance = 100 * torch.finfo(torch.float32).eps * len(basis) ** 0.5
        error = self.orthogonality_error
        if not error <= tolerance:  # also NaN, from products that leave the range of the dtype
            what, hint = "basisᵀ basis", "orthonormalise it (torch.linalg.qr), or pass dual="
            if dual is not None:
                what, hint = "dualᵀ basis", "dual must be a dual basis, e.g. torch.linalg.pinv(basis).T"
            raise ValueError(
                f"{what} must be the identity up to {tolerance:.1e}, but is off by {error:.1e}; {hint}"
            )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Subspaces are immutable: {name} cannot be set; methods return new ones")

    @property
    def metadata(self) -> dict[str, Any]:
        """A copy of the metadata; `with_metadata` adds to it."""
        return deepcopy(self._metadata)

    @property
    def provenance(self) -> Provenance | None:
        """How the pairs were collected from which the subspaces were learned, if that is known."""
        entries = self._metadata.get("provenance")
        return None if entries is None else Provenance.from_dict(entries)

    @property
    def is_complete(self) -> bool:
        """Whether the blocks span the whole space, so that Σ_k of the parts is the whole."""
        return sum(self.dims) == self.n_features

    @property
    def device(self) -> torch.device:
        """Device of the basis."""
        return self.basis.device

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the basis."""
        return self.basis.dtype

    @property
    def orthogonality_error(self) -> float:
        """max |VᵀU − I|, with V = U for orthonormal subspaces."""
        with full_precision():
            gram = torch.cat(self.dual_blocks, dim=1).T @ self.basis
        return float((gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).abs().max())

    def __len__(self) -> int:
        return len(self.dims)

    def __getitem__(self, block: int | str | slice) -> Subspaces:
        return self.select(range(len(self))[block] if isinstance(block, slice) else [block])

    def __iter__(self) -> Iterator[Subspaces]:
        return (self.select([k]) for k in range(len(self)))

    def __repr__(self) -> str:
        blocks = ", ".join(f"{name}: {d}" for name, d in zip(self.names, self.dims, strict=True))
        kind = "" if self.dual is None else ", dual"
        return f"Subspaces(n_features={self.n_features}, {blocks}{kind})"

    @full_precision()
    def relevance(self, a: Tensor, c: Tensor, dim: int = 1) -> Tensor:
        """Relevance R_k = (U_kᵀa)ᵀ(V_kᵀc) of each block at each position (Eq. for R_k, section 3.2).

        Parameters
        ----------
        a, c : tensor, shape (…, D, …)
            Activations and contexts, the D features along `dim`.

        Returns
        -------
        tensor, shape (…, K, …)
            In float32 for half precision.
        """
        check_floating(a, "a (activations)")
        check_floating(c, "c (contexts)")
        if a.shape != c.shape:
            raise ValueError(f"a and c must have the same shape, got {tuple(a.shape)} and {tuple(c.shape)}")
        self._check_features(a, dim)
        if a.dtype in HALF:  # two digits are too few for sums over hundreds of features
            a, c = a.float(), c.float()
        a, c = a.movedim(dim, -1), c.movedim(dim, -1)
        products = (a @ self.basis.to(a)) * (c @ (self.basis if self.dual is None else self.dual).to(c))
        per_block = torch.stack([block.sum(-1) for block in products.split(self.dims, dim=-1)], dim=-1)
        return per_block.movedim(-1, dim)

    def project(self, t: Tensor, k: int | str, dim: int = 1) -> Tensor:
        """Activations that pass through block k: V_k U_kᵀ t, which is U_k U_kᵀ t for orthonormal blocks.

        The result is contiguous, whatever the strides of `t`.
        """
        k = k if type(k) is int and 0 <= k < self.n_subspaces else self._index(k)
        return self._through(t, self.blocks[k], self.dual_blocks[k], dim)

    def project_context(self, t: Tensor, k: int | str, dim: int = 1) -> Tensor:
        """Contexts that pass back through block k: U_k V_kᵀ t, the transpose of `project`; contiguous."""
        k = k if type(k) is int and 0 <= k < self.n_subspaces else self._index(k)
        return self._through(t, self.dual_blocks[k], self.blocks[k], dim)

    @full_precision()
    def completed(self) -> Subspaces:
        """With the orthogonal complement as a last block named "residual", so that Σ_k is the identity."""
        if self.is_complete:
            return self
        complement = _complement(self.basis)
        basis, dual = torch.cat([self.basis, complement], dim=1), None
        if self.dual is not None:
            # The residual map I − V Uᵀ is Z Wᵀ, with Z ⟂ U, W ⟂ V and WᵀZ = I.
            other = _complement(self.dual)
            basis = torch.cat([self.basis, other @ torch.linalg.inv(complement.T @ other)], dim=1)
            dual = torch.cat([self.dual, complement], dim=1)
        dims = (*self.dims, self.n_features - sum(self.dims))
        return Subspaces(basis, dims, (*self.names, RESIDUAL), dual, self._metadata)

    def select(self, blocks: Sequence[int | str]) -> Subspaces:
        """The named or numbered blocks, in the given order: selection and reordering in one."""
        if isinstance(blocks, str | int):
            raise TypeError(f"select takes a sequence of blocks, got {blocks!r}; write [{blocks!r}]")
        indices = [self._index(block) for block in blocks]
        if not indices or len(set(indices)) != len(indices):
            raise ValueError(f"select takes each block at most once, and one at least, got {indices}")
        columns = torch.arange(self.basis.shape[1], device=self.device).split(self.dims)
        chosen = torch.cat([columns[i] for i in indices])
        return Subspaces(
            self.basis[:, chosen],
            [self.dims[i] for i in indices],
            [self.names[i] for i in indices],
            None if self.dual is None else self.dual[:, chosen],
            _metadata_of_blocks(self._metadata, indices),
        )

    def renamed(self, names: Sequence[str] | Mapping[str, str]) -> Subspaces:
        """The same subspaces under other names.

        Parameters
        ----------
        names : sequence of K str, or mapping
            All names in the order of the blocks, or new ones for some of the old.
        """
        if isinstance(names, Mapping):
            changed = {self._index(name): new for name, new in names.items()}
            names = [changed.get(k, name) for k, name in enumerate(self.names)]
        return Subspaces(self.basis, self.dims, names, self.dual, self._metadata)

    def with_metadata(self, **metadata: Any) -> Subspaces:
        """The same subspaces with entries of the metadata added or replaced."""
        return Subspaces(self.basis, self.dims, self.names, self.dual, {**self._metadata, **metadata})

    def with_provenance(self, provenance: Provenance | None) -> Subspaces:
        """The same subspaces with another provenance, or none."""
        metadata = {name: value for name, value in self._metadata.items() if name != "provenance"}
        if provenance is not None:
            metadata["provenance"] = provenance.as_dict()
        return Subspaces(self.basis, self.dims, self.names, self.dual, metadata)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Subspaces:
        """The same subspaces on another device, or in float32 or float64."""
        if dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"subspaces are in float32 or float64, also for half precision, got {dtype}")
        dual = None if self.dual is None else self.dual.to(device=device, dtype=dtype)
        basis = self.basis.to(device=device, dtype=dtype)
        return Subspaces(basis, self.dims, self.names, dual, self._metadata)

    def principal_angles(
        self, other: Subspaces, k: int | str | None = None, other_k: int | str | None = None
    ) -> Tensor:
        """Principal angles in radians, largest first, between block k and block `other_k` of `other`.

        None stands for the span of all blocks.

        Returns
        -------
        tensor, shape (min(d, d'),)
        """
        if other.n_features != self.n_features:
            raise ValueError(
                f"both must live in one space: self has {self.n_features} features, other {other.n_features}"
            )
        mine = self.basis if k is None else self.blocks[self._index(k)]
        theirs = other.basis if other_k is None else other.blocks[other._index(other_k)]
        angles = scipy.linalg.subspace_angles(mine.double().cpu().numpy(), theirs.double().cpu().numpy())
        return torch.as_tensor(angles)

    def save(self, path: PathLike) -> None:
        """Write a safetensors file with the metadata as JSON in its header."""
        tensors = {"basis": self.basis}
        if self.dual is not None:
            tensors["dual"] = self.dual
        header = {"dims": self.dims, "names": self.names, "metadata": self._metadata}
        write_tensors(path, tensors, _KIND, _FORMAT_VERSION, header)

    @classmethod
    def load(cls, path: PathLike, device: torch.device | str = "cpu") -> Subspaces:
        """Read what `save` wrote; ValueError with the path if the file is damaged. Nothing is unpickled."""
        tensors, header = read_tensors(path, _KIND, _FORMAT_VERSION, device)
        return cls(tensors["basis"], header["dims"], header["names"], tensors.get("dual"), header["metadata"])

    def _index(self, block: int | str) -> int:
        if not isinstance(block, str):
            k = as_int(block, "a block, if not a name,")
            if not -len(self) <= k < len(self):
                raise IndexError(f"block {k} does not exist; there are {len(self)}, counted from 0")
            return k % len(self)
        if block not in self.names:
            raise ValueError(f"no block is named {block!r}; the names are {', '.join(self.names)}")
        return self.names.index(block)

    def _check_features(self, t: Tensor, dim: int) -> None:
        if not -t.ndim <= dim < t.ndim or t.shape[dim] != self.n_features:
            raise ValueError(
                f"expected {self.n_features} features along dim {dim}, got a tensor of shape {tuple(t.shape)}"
            )

    @full_precision()
    def _through(self, t: Tensor, inward: Tensor, outward: Tensor, dim: int) -> Tensor:
        """outward inwardᵀ along `dim`. Contiguous, as torch's BatchNorm misreads other cotangents."""
        check_floating(t, "t")
        self._check_features(t, dim)
        dim, dtype = dim % t.ndim, t.dtype
        t = t.float() if dtype in HALF else t
        inward, outward = inward.to(t), outward.to(t)
        n_before, n_after = math.prod(t.shape[:dim]), math.prod(t.shape[dim + 1 :])
        if n_after == 1:
            projected = t.reshape(n_before, self.n_features) @ inward @ outward.T
        else:
            # From the left, so that the features stay where they are and nothing is permuted.
            columns = t.reshape(n_before, self.n_features, n_after)
            coordinates = torch.bmm(inward.T.expand(n_before, -1, -1), columns)
            projected = torch.bmm(outward.expand(n_before, -1, -1), coordinates)
        return projected.reshape(t.shape).to(dtype)


def subspaces_header(path: PathLike) -> dict[str, Any]:
    """`dims`, `names` and `metadata` of a file of subspaces; the basis is not read."""
    return read_header(path, _KIND, _FORMAT_VERSION)[1]


def _complement(basis: Tensor) -> Tensor:
    """An orthonormal basis of the orthogonal complement of the columns, shape (D, D − m)."""
    full = torch.linalg.qr(basis.double(), mode="complete").Q
    return full[:, basis.shape[1] :].to(basis.dtype)


def _metadata_of_blocks(metadata: Mapping[str, Any], indices: Sequence[int]) -> Mapping[str, Any]:
    """Metadata of some of the blocks: `drsa_core.stability` notes an index for each."""
    noted = metadata.get("stability")
    index = noted.get("index") if isinstance(noted, dict) else None
    if not isinstance(noted, dict) or not isinstance(index, list):
        return metadata
    # A residual that was added later has none.
    of_blocks = [index[i] if i < len(index) else None for i in indices]
    return {**metadata, "stability": {**noted, "index": of_blocks}}
