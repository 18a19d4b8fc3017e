"""Tensors on disk: safetensors files with a JSON header that says what they are. Nothing is pickled."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .atomic_files import write_atomically
from .fingerprint import bytes_of

_PROJECT = "captum-zennit-drsa"
_DIGEST = "sha256"
# Files of this format version and later hold a digest of their content.
_FIRST_WITH_DIGEST = 2
# What safetensors calls the types that are written here.
_TYPE_NAMES = {torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.uint8: "U8"}
_TYPES = {name: dtype for dtype, name in _TYPE_NAMES.items()}


def versions() -> dict[str, str]:
    """Versions of this package and of those that decide its numbers, where installed."""
    found = {}
    for name in (_PROJECT, "torch", "numpy", "scipy", "captum", "zennit", "timm"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    kind: str,
    format_version: int,
    header: Mapping[str, Any],
) -> None:
    """Write atomically: the file is either the old one or the whole new one, also after a crash.

    Parameters
    ----------
    tensors : mapping from names to tensors
        Of float32, float64, int64 or uint8.
    kind, format_version
        What the file holds, to be named again on reading.
    header : mapping
        JSON-serialisable.
    """
    # The types with the longest elements come first, so that each tensor is aligned to its elements.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in ordered}
    described = {
        "project": _PROJECT,
        "kind": kind,
        "format_version": str(format_version),
        "header": json.dumps({**header, "versions": versions()}),
    }
    described[_DIGEST] = _content_digest(described, cpu)
    write_atomically(path, _safetensors(described, cpu))


def read_tensors(
    path: str | os.PathLike[str], kind: str, format_version: int, device: torch.device | str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_tensors` wrote, and compare its content with the digest in the file.

    Raises
    ------
    ValueError
        If the file is damaged or holds something else; the path is named.
    """
    path = Path(path)
    with _opened(path) as file:
        described = file.metadata() or {}
        _check_kind(path, described, kind, format_version)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _check_digest(path, described, tensors)
        header = _header_of(path, described)
    return {name: tensor.to(device) for name, tensor in tensors.items()}, header


def read_shapes(
    path: str | os.PathLike[str], kind: str, format_version: int
) -> tuple[dict[str, tuple[torch.dtype, tuple[int, ...]]], dict[str, Any]]:
    """Types and shapes of the tensors in a file, by name, and its header; the tensors are not read."""
    path = Path(path)
    with _opened(path) as file:
        described = file.metadata() or {}
        _check_kind(path, described, kind, format_version)
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: (_TYPES[part.get_dtype()], tuple(part.get_shape())) for name, part in slices.items()}
        return shapes, _header_of(path, described)


def read_rows(path: str | os.PathLike[str], names: Sequence[str], begin: int, end: int) -> list[Tensor]:
    """Rows `begin` … `end` − 1 of tensors of a file, copied out of a memory map; no digest is checked."""
    with _opened(Path(path)) as file:
        return [file.get_slice(name)[begin:end] for name in names]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file, mapped into memory; what is wrong with it becomes a ValueError that names it."""
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}): it may be truncated") from error
    except (KeyError, json.JSONDecodeError, UnicodeDecodeError, OverflowError, RuntimeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _header_of(path: Path, described: Mapping[str, str]) -> dict[str, Any]:
    header = json.loads(described["header"])
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no mapping")
    return header


def _check_kind(path: Path, described: Mapping[str, str], kind: str, format_version: int) -> None:
    found = described.get("kind")
    if described.get("project") != _PROJECT or found != kind:
        raise ValueError(f"{path} does not hold {kind} of {_PROJECT}, but {found or 'something else'}")
    version = described.get("format_version", "")
    if not (version.isascii() and version.isdigit() and int(version) >= 1):
        raise _damaged(path, f"its format version is {version!r}")
    if int(version) > format_version:
        raise ValueError(
            f"{path} has format version {version}, this release reads up to {format_version}: "
            f"upgrade with pip install -U {_PROJECT}"
        )


def _check_digest(path: Path, described: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    if int(described["format_version"]) < _FIRST_WITH_DIGEST:
        return
    if described.get(_DIGEST) != _content_digest(described, tensors):
        raise _damaged(path, "its content does not fit the SHA-256 in it")


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is damaged ({why}); take it from a backup, or make it again")


def _content_digest(described: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of all that a file says: its description but for the digest, and its tensors by name."""
    digest = hashlib.sha256()
    shapes = [[name, str(t.dtype), list(t.shape)] for name, t in sorted(tensors.items())]
    entries = sorted((key, value) for key, value in described.items() if key != _DIGEST)
    digest.update(json.dumps([entries, shapes]).encode())
    for _, tensor in sorted(tensors.items()):
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def _safetensors(described: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file piece by piece: its own writer holds a second copy of everything in memory."""
    entries: dict[str, Any] = {"__metadata__": dict(described)}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors.values():
        yield bytes_of(tensor)
