"""`PairStore`: a folder to which a long collection adds pairs, and from which it can go on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from .distributed import ALONE, Ranks
from .pairs import MEMORY, Pairs, PairShards, pairs_header
from .provenance import COLLECTION, Provenance
from .storage import PathLike, locked, read_json, write_json

_PROVENANCE = "provenance.json"
_BATCHES = "batches.json"


class PairStore:
    """A folder of the pairs of one collection: one file for each batch, in order, and how they were made.

    Every batch is written atomically: after a crash what was appended is there. One writer at a time can add
    to it, and only batches that were made in the way of the first.

    Parameters
    ----------
    folder : path
        Made if it does not exist.
    """

    def __init__(self, folder: PathLike) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def __repr__(self) -> str:
        return f"PairStore({str(self.folder)!r}, {len(self)} batches)"

    def __len__(self) -> int:
        """Number of batches stored."""
        return len(self._numbers())

    @property
    def provenance(self) -> Provenance | None:
        """How the stored pairs were collected; None if that was not said."""
        file = self.folder / _PROVENANCE
        return Provenance.from_dict(read_json(file)) if file.exists() else None

    @contextmanager
    def writing(self, provenance: Provenance | None, ranks: Ranks = ALONE) -> Iterator[PairWriter]:
        """The only writer of this store for the time of a `with` block. Call it before anything is computed.

        Parameters
        ----------
        provenance : Provenance or None
            How the pairs of this collection are made. None: not known, for stores that know nothing either.
        ranks : Ranks
            All of them must call this; each has a writer, for its own batches.

        Raises
        ------
        ValueError
            If the store holds pairs that were made in another way.
        RuntimeError
            If another writer is at work.
        """
        with ExitStack() as stack:
            for is_turn in (ranks.is_first, not ranks.is_first):
                with ranks.all_or_none(f"opening {self.folder}"):
                    if is_turn and ranks.is_first:
                        stack.enter_context(locked(self.folder))
                    if is_turn:
                        self._check_provenance(provenance)
            yield PairWriter(self, provenance)

    def append(self, pairs: Pairs) -> None:
        """Store one more batch, with the provenance that it carries. For several in a row see `writing`."""
        with self.writing(pairs.provenance) as writer:
            writer.append(pairs)

    def load(self, device: torch.device | str = "cpu", numbers: Iterable[int] | None = None) -> Pairs:
        """All stored batches, or those with the given numbers, in order."""
        files = self.files() if numbers is None else [self._file(number) for number in sorted(numbers)]
        if not files:
            raise ValueError(f"{self.folder} holds no pairs yet")
        pairs = Pairs.concatenate([Pairs.load(file, device) for file in files])
        made = self.provenance
        return pairs if made is None else pairs.with_provenance(made)

    def files(self) -> list[Path]:
        """Files of all stored batches, in order; ValueError if one is missing between others."""
        expected = self.folder / _BATCHES
        numbers = self._numbers()
        should_be = read_json(expected) if expected.exists() else range(len(numbers))
        if missing := sorted(set(should_be) - set(numbers)):
            raise ValueError(
                f"{self.folder} lacks {self._file(missing[0]).name}; put it back, or collect again with the "
                "same settings: only what is missing is computed"
            )
        return [self._file(number) for number in numbers]

    def shards(
        self,
        ranks: Ranks = ALONE,
        *,
        memory: int = MEMORY,
        device: torch.device | str = "cpu",
    ) -> PairShards:
        """All stored pairs for solvers, read chunk by chunk and never held as a whole.

        Each of several ranks reads an equal part; all of them must see this folder. Checksums are not
        compared: see `damaged`.
        """
        files = self.files()
        if not files:
            raise ValueError(f"{self.folder} holds no pairs yet")
        return PairShards.from_files(files, ranks, memory=memory, device=device)

    def damaged(self) -> dict[Path, str]:
        """Files that are not what was written, each with what is wrong with it.

        Every file is read. Delete those that are named, and collect again with the same settings: only they
        are computed.
        """
        found = {}
        for number in self._numbers():
            try:
                Pairs.load(self._file(number))
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

    def _numbers(self) -> list[int]:
        matches = (re.fullmatch(r"(\d{6,})\.safetensors", file.name) for file in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06d}.safetensors"

    def _check_provenance(self, provenance: Provenance | None) -> None:
        if not len(self):
            # Nothing is there that could be mixed up with other pairs.
            (self.folder / _PROVENANCE).unlink(missing_ok=True)
            if provenance is not None:
                write_json(self.folder / _PROVENANCE, provenance.as_dict())
            return
        made = self.provenance
        if made is None or provenance is None:
            who = "the stored pairs" if made is None else "the new pairs"
            differences = [] if made is provenance else [f"{who} do not say how they were made"]
        else:
            differences = made.differences(provenance, COLLECTION, exact=True)
        if differences:
            raise ValueError(
                f"{self.folder} holds pairs of another collection: {'; '.join(differences)}; use another "
                f"folder, or delete {self.folder}"
            )


class PairWriter:
    """What `PairStore.writing` hands out: adds batches to a store that nobody else writes to."""

    def __init__(self, store: PairStore, provenance: Provenance | None) -> None:
        self._store, self._provenance = store, provenance

    @property
    def n_done(self) -> int:
        """Batches that are stored: those with the numbers 0 … n_done − 1, if none is missing."""
        return len(self._store)

    def holds(self, number: int, n_images: int) -> bool:
        """Whether a batch is stored; ValueError if it has another number of images, or is damaged."""
        file = self._store._file(number)
        if not file.exists():
            return False
        stored = pairs_header(file).get("n_images", n_images)
        if stored != n_images:
            raise ValueError(
                f"{file} holds {stored} images, but this batch has {n_images}: the collection was begun with "
                "batches of another size. Use that size again, or another folder"
            )
        return True

    def digest(self, number: int) -> str | None:
        """The digest that `put` was given with a batch."""
        return pairs_header(self._store._file(number)).get("digest")

    def append(self, pairs: Pairs) -> None:
        """Store the batch with the number `n_done`. Pairs without provenance get that of the collection."""
        self.put(len(self._store.files()), pairs)

    def put(self, number: int, pairs: Pairs, digest: str | None = None) -> None:
        """Store a batch by its number. Pairs without provenance get that of the collection.

        `digest` is that of what the loader gave, to notice other data when the collection goes on.
        """
        if pairs.provenance is None or self._provenance is None:
            pairs = pairs.with_provenance(self._provenance)
        elif differences := self._provenance.differences(pairs.provenance, COLLECTION, exact=True):
            raise ValueError(f"{pairs!r} is not of the collection that was opened: {'; '.join(differences)}")
        n_images = int(pairs.image.max()) + 1 if len(pairs) else 0
        pairs._save(self._store._file(number), digest=digest, n_images=n_images)
