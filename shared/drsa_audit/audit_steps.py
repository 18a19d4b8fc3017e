"""The steps from files to what a report shows: pairs, concepts, maps, relevance, patch flipping.

Each keeps what it has done in a folder, batch by batch, and goes on from there.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from drsa_core import Pairs, PairStore, Subspaces
from drsa_core.evaluation import patch_flipping
from drsa_core.layer import RelevanceLossWarning
from drsa_core.storage import read_tensors, write_tensors
from torch import Tensor

from .errors import BadInput, one_line, one_writer
from .session import Session
from .work import Work, read_json, write_json

_KIND, _VERSION = "explained images", 1
#: Beside what a step keeps: what there was to note about it.
NOTES = "notes.json"
#: Forward passes that cost about as much as one image: to collect pairs; one explanation, and each concept.
PASSES = {"lrp": (6, 6, 2), "gxi": (4, 6, 1), "ig": (130, 160, 15), "shapley": (4000, 8000, 1000)}


@dataclass(frozen=True)
class Explained:
    """Images with their concept maps, on the CPU.

    Attributes
    ----------
    names : list of str
        Of the files.
    pixels : tensor, shape (N, 3, H, W)
        In [0, 1].
    maps : tensor, shape (N, K, H, W)
        Relevance of each concept, summed over colour channels.
    whole : tensor, shape (N, H, W)
        The map of the method by itself.
    relevance : tensor, shape (N, K)
        R_k at the layer.
    score : tensor, shape (N,)
        The explained output.
    rank : tensor of int, shape (N,)
        Of the explained output among all; 1 is the prediction. 0 where there is one output only.
    predicted : tensor of int, shape (N,)
        The largest output.
    certificate : dict
        What adds up to what: the largest differences over batches, and the shares of all images together.
    """

    names: list[str]
    pixels: Tensor
    maps: Tensor
    whole: Tensor
    relevance: Tensor
    score: Tensor
    rank: Tensor
    predicted: Tensor
    certificate: dict[str, Any]

    def __len__(self) -> int:
        return len(self.names)


def forward_seconds(session: Session, inputs: Tensor) -> float:
    """Time of a forward pass of one image, for estimates."""
    batch = inputs[: session.batch_size]
    with torch.no_grad():
        session.network.model(batch.clone())
        begin = time.perf_counter()
        session.network.model(batch.clone())
    return (time.perf_counter() - begin) / len(batch)


def collect(session: Session, inputs: Tensor, positions: int, folder: Path, forward: float) -> Pairs:
    """Pairs (a, c) at random positions of each image; batches that are in the folder are not done again."""
    batches = list(inputs.split(session.batch_size))
    estimate = forward * len(inputs) * PASSES[session.choice.backend][0]
    with (
        session.progress.step("pairs", f"Collecting pairs from {len(inputs)} images", estimate),
        noted(session, folder / NOTES),
        one_writer(),
    ):
        return session.backend.collect(
            batches, session.target.output, positions, session.seed, PairStore(folder)
        )


def explain(
    session: Session, files: list[Path], subspaces: Subspaces, folder: Path, forward: float
) -> Explained:
    """Concept maps of images, batch by batch into a folder."""
    inputs, pixels, names = session.read(files)
    once, each = PASSES[session.choice.backend][1:]
    estimate = forward * len(inputs) * (once + each * subspaces.n_subspaces)
    starts = range(0, len(inputs), session.batch_size)
    with (
        session.progress.step("maps", f"Explaining {len(inputs)} images", estimate),
        noted(session, folder / NOTES),
    ):
        session.check_use(subspaces)  # maps that lie here already were made by force, perhaps
        folder.mkdir(parents=True, exist_ok=True)
        for start in session.progress.bar(starts, "batch"):
            file = folder / f"{start:06d}.safetensors"
            if not file.exists():
                part = slice(start, start + session.batch_size)
                _explain_batch(session, inputs[part], pixels[part], names[part], subspaces, file)
    return load_explained(folder, len(inputs))


def load_explained(folder: Path, n_images: int | None = None) -> Explained:
    """What `explain` has put into a folder.

    Parameters
    ----------
    folder : path
    n_images : int, optional
        How many there must be.
    """
    parts, headers = [], []
    for file in sorted(folder.glob("[0-9]*.safetensors")):
        tensors, header = read_tensors(file, _KIND, _VERSION, "cpu")
        parts.append(tensors)
        headers.append(header)
    names = [name for header in headers for name in header["names"]]
    if not parts or (n_images is not None and len(names) != n_images):
        raise BadInput(f"{folder} is not complete; run `drsa audit` again, which goes on from there")
    joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    pixels = joined.pop("pixels").float() / 255
    certificate = _joined_certificate([header["certificate"] for header in headers], parts)
    return Explained(names=names, pixels=pixels, certificate=certificate, **joined)


def relevance_of(session: Session, inputs: Tensor, subspaces: Subspaces, what: str, forward: float) -> Tensor:
    """R_k of images at the layer, shape (N, K), for the explained class."""
    estimate = forward * len(inputs) * PASSES[session.choice.backend][0]
    parts = []
    with session.progress.step("relevance", f"Concepts of {len(inputs)} {what}", estimate), noted(session):
        for batch in session.progress.bar(inputs.split(session.batch_size), "batch"):
            parts.append(session.backend.concept_relevance(batch, session.target.output, subspaces).cpu())
    return torch.cat(parts)


def flip_patches(
    session: Session, explained: Explained, work: Work, key: dict[str, Any], forward: float
) -> Any:
    """Curves of patch flipping by the concepts together, the whole map and a random order, as JSON."""
    size = session.network.size
    patch = max(1, size // 14)
    orders = {
        "concepts": explained.maps,
        "one map": explained.whole[:, None],
        "random": torch.rand(
            len(explained),
            1,
            *explained.whole.shape[1:],
            generator=torch.Generator().manual_seed(session.seed),
        ),
    }
    estimate = forward * len(explained) * len(orders) * 11
    curves: dict[str, Any] = {"patch_size": patch, "curves": {}}
    with (
        session.progress.step("flipping", f"Removing patches of {len(explained)} images", estimate),
        noted(session, work.place("flipping", {**key, "patch": patch}, ".notes.json")),
    ):
        inputs = session.network.preprocessing.to_inputs(explained.pixels).to(session.device)
        for name, maps in orders.items():
            file = work.place(f"flipping-{name.replace(' ', '-')}", {**key, "patch": patch}, ".json")
            if not file.exists():
                found = patch_flipping(
                    session.network.model,
                    inputs,
                    # The relevance of a pixel is shared by its channels, as patches only see the sum.
                    maps[:, :, None].expand(-1, -1, inputs.shape[1], -1, -1) / inputs.shape[1],
                    session.target.output,
                    session.network.preprocessing,
                    patch_size=patch,
                    batch_size=8,
                    progress=session.progress.shown,
                )
                write_json(
                    file,
                    {
                        "share": found.removed.mean(0).tolist(),
                        "score": found.scores.mean(0).tolist(),
                        "aupc": float(found.aupc_of_removed.mean()),
                    },
                )
            curves["curves"][name] = read_json(file)
    return curves


@contextmanager
def noted(session: Session, file: Path | None = None) -> Iterator[None]:
    """What the library warns about becomes a note, once; subspaces of another model are refused.

    Parameters
    ----------
    session : Session
    file : path, optional
        Where all notes of a step are kept whose results are, too: a run that finds them there says the same.
    """
    kept = [] if file is None else repeat_notes(session, file)
    n_before = len(session.progress.notes)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    except ValueError as error:
        if "were made for something else" in str(error):
            raise BadInput(f"{error}; --force uses them all the same") from error
        raise
    finally:
        for warning in caught:
            if issubclass(warning.category, RelevanceLossWarning):
                continue  # the certificate says it in numbers
            if issubclass(warning.category, UserWarning):
                session.progress.note(one_line(warning.message, 300))
        new = session.progress.notes[n_before:]
        if file is not None and new and file.parent.is_dir():
            write_json(file, [*kept, *new])


def repeat_notes(session: Session, file: Path) -> list[str]:
    """Note again what an earlier run has noted about a step, and kept in a file."""
    kept: list[str] = read_json(file) if file.exists() else []
    for text in kept:
        session.progress.note(text)
    return kept


def _explain_batch(
    session: Session, inputs: Tensor, pixels: Tensor, names: list[str], subspaces: Subspaces, file: Path
) -> None:
    target = session.target.output
    with torch.no_grad():
        outputs = session.network.model(inputs.clone()).cpu()
    found = session.backend.explanation(inputs, target, subspaces)
    whole = found.maps.sum(1) if found.whole is None else found.whole
    tensors = {
        "pixels": (pixels * 255).round().to(torch.uint8),
        "maps": found.maps.sum(2).float().cpu(),
        "whole": whole.sum(1).float().cpu(),
        "relevance": found.concept_relevance.detach().float().cpu(),
        "score": found.score.detach().float().cpu(),
        # One output, a logit for or against the class, say, has no rank.
        "rank": (1 + (outputs > outputs[:, target, None]).sum(1)) * (outputs.shape[1] > 1),
        "predicted": outputs.argmax(1),
    }
    header = {"names": names, "certificate": found.certificate().as_dict()}
    write_tensors(file, {k: v.contiguous() for k, v in tensors.items()}, _KIND, _VERSION, header)


def _joined_certificate(parts: list[dict[str, Any]], tensors: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The certificate of all images from those of batches, and what was stored of each batch.

    The largest of the differences. Shares are those of all images together: a batch counts by its scores, or
    by its images where the share is not one of the score. Batches may be of any size.
    """
    scores = [batch["score"].double() for batch in tensors]
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
            sums = [float(batch["maps"].double().sum()) for batch in tensors]
            joined[name] = _ratio(sum(sums), torch.cat(scores))
        elif isinstance(values[0], dict):
            of_known = torch.cat([scores[n] for n in known])
            shares = {
                part: _ratio(sum(v.get(part, 0.0) * t for v, t in zip(values, totals, strict=True)), of_known)
                for part in values[0]
            }
            joined[name] = None if None in shares.values() else shares
        elif isinstance(values[0], int | float):
            sizes = [float(scores[n].abs().sum()) if name == "unaccounted" else len(scores[n]) for n in known]
            joined[name] = sum(v * size for v, size in zip(values, sizes, strict=True)) / (sum(sizes) or 1)
        else:
            joined[name] = values[0]
    return joined


def _ratio(part: float, scores: Tensor) -> float | None:
    """A part over the sum of scores; None where they cancel, as in `Explanation.certificate`."""
    total = float(scores.sum())
    return None if abs(total) <= 1e-6 * float(scores.abs().sum()) else part / total
