"""What an audit found, as values that files hold: explained images, and the record beside them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from drsa_core.storage import read_json, read_tensors, write_json
from torch import Tensor

from .progress import BadInput

RECORD = "audit.json"
#: Kind and version of the files with explained images.
KIND = ("explained images", 1)


@dataclass(frozen=True)
class Explained:
    """Images with their concept maps, on the CPU."""

    names: list[str]  # of the files
    pixels: Tensor  # (N, 3, H, W) in [0, 1]
    maps: Tensor  # (N, K, H, W), relevance of each concept, summed over colour channels
    whole: Tensor  # (N, H, W), the map of the method by itself
    relevance: Tensor  # (N, K), R_k at the layer
    score: Tensor  # (N,), the explained output
    rank: Tensor  # (N,), of the explained output; 1 is the prediction, 0 where there is one output only
    predicted: Tensor  # (N,), the largest output
    certificate: dict[str, Any]  # what adds up to what, of all images

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def load(cls, folder: Path, n_images: int | None = None) -> Explained:
        """What `steps.explain` has put into a folder, of as many images as there must be."""
        parts = [read_tensors(file, *KIND) for file in sorted(folder.glob("[0-9]*.safetensors"))]
        names = [name for _, header in parts for name in header["names"]]
        if not parts or (n_images is not None and len(names) != n_images):
            raise BadInput(f"{folder} is not complete; run `drsa audit` again, which goes on from there")
        tensors = [tensors for tensors, _ in parts]
        joined = {key: torch.cat([part[key] for part in tensors]) for key in tensors[0]}
        pixels = joined.pop("pixels").float() / 255
        certificate = join_certificates([header["certificate"] for _, header in parts], tensors)
        return cls(names=names, pixels=pixels, certificate=certificate, **joined)


@dataclass(frozen=True, kw_only=True)
class AuditRecord:
    """An audit in numbers and words: all that a report needs beside maps and subspaces, as JSON."""

    model: dict[str, Any]  # `name`, `kind` and `fingerprint`
    target: dict[str, Any]  # `name`, `index` and `output`
    layer: dict[str, Any]  # `name`, `kind` and `shape`
    method: dict[str, Any]  # `backend`, `name`, `reason`, and whether it `is_other` than asked for
    doctor: dict[str, Any] | None
    subspaces: str  # the file beside this record
    explained: str  # the folder beside this record
    n_train: int
    train_relevance: list[list[float]]  # R_k of the images that concepts were learned from
    other_classes: dict[str, list[list[float]]]  # R_k of images of other classes
    history: list[float]  # objective along the fit
    settings: dict[str, Any]
    versions: dict[str, str]
    seconds: dict[str, float]
    command: str
    created: str
    notes: list[str] = field(default_factory=list)
    stability: dict[str, Any] | None = None
    choice_of_k: dict[str, Any] | None = None
    flipping: dict[str, Any] | None = None
    ablation: dict[str, Any] | None = None

    def save(self, folder: Path) -> None:
        """Write it into a work folder."""
        write_json(folder / RECORD, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> AuditRecord:
        """Read it from a work folder."""
        if not (folder / RECORD).is_file():
            raise BadInput(f"{folder} holds no finished audit; run `drsa audit`, which writes such a folder")
        entries = read_json(folder / RECORD)
        known = {f.name for f in fields(cls)}
        try:
            return cls(**{name: value for name, value in entries.items() if name in known})
        except (TypeError, AttributeError) as error:
            raise BadInput(f"{folder / RECORD} is not the record of an audit: {error}") from error


def join_certificates(parts: list[dict[str, Any]], batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The certificate of all images from those of batches, and what was stored of each batch.

    The largest of the differences. Shares are those of all images together: a batch counts by its scores, or
    by its images where the share is not one of the score. Batches may be of any size.
    """
    scores = [batch["score"].double() for batch in batches]
    joined: dict[str, Any] = {}
    for name in parts[0]:
        known = [n for n, part in enumerate(parts) if part[name] is not None]
        values = [parts[n][name] for n in known]
        totals = [float(scores[n].sum()) for n in known]
        if not values or isinstance(values[0], bool | str):
            joined[name] = values[0] if values else None
        elif "_to_" in name:
            joined[name] = max(values)
        elif name == "share_of_score":
            # Of all batches, also those whose own scores cancel and have no share.
            sums = [float(batch["maps"].double().sum()) for batch in batches]
            joined[name] = _ratio(sum(sums), torch.cat(scores))
        elif isinstance(values[0], dict):
            of_known = torch.cat([scores[n] for n in known])
            shares = {
                part: _ratio(sum(v.get(part, 0.0) * t for v, t in zip(values, totals, strict=True)), of_known)
                for part in values[0]
            }
            joined[name] = None if None in shares.values() else shares
        else:
            sizes = [float(scores[n].abs().sum()) if name == "unaccounted" else len(scores[n]) for n in known]
            joined[name] = sum(v * size for v, size in zip(values, sizes, strict=True)) / (sum(sizes) or 1)
    return joined


def _ratio(part: float, scores: Tensor) -> float | None:
    """A part over the sum of scores; None where they cancel, as in `Explanation.certificate`."""
    total = float(scores.sum())
    return None if abs(total) <= 1e-6 * float(scores.abs().sum()) else part / total
