"""Tensors on disk: safetensors files with a JSON header that says what they are. Nothing is pickled."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_PROJECT = "captum-zennit-drsa"


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
    """Write atomically: the file is either the old one or the whole new one, also after a crash."""
    path = Path(path)
    described = {
        "project": _PROJECT,
        "kind": kind,
        "format_version": str(format_version),
        "header": json.dumps({**header, "versions": versions()}),
    }
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, temporary, described)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_tensors(
    path: str | os.PathLike[str], kind: str, format_version: int, device: torch.device | str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_tensors` wrote; raise ValueError for any other or damaged file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            described = file.metadata() or {}
            found = described.get("kind")
            if described.get("project") != _PROJECT or found != kind:
                raise ValueError(
                    f"{path} does not hold {kind} of {_PROJECT}, but {found or 'something else'}"
                )
            version = int(described["format_version"])
            if version > format_version:
                raise ValueError(
                    f"{path} has format version {version}, this release reads up to {format_version}: "
                    f"upgrade with pip install -U {_PROJECT}"
                )
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(described["header"])  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}): it may be truncated") from error
