"""`PairStore`: a folder to which a long collection adds pairs, and from which it can go on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from .atomic_files import remove_leftovers, write_json
from .distributed import ALONE, Ranks
from .file_locks import locked
from .numbered_batches import batch_digest, check_same_batch
from .pair_shards import MEMORY, PairShards
from .pairs import Pairs, check_pair_file, pair_file_batch, pair_file_images
from .provenance import COLLECTION, Provenance
from .targets import LABEL

_BATCH = re.compile(r"(\d{6,})\.safetensors")
_PROVENANCE = "provenance.json"
_BATCHES = "batches.json"
_LOCK = ".lock"


class PairStore:
    """A folder of the pairs of one collection: one file for each batch, in order, and how they were made.

    Every batch is written atomically: after a crash what was appended is there. One writer at a time can add
    to it, and only batches that were made in the way of the first.

    Parameters
    ----------
    folder : path
        Made if it does not exist.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        # What this object knows to be there, so that `append` notices another writer.
        self._n_known = len(self)

    def __repr__(self) -> str:
        return f"PairStore({str(self.folder)!r}, {len(self)} batches)"

    def __len__(self) -> int:
        """Number of batches stored."""
        return len(self._numbers())

    @property
    def provenance(self) -> Provenance | None:
        """How the stored pairs were collected; None if that was not said."""
        file = self.folder / _PROVENANCE
        if not file.exists():
            return None
        try:
            return Provenance.from_dict(json.loads(file.read_bytes()))
        except ValueError as error:  # also JSON's own errors, and bytes that are no text
            raise ValueError(
                f"{file} is damaged ({error}); delete {self.folder} and collect again"
            ) from error

    @contextmanager
    def writing(self, provenance: Provenance | None, ranks: Ranks = ALONE) -> Iterator[PairWriter]:
        """The only writer of this store for the time of a `with` block. Call it before anything is computed.

        With several ranks each has a writer, for batches of its own; the first rank must come first.

        Parameters
        ----------
        provenance : Provenance or None
            How the pairs of this collection are made. It is kept on first use. None: not known, for stores
            that know nothing either.
        ranks : Ranks

        Raises
        ------
        ValueError
            If the store holds pairs that were made in another way.
        RuntimeError
            If another writer is at work.
        """
        with locked(self.folder, ranks.name_of(_LOCK)):
            # Those of writers at work, such as other ranks, are locked.
            remove_leftovers(self.folder)
            self._check_provenance(provenance)
            self._n_known = len(self)
            writer = PairWriter(self, provenance)
            try:
                yield writer
            finally:
                writer._is_open = False

    def append(self, pairs: Pairs) -> None:
        """Store one more batch, with the provenance that it carries. For several in a row see `writing`."""
        known = self._n_known
        with self.writing(pairs.provenance) as writer:
            self._check_gaps()
            if writer.n_done != known:
                raise RuntimeError(
                    f"another writer has changed {self.folder} from {known} to {writer.n_done} batches since "
                    "this store was opened; open it again and see which batches are missing"
                )
            writer.append(pairs)

    def load(self, device: torch.device | str = "cpu", numbers: Iterable[int] | None = None) -> Pairs:
        """All stored batches, or those with the given numbers, in order."""
        files = self.files() if numbers is None else [self._file(number) for number in sorted(numbers)]
        if not files:
            raise ValueError(f"{self.folder} holds no pairs yet")
        try:
            pairs = Pairs.concatenate([Pairs.load(file, device) for file in files])
        except ValueError as error:
            # Errors of one file name its path; those of several must name the folder.
            if str(self.folder) in str(error):
                raise
            raise ValueError(f"the batches in {self.folder} do not go together: {error}") from error
        made = self.provenance
        return pairs if made is None else pairs.with_provenance(made)

    def files(self) -> list[Path]:
        """Files of all stored batches, in order; ValueError if one is missing between others."""
        self._check_gaps()
        return [self._file(number) for number in self._numbers()]

    def shards(
        self,
        ranks: Ranks = ALONE,
        *,
        memory: int = MEMORY,
        device: torch.device | str = "cpu",
    ) -> PairShards:
        """All stored pairs for solvers, read chunk by chunk and never held as a whole.

        Each of several ranks reads an equal part; all of them must see this folder. Digests are not checked:
        see `damaged`.
        """
        files = self.files()
        if not files:
            raise ValueError(f"{self.folder} holds no pairs yet")
        return PairShards.from_files(files, ranks, memory=memory, device=device)

    def damaged(self) -> dict[Path, str]:
        """Files that cannot be read, or that are not what was written, each with what is wrong with it.

        Every file is read. Delete those that are named, and collect again with the same settings: only they
        are computed.
        """
        found = {}
        for number in self._numbers():
            try:
                check_pair_file(self._file(number))
            except ValueError as error:
                found[self._file(number)] = str(error)
        return found

    def close(self, numbers: Iterable[int], provenance: Provenance | None) -> None:
        """Say which batches make up this store, where their numbers have gaps, and how they were made.

        Files of other batches go: a writer left them that was killed before it could say that they count.
        """
        numbers = sorted(numbers)
        for other in set(self._numbers()) - set(numbers):
            self._file(other).unlink(missing_ok=True)
        if provenance is not None:
            write_json(self.folder / _PROVENANCE, provenance.as_dict())
        write_json(self.folder / _BATCHES, numbers)

    def _expected(self) -> list[int]:
        """Numbers of the batches that should be there: all, where the store was not closed."""
        file = self.folder / _BATCHES
        if not file.exists():
            return list(range(len(self)))
        try:
            numbers = json.loads(file.read_bytes())
            return [int(number) for number in numbers]
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}); collect again with the same settings") from error

    def _numbers(self) -> list[int]:
        matches = (_BATCH.fullmatch(file.name) for file in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06d}.safetensors"

    def _check_gaps(self) -> None:
        numbers = self._numbers()
        missing = sorted(set(self._expected()) - set(numbers))
        if missing:
            holds = f", but holds {self._file(numbers[-1]).name}" if numbers else ""
            raise ValueError(
                f"{self.folder} lacks {self._file(missing[0]).name}{holds}; put it back, or collect again "
                "with the same settings: only what is missing is computed"
            )

    def _check_provenance(self, provenance: Provenance | None) -> None:
        what_to_do = f"use another folder, or delete {self.folder}"
        if not self._numbers():
            # Nothing is there that could be mixed up with other pairs.
            (self.folder / _PROVENANCE).unlink(missing_ok=True)
            if provenance is not None:
                write_json(self.folder / _PROVENANCE, provenance.as_dict())
            return
        made = self.provenance
        if made is None and provenance is None:
            return
        if made is None:
            raise ValueError(
                f"{self.folder} holds {len(self)} batches that do not say how they were made, so new ones "
                f"may not fit; {what_to_do}"
            )
        if provenance is None:
            raise ValueError(
                f"the pairs do not say how they were made, but {self.folder} holds pairs that do: give "
                f"provenance=, or {what_to_do}"
            )
        differences = made.differences(provenance, COLLECTION, exact=True)
        if differences:
            raise ValueError(
                f"{self.folder} holds pairs of another collection: {'; '.join(differences)}; {what_to_do}"
            )


class PairWriter:
    """What `PairStore.writing` hands out: adds batches to a store that nobody else writes to."""

    def __init__(self, store: PairStore, provenance: Provenance | None) -> None:
        self._store = store
        self._provenance = provenance
        self._n_done = len(store)
        self._is_open = True

    @property
    def n_done(self) -> int:
        """Batches that are stored: those with the numbers 0 … n_done − 1, if none is missing."""
        return self._n_done

    def holds(self, number: int, n_images: int) -> bool:
        """Whether a batch is stored.

        Raises
        ------
        ValueError
            If it has another number of images: the loader gave batches of another size then.
        """
        file = self._store._file(number)
        if not file.exists():
            return False
        try:
            stored = pair_file_images(file)
        except ValueError as error:
            raise ValueError(f"{error}; delete this file: it alone is then collected again") from error
        if stored != n_images:
            raise ValueError(
                f"{file} holds {stored} images, but this batch has {n_images}: the collection was begun with "
                "batches of another size. Use that size again, or another folder"
            )
        return True

    def compare(self, number: int, batch: Any) -> None:
        """Raise an error if a stored batch was collected from another one than `batch` of a loader.

        Files of earlier releases do not say from which; they pass.
        """
        file = self._store._file(number)
        check_same_batch(pair_file_batch(file), batch, self._counts_labels, file)

    @property
    def _counts_labels(self) -> bool:
        return self._provenance is not None and self._provenance.target == LABEL

    def append(self, pairs: Pairs) -> None:
        """Store the batch with the number `n_done`. Pairs without provenance get that of the collection."""
        self._store._check_gaps()
        self.put(self._n_done, pairs)

    def put(self, number: int, pairs: Pairs, batch: Any = None) -> None:
        """Store a batch by its number. Pairs without provenance get that of the collection.

        `batch` is what the loader gave, for `compare`; a digest of it is kept.
        """
        if not self._is_open:
            raise RuntimeError(f"this writer of {self._store.folder} is closed; use it inside its with block")
        if pairs.provenance is None:
            pairs = pairs.with_provenance(self._provenance)
        elif self._provenance is None:
            raise ValueError(f"{pairs!r} says how it was made, but the collection was opened without that")
        elif differences := self._provenance.differences(pairs.provenance, COLLECTION, exact=True):
            raise ValueError(f"{pairs!r} is not of the collection that was opened: {'; '.join(differences)}")
        file = self._store._file(number)
        if file.exists():
            raise RuntimeError(f"{file} is there already: another program writes to this folder; use another")
        pairs._save(file, None if batch is None else batch_digest(batch, self._counts_labels))
        self._n_done += 1
        self._store._n_known = self._n_done
