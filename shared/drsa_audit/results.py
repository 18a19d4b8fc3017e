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
        certificate = join_certificates([header for _, header in parts], tensors)
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


def join_certificates(headers: list[dict[str, Any]], batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The certificate of all images, from the headers and tensors of batches of any size.

    Of differences the largest. Shares of the score are those of all images together; what is lost at the
    layer is a mean over images.
    """
    sizes, scores = [len(batch["score"]) for batch in batches], torch.cat([b["score"] for b in batches])
    total = float(scores.double().sum())
    is_defined = abs(total) > 1e-6 * float(scores.double().abs().sum())  # scores may cancel
    joined: dict[str, Any] = {}
    for name in headers[0]["certificate"]:
        found = [(h["certificate"].get(name), n) for h, n in zip(headers, sizes, strict=True)]
        values = [value for value, _ in found if value is not None]
        if name in ("share_of_score", "absorbed"):
            joined[name] = None
        elif not values or isinstance(values[0], bool):
            joined[name] = values[0] if values else None
        elif name in ("on_zero_activations", "around_the_layer"):
            known = [(value, n) for value, n in found if value is not None]
            joined[name] = sum(value * n for value, n in known) / sum(n for _, n in known)
        else:
            joined[name] = max(values)
    if is_defined and any(h["certificate"].get("share_of_score") is not None for h in headers):
        joined["share_of_score"] = sum(float(b["maps"].double().sum()) for b in batches) / total
    absorbed = [h["absorbed"] for h in headers if h.get("absorbed") is not None]
    if is_defined and len(absorbed) == len(headers):
        joined["absorbed"] = {part: sum(a[part] for a in absorbed) / total for part in absorbed[0]}
    return joined
