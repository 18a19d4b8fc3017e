"""Subspaces of many classes in one job: one pass over the data set, then one fit for each class.

The job lives in a folder, can be killed at any time, and goes on where it was. Under `torchrun` the batches
of the pass and then the classes are shared by the ranks.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from .atomic_files import remove_leftovers, write_json
from .checks import as_int
from .class_pairs import ClassPairs, collect_classes, label_provenance
from .distributed import Ranks, joined_ranks
from .drsa import DRSA
from .explainer import Explainer
from .file_locks import locked
from .fingerprint import feed
from .pair_shards import MEMORY
from .prca import Solver, learn_subspaces
from .subspaces import Subspaces, subspaces_header

_LOCK = ".lock"
_JOB = "job.json"
_INDEX = "index.json"


@dataclass(frozen=True)
class ClassIndex:
    """What a job over many classes has found.

    Attributes
    ----------
    folder : Path
        Of the job.
    classes : dict from label to dict
        For each class that is finished, by label: `file`, relative to the folder; `name`, if one was given;
        `n_images`, `fit_seconds`, and what the solver says about its fit.
    failed : dict from label to str
        Why the others have no subspaces.
    """

    folder: Path
    classes: dict[int, dict[str, Any]]
    failed: dict[int, str]

    @classmethod
    def load(cls, folder: str | PathLike[str]) -> ClassIndex:
        """Read `index.json` in the folder of a job."""
        file = Path(folder) / _INDEX
        if not file.is_file():
            raise FileNotFoundError(f"no index at {file}; the job has not finished a class yet")
        try:
            content = json.loads(file.read_bytes())
            classes = {int(label): dict(entry) for label, entry in content["classes"].items()}
            failed = {int(label): str(why) for label, why in content["failed"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is damaged ({error}); run the job again: it makes a new one") from error
        return cls(Path(folder), classes, failed)

    def subspaces(self, label: int) -> Subspaces:
        """The subspaces of a class."""
        if label not in self.classes:
            why = self.failed.get(label, "there is no such class in this job")
            raise ValueError(f"class {label} has no subspaces in {self.folder}: {why}")
        return Subspaces.load(self.folder / self.classes[label]["file"])

    def save(self) -> None:
        """Write `index.json`."""
        classes = {str(label): self.classes[label] for label in sorted(self.classes)}
        failed = {str(label): self.failed[label] for label in sorted(self.failed)}
        write_json(self.folder / _INDEX, {"classes": classes, "failed": failed})


def fit_many(
    explainer: Explainer,
    loader: Iterable[Any],
    folder: str | PathLike[str],
    solver: Solver | None = None,
    *,
    classes: Collection[int] | None = None,
    names: Mapping[int, str] | None = None,
    positions: int | None = 20,
    random_state: int = 0,
    skip_tokens: int = 0,
    memory: int = MEMORY,
    progress: bool | None = None,
    ranks: Ranks | None = None,
) -> ClassIndex:
    """Collect pairs of all classes in one pass over a loader, and learn the subspaces of each class.

    What is done is kept: started again with the same arguments after a crash, the job does what is missing.
    With more batches at the end of the loader, they are added, and their classes learned again. The first and
    the last batch that are done are loaded to see whether the data is the same.

    Parameters
    ----------
    explainer : DisentangledAttributor or DisentangledAttribution
        Its model is on the device on which this rank computes.
    loader : iterable
        Batches (inputs, labels, …), in the same order on every rank and in every run; a `DataLoader` without
        shuffling is best. Images are explained for their own label.
    folder : path
        Of the job, seen by all ranks. Made if it does not exist.
    solver : PRCA, DRSA, …, optional
        Default `DRSA(n_subspaces=4, random_state=random_state)`. Each class gets a copy.
    classes : collection of int, optional
        Labels that are wanted. Default all that occur.
    names : mapping from label to str, optional
        Names for the index.
    positions, random_state, skip_tokens
        As in `Explainer.collect`. The seed must be given, so that a second run continues the first.
    memory : int
        Bytes of pairs above which a class is read from its files chunk by chunk; for PRCA, DRSA and what is
        derived from them.
    progress : bool, optional
        Show progress bars with the time left, on the first rank. Default: on a terminal.
    ranks : Ranks, optional
        Default those of `torchrun`, or this process alone.

    Returns
    -------
    ClassIndex
        On every rank. A class whose fit was refused (too few pairs, no relevance, a damaged file) is in
        `failed`, and is tried again in the next run.
    """
    if ranks is None:
        with joined_ranks() as joined:
            return fit_many(
                explainer,
                loader,
                folder,
                solver,
                classes=classes,
                names=names,
                positions=positions,
                random_state=random_state,
                skip_tokens=skip_tokens,
                memory=memory,
                progress=progress,
                ranks=joined,
            )
    random_state = as_int(random_state, "random_state", 0)
    positions = None if positions is None else as_int(positions, "positions", 1)
    skip_tokens = as_int(skip_tokens, "skip_tokens", 0)
    solver = DRSA(n_subspaces=4, random_state=random_state) if solver is None else solver
    wanted = None if classes is None else frozenset(as_int(label, "every class", 0) for label in classes)
    kept = ClassPairs(Path(folder), label_provenance(explainer, positions, random_state, skip_tokens))
    settings = {
        "provenance": kept.provenance.as_dict(),
        "classes": None if wanted is None else sorted(wanted),
        "solver": _described(solver),
    }
    with ExitStack() as stack:
        for is_turn in (ranks.is_first, not ranks.is_first):
            with ranks.all_or_none(f"opening {folder}"):
                if is_turn:
                    stack.enter_context(_opened(kept, settings, ranks))
        with ranks.all_or_none("collecting"):
            n_own = collect_classes(
                explainer, loader, kept, wanted, positions, random_state, skip_tokens, ranks, progress
            )
        ranks.barrier("the end of the collection")
        n_batches = sum(ranks.all_gather(n_own))
        if kept.numbers() != list(range(n_batches)):
            raise ValueError(
                f"{folder} holds {len(kept.numbers())} batches, but the loader gives {n_batches}: the job "
                "was begun with more data. Give all of it again, or use another folder"
            )
        fits = _Fits(kept, solver, dict(names or {}), memory, ranks)
        with ranks.all_or_none("fitting"):
            fits.run(progress)
        return fits.index()


def _described(solver: Solver) -> str:
    """A solver with its parameters, those that change nothing in its result left out."""
    parameters: dict[str, Any] = getattr(solver, "get_params", dict)()
    named = {name: value for name, value in parameters.items() if name != "progress"}
    if named:
        return f"{type(solver).__name__} {named}"
    # Its state instead: a `repr` may hold an address, which is another one in every run.
    digest = hashlib.sha256()
    feed(digest, solver)
    return f"{type(solver).__name__} {digest.hexdigest()[:12]}"


@contextmanager
def _opened(kept: ClassPairs, settings: dict[str, Any], ranks: Ranks) -> Iterator[None]:
    """The folder of a job for the time of a `with` block; refused if it was begun with other settings."""
    folder, file = kept.folder, kept.folder / _JOB
    if ranks.is_first:
        folder.mkdir(parents=True, exist_ok=True)
    elif not file.exists():
        raise FileNotFoundError(
            f"rank {ranks.rank} does not see {file}, which the first rank wrote; all ranks need one folder"
        )
    with locked(folder, ranks.name_of(_LOCK)):
        if ranks.is_first:
            kept.prepare()
            (folder / "subspaces").mkdir(exist_ok=True)
            for place in (folder, folder / "subspaces"):
                remove_leftovers(place)
        _check_settings(file, settings)
        yield


def _check_settings(file: Path, settings: dict[str, Any]) -> None:
    settings = json.loads(json.dumps(settings))
    if not file.exists():
        write_json(file, settings)
        return
    try:
        before = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); use another folder") from error
    other = [
        f"{key}: {before.get(key)} there, {value} here"
        for key, value in settings.items()
        if before.get(key) != value
    ]
    if other:
        raise ValueError(
            f"{file.parent} was begun with other settings ({'; '.join(other)}); use another folder"
        )


class _Fits:
    """One fit for each class that has none yet, shared by the ranks."""

    def __init__(
        self, kept: ClassPairs, solver: Solver, names: dict[int, str], memory: int, ranks: Ranks
    ) -> None:
        self.kept, self.solver, self.names, self.memory, self.ranks = kept, solver, names, memory, ranks
        self.contents = kept.contents()
        self.failed: dict[int, str] = {}
        self._entries: dict[int, dict[str, Any]] = {}

    def run(self, progress: bool | None) -> None:
        """This rank's classes: every `size`-th of those that are missing."""
        if self.ranks.is_first:
            for label in self.contents:
                if self._file(label).exists() and not self._is_current(label):
                    self._file(label).unlink()  # so that the index does not show it meanwhile
        missing = [label for label in self.contents if not self._file(label).exists()]
        # The first rank says which, so that one that is late does not miss what another has just finished.
        missing = self.ranks.from_first(missing)
        mine = missing[self.ranks.rank :: self.ranks.size]
        hidden = None if progress is None else not progress
        if not self.ranks.is_first:
            hidden = True
        for label in tqdm(mine, desc="fitting classes", unit="class", disable=hidden):
            try:
                self._fit(label)
            except ValueError as error:
                self.failed[label] = f"{type(error).__name__}: {error}"
            if self.ranks.is_first:
                self._found(self.failed).save()

    def _fit(self, label: int) -> None:
        batches = self.contents[label]
        store = self.kept.store(label)
        store.close(batches, self.kept.of_class(label))
        begin = time.perf_counter()
        solver = deepcopy(self.solver)
        if sum(file.stat().st_size for file in store.files()) > self.memory:
            fit: Any = solver.fit
            fit(store.shards(memory=self.memory))
            found = solver.subspaces_.with_provenance(self.kept.of_class(label))
        else:
            found = learn_subspaces(solver, store.load())
        seconds = time.perf_counter() - begin
        found = found.with_metadata(
            class_index=label, fit_seconds=round(seconds, 3), **self._learned_from(label)
        )
        found.save(self._file(label))

    def _learned_from(self, label: int) -> dict[str, Any]:
        """Number of images and digest of the batches of a class, for the metadata of its subspaces."""
        digest = hashlib.sha256()
        feed(digest, self.contents[label])
        n_images = sum(batch.n_images for batch in self.contents[label].values())
        return {"n_images": n_images, "batches": digest.hexdigest()[:16]}

    def _is_current(self, label: int) -> bool:
        """Whether the subspaces in a file were learned from the batches that are there now."""
        metadata = subspaces_header(self._file(label))["metadata"]
        # Files of earlier releases hold the number of images alone.
        return all(metadata.get(key, value) == value for key, value in self._learned_from(label).items())

    def index(self) -> ClassIndex:
        """What all ranks have found; the first one writes it."""
        failed = {
            int(label): why for said in self.ranks.all_gather(self.failed) for label, why in said.items()
        }
        found = self._found(failed)
        if self.ranks.is_first:
            found.save()
        self.ranks.barrier("the index")
        return found

    def _found(self, failed: dict[int, str]) -> ClassIndex:
        for label in self.contents:
            file = self._file(label)
            if label not in self._entries and file.exists():
                self._entries[label] = self._entry(label, file)
        # In the order of the labels, whichever rank was first.
        return ClassIndex(self.kept.folder, dict(sorted(self._entries.items())), dict(sorted(failed.items())))

    def _entry(self, label: int, file: Path) -> dict[str, Any]:
        metadata = subspaces_header(file)["metadata"]
        entry = {"file": str(file.relative_to(self.kept.folder))}
        if label in self.names:
            entry["name"] = self.names[label]
        kept = {key: metadata[key] for key in ("n_images", "fit_seconds", "solver") if key in metadata}
        return entry | kept

    def _file(self, label: int) -> Path:
        return self.kept.folder / "subspaces" / f"{label}.safetensors"
