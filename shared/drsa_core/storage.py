"""Files: written whole or not at all, and compared with a checksum when they are read. Nothing is pickled."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import safetensors.torch
import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from torch import Tensor

from .provenance import bytes_of

PathLike: TypeAlias = "str | os.PathLike[str]"
Shapes: TypeAlias = "dict[str, tuple[torch.dtype, tuple[int, ...]]]"

_PROJECT = "captum-zennit-drsa"
_TYPES = {"F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "U8": torch.uint8}


def versions() -> dict[str, str]:
    """Versions of this package and of those that decide its numbers, where installed."""
    found = {}
    for name in (_PROJECT, "torch", "numpy", "scipy", "captum", "zennit", "timm"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def write_atomically(path: PathLike, content: bytes) -> None:
    """Write a file by `os.replace`: it is the old one or the whole new one, also after a crash.

    A symbolic link stays, and a file that is replaced keeps its permissions. OSError names the path.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        raise OSError(f"cannot write to {path}: it is no file that could be replaced")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, f"could not write {path}: {error.strerror}") from error
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left in a folder; only for its one writer, see `locked`."""
    for file in folder.glob(".*.tmp"):
        if re.fullmatch(r"\..+\.[a-z0-9_]{8}\.tmp", file.name):
            file.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A folder for one writer, without what a killed one left; RuntimeError if another is at work."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RuntimeError(
            f"another writer is adding to {folder}; wait until it is done, or use another folder"
        ) from None
    try:
        remove_leftovers(folder)
        yield
    finally:
        lock.release()


def write_json(path: PathLike, content: Any) -> None:
    """Write JSON atomically."""
    write_atomically(path, json.dumps(content, indent=1).encode())


def read_json(path: PathLike) -> Any:
    """Read JSON; ValueError with the path if it is none."""
    try:
        return json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it, and run the same again") from error


def write_tensors(
    path: PathLike, tensors: Mapping[str, Tensor], kind: str, format_version: int, header: Mapping[str, Any]
) -> None:
    """Write a safetensors file that says what it holds, with a JSON header and a SHA-256 of everything."""
    cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    about = {"kind": kind, "format_version": format_version, "header": {**header, "versions": versions()}}
    text = json.dumps(about)
    # One entry: safetensors orders several at random.
    content = safetensors.torch.save(cpu, {_PROJECT: f"{_digest(text, cpu)} {text}"})
    write_atomically(path, content)


def read_tensors(
    path: PathLike, kind: str, format_version: int, device: torch.device | str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_tensors` wrote; ValueError with the path if the file is damaged or holds something else."""
    with _opened(path, kind) as file:
        digest, text = _described(file)
        header = _header(text, kind, format_version)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if digest not in (None, _digest(text, tensors)):
            raise ValueError("the content does not fit the SHA-256 in it")
    return {name: tensor.to(device) for name, tensor in tensors.items()}, header


def read_header(path: PathLike, kind: str, format_version: int) -> tuple[Shapes, dict[str, Any]]:
    """Types and shapes of the tensors in a file, and its header; nothing else is read or checked."""
    with _opened(path, kind) as file:
        header = _header(_described(file)[1], kind, format_version)
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {n: (_TYPES[s.get_dtype()], tuple(s.get_shape())) for n, s in slices.items()}, header


def read_rows(path: PathLike, names: Sequence[str], begin: int, end: int) -> list[Tensor]:
    """Rows `begin` … `end` − 1 of tensors of a file, copied out of a memory map; no checksum is compared."""
    with _opened(path, "these rows") as file:
        return [file.get_slice(name)[begin:end] for name in names]


@contextmanager
def _opened(path: PathLike, kind: str) -> Iterator[Any]:
    """A safetensors file; whatever is wrong with it becomes a ValueError that names the path."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{path} is damaged, or does not hold {kind} of {_PROJECT}: {error}") from error


def _described(file: Any) -> tuple[str | None, str]:
    """SHA-256 and description in a file, as JSON; those of version 0.2 have several entries, and pass."""
    entries = file.metadata() or {}
    if _PROJECT in entries:
        digest, _, text = entries[_PROJECT].partition(" ")
        return digest, text
    old = {"kind": entries["kind"], "format_version": int(entries["format_version"])}
    return None, json.dumps(old | {"header": json.loads(entries["header"])})


def _header(text: str, kind: str, format_version: int) -> dict[str, Any]:
    about = json.loads(text)
    if about["kind"] != kind:
        raise ValueError(f"it holds {about['kind']}")
    if about["format_version"] > format_version:
        raise ValueError(f"it was written by a later release; upgrade with pip install -U {_PROJECT}")
    return dict(about["header"])


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    shapes = [[name, str(t.dtype), list(t.shape)] for name, t in sorted(tensors.items())]
    digest = hashlib.sha256(f"{text}{shapes}".encode())
    for _, tensor in sorted(tensors.items()):
        digest.update(bytes_of(tensor))
    return digest.hexdigest()
