"""`PairStore`: a folder to which a long collection adds pairs, and from which it can go on."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

import torch

from .atomic_files import remove_stale, write_atomically
from .file_locks import try_lock, unlock
from .pairs import Pairs
from .provenance import COLLECTION, Provenance

_BATCH = re.compile(r"(\d{6,})\.safetensors")
_PROVENANCE = "provenance.json"
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
    def writing(self, provenance: Provenance | None) -> Iterator[PairWriter]:
        """The only writer of this store for the time of a `with` block. Call it before anything is computed.

        Parameters
        ----------
        provenance : Provenance or None
            How the pairs of this collection are made. It is kept on first use. None: not known, for stores
            that know nothing either.

        Raises
        ------
        ValueError
            If the store holds pairs that were made in another way, or lacks a batch between others.
        RuntimeError
            If another writer is at work.
        """
        with self._locked():
            self._remove_leftovers()
            self._check_provenance(provenance)
            self._check_gaps()
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
            if writer.n_done != known:
                raise RuntimeError(
                    f"another writer has changed {self.folder} from {known} to {writer.n_done} batches since "
                    "this store was opened; open it again and see which batches are missing"
                )
            writer.append(pairs)

    def load(self, device: torch.device | str = "cpu") -> Pairs:
        """All stored batches, in order."""
        self._check_gaps()
        files = [self._file(number) for number in self._numbers()]
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

    def _numbers(self) -> list[int]:
        matches = (_BATCH.fullmatch(file.name) for file in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06d}.safetensors"

    def _check_gaps(self) -> None:
        numbers = self._numbers()
        missing = sorted(set(range(len(numbers))) - set(numbers))
        if missing:
            raise ValueError(
                f"{self.folder} lacks {self._file(missing[0]).name}, but holds "
                f"{self._file(numbers[-1]).name}; put it back, or delete all later ones to collect them again"
            )

    def _check_provenance(self, provenance: Provenance | None) -> None:
        what_to_do = f"use another folder, or delete {self.folder}"
        if not self._numbers():
            # Nothing is there that could be mixed up with other pairs.
            (self.folder / _PROVENANCE).unlink(missing_ok=True)
            if provenance is not None:
                write_atomically(
                    self.folder / _PROVENANCE, [json.dumps(provenance.as_dict(), indent=1).encode()]
                )
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

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                free = try_lock(descriptor)
            except OSError as error:
                raise OSError(
                    error.errno, f"cannot lock {self.folder / _LOCK} ({error.strerror}); use a local folder"
                ) from error
            if not free:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace") if hasattr(os, "pread") else ""
                raise RuntimeError(
                    f"another writer{f' ({holder})' if holder else ''} is adding to {self.folder}; wait "
                    "until it is done, or use another folder"
                )
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
            try:
                yield
            finally:
                unlock(descriptor)
        finally:
            os.close(descriptor)

    def _remove_leftovers(self) -> None:
        """Temporary files of killed writers. With the lock held there is no other writer that needs them."""
        for file in list(self.folder.glob(".*.safetensors.*")) + list(self.folder.glob(f".{_PROVENANCE}.*")):
            target = re.sub(r"^\.(.*?\.(safetensors|json))\..*$", r"\1", file.name)
            if target == _PROVENANCE or _BATCH.fullmatch(target):
                remove_stale(self.folder / target, min_age=0)


class PairWriter:
    """What `PairStore.writing` hands out: adds batches to a store that nobody else writes to."""

    def __init__(self, store: PairStore, provenance: Provenance | None) -> None:
        self._store = store
        self._provenance = provenance
        self._n_done = len(store)
        self._is_open = True

    @property
    def n_done(self) -> int:
        """Batches that are stored: those with the numbers 0 … n_done − 1."""
        return self._n_done

    def append(self, pairs: Pairs) -> None:
        """Store the batch with the number `n_done`. Pairs without provenance get that of the collection."""
        if not self._is_open:
            raise RuntimeError(f"this writer of {self._store.folder} is closed; use it inside its with block")
        if pairs.provenance is None:
            pairs = pairs.with_provenance(self._provenance)
        elif self._provenance is None:
            raise ValueError(f"{pairs!r} says how it was made, but the collection was opened without that")
        elif differences := self._provenance.differences(pairs.provenance, COLLECTION, exact=True):
            raise ValueError(f"{pairs!r} is not of the collection that was opened: {'; '.join(differences)}")
        file = self._store._file(self._n_done)
        if file.exists():
            raise RuntimeError(f"{file} is there already: another program writes to this folder; use another")
        pairs.save(file)
        self._n_done += 1
        self._store._n_known = self._n_done
