"""One pass over a data set with labels that fills one store of pairs for each class.

Each batch is a unit: its pairs go to the folder of their class, in a file named after the number of the
batch, and then an entry in the journal says so. A batch without an entry, or with a file missing, is done
again, with the same bits. The files do not depend on the number of ranks, so that a job may go on with
another one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .atomic_files import remove_leftovers, write_json
from .collect import labels_of, moved, pairs_at_positions
from .distributed import Ranks
from .explainer import Explainer
from .layer import Inputs
from .numbered_batches import NumberedBatches, batch_digest, check_same_batch, inputs_of
from .pair_store import PairStore
from .pairs import Pairs
from .provenance import Provenance
from .targets import LABEL


class BatchOfClass(NamedTuple):
    """How many images of a class a batch has, and the digest of the batch, if that was kept."""

    n_images: int
    digest: str | None


@dataclass(frozen=True)
class ClassPairs:
    """Folders of pairs by class, and the journal of batches.

    Attributes
    ----------
    folder : Path
        Of the job.
    provenance : Provenance
        How the pairs are made, with "label" as the target.
    """

    folder: Path
    provenance: Provenance

    def prepare(self) -> None:
        """Make the folders, and remove what killed writers left. For one rank, before all others begin."""
        self._journal.mkdir(parents=True, exist_ok=True)
        (self.folder / "pairs").mkdir(exist_ok=True)
        for folder in (self._journal, *(self.folder / "pairs").iterdir()):
            remove_leftovers(folder)

    def store(self, label: int) -> PairStore:
        """The store of a class."""
        return PairStore(self.folder / "pairs" / str(label))

    def holds(self, number: int, n_images: int) -> bool:
        """Whether a batch is in the journal and all of its files are there."""
        entry = self._entry(number)
        if entry is None:
            return False
        if entry["images"] != n_images:
            raise ValueError(
                f"batch {number} of {self.folder} has {entry['images']} images, but the loader gives "
                f"{n_images}: the job was begun with batches of another size. Use that size again, or "
                "another folder"
            )
        return all(self._file(int(label), number).exists() for label in entry["classes"])

    def compare(self, number: int, batch: Any) -> None:
        """Raise an error if a batch in the journal was another one; entries of earlier releases pass."""
        entry = self._entry(number)
        before = None if entry is None else entry.get("digest")
        check_same_batch(before, batch, True, f"batch {number} of {self.folder}")

    def put(self, number: int, batch: Any, n_images: int, pairs: dict[int, Pairs]) -> None:
        """Store the pairs of a batch, class by class, then the entry of the journal."""
        for label, of_class in pairs.items():
            file = self._file(label, number)
            file.parent.mkdir(exist_ok=True)
            of_class.with_provenance(self.of_class(label)).save(file)
        classes = {str(label): int(of_class.image.max()) + 1 for label, of_class in pairs.items()}
        entry = {"images": n_images, "classes": classes, "digest": batch_digest(batch, True)}
        write_json(self._journal / f"{number:06d}.json", entry)

    def of_class(self, label: int) -> Provenance:
        """How the pairs of one class are made."""
        return replace(self.provenance, target=label)

    def contents(self) -> dict[int, dict[int, BatchOfClass]]:
        """For each class, in order, what each batch has of it, by the number of the batch."""
        found: dict[int, dict[int, BatchOfClass]] = defaultdict(dict)
        for number in self.numbers():
            entry = self._entry(number)
            for label, n_images in ({} if entry is None else entry["classes"]).items():
                found[int(label)][number] = BatchOfClass(n_images, (entry or {}).get("digest"))
        return {label: found[label] for label in sorted(found)}

    def numbers(self) -> list[int]:
        """Numbers of the batches in the journal."""
        return sorted(int(file.stem) for file in self._journal.glob("*.json"))

    @property
    def _journal(self) -> Path:
        return self.folder / "batches"

    def _file(self, label: int, number: int) -> Path:
        return self.folder / "pairs" / str(label) / f"{number:06d}.safetensors"

    def _entry(self, number: int) -> dict[str, Any] | None:
        file = self._journal / f"{number:06d}.json"
        if not file.exists():
            return None
        try:
            entry = json.loads(file.read_bytes())
            if not isinstance(entry["images"], int) or not isinstance(entry["classes"], dict):
                raise ValueError("it does not say which images and classes it has")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file} is damaged ({error}); delete it: this batch alone is then collected again"
            ) from error
        return dict(entry)


def collect_classes(
    explainer: Explainer,
    loader: Iterable[Any],
    kept: ClassPairs,
    classes: Collection[int] | None,
    positions: int | None,
    random_state: int,
    skip_tokens: int,
    ranks: Ranks,
    progress: bool | None,
) -> int:
    """This rank's part of the batches of a loader, each explained for its labels, into the stores of classes.

    Parameters
    ----------
    explainer : Explainer
    loader : iterable
        Batches (inputs, labels, …).
    kept : ClassPairs
        Where pairs go, and what is done already.
    classes : collection of int, optional
        Labels that are wanted; images with others are left out. Default all.
    positions, random_state, skip_tokens, progress
        As in `collect_pairs`.
    ranks : Ranks

    Returns
    -------
    int
        Number of batches of this rank.
    """
    parameter = next(explainer._known_model().parameters(), None)
    device = None if parameter is None else parameter.device
    batches = NumberedBatches(loader, ranks, progress)
    batches.check_can_be_kept()
    for number, first, n_images, batch in batches.missing(kept.holds, kept.compare):
        labels = _checked_labels(batch, n_images)
        wanted = [i for i, label in enumerate(labels) if classes is None or label in classes]
        pairs = {}
        if wanted:
            inputs = _some(moved(inputs_of(batch), device), wanted)
            labels = [labels[i] for i in wanted]
            a, c = explainer.context(inputs, labels)
            for label in sorted(set(labels)):
                rows = [i for i, other in enumerate(labels) if other == label]
                images = [first + wanted[i] for i in rows]
                pairs[label] = pairs_at_positions(
                    a[rows], c[rows], positions, random_state, images, explainer.channel_dim, skip_tokens
                )
        kept.put(number, batch, n_images, pairs)
    if not batches.n_images:
        raise ValueError("the loader gave no images; an iterator can be used up only once")
    return len(batches.own)


def _checked_labels(batch: Any, n_images: int) -> list[int]:
    labels = labels_of(batch)
    if labels.is_floating_point() or labels.is_complex() or labels.shape != (n_images,):
        raise ValueError(
            f"the labels of a batch must be one integer for each of its {n_images} images, got "
            f"{labels.dtype} of shape {tuple(labels.shape)}"
        )
    if n_images and int(labels.min()) < 0:
        raise ValueError(f"labels must be numbers of outputs, from 0, got {int(labels.min())}")
    return [int(label) for label in labels]


def _some(inputs: Inputs, rows: list[int]) -> Inputs:
    if isinstance(inputs, tuple):
        return tuple(tensor[torch.tensor(rows)] for tensor in inputs)
    return inputs if len(rows) == len(inputs) else inputs[torch.tensor(rows)]


def label_provenance(
    explainer: Explainer, positions: int | None, random_state: int, skip_tokens: int
) -> Provenance:
    """How the pairs of all classes are made."""
    return Provenance(
        **explainer._origin(),
        channel_dim=explainer.channel_dim,
        target=LABEL,
        positions=positions,
        random_state=random_state,
        skip_tokens=skip_tokens,
    )
