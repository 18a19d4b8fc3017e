"""Subspaces of many classes in one job: one pass over the data set, then one fit for each class.

The job lives in a folder, can be killed at any time, and goes on where it was. Under `torchrun` the batches
of the pass and then the classes are shared by the ranks.

Each batch of the pass is a unit: its pairs go to the folders of their classes, in files named after the
number of the batch, and then an entry in the journal says so. A batch without an entry, or with a file
missing, is done again, with the same bits, whatever the number of ranks.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from tqdm.auto import tqdm

from .checks import as_int
from .collection import Batches, check_same_batch, hidden, pairs_at_positions
from .distributed import Ranks, joined_ranks
from .drsa import DRSA
from .explainer import Explainer
from .pair_store import PairStore
from .pairs import MEMORY
from .prca import Solver, learn_subspaces
from .provenance import Provenance, content_digest
from .storage import PathLike, locked, read_json, remove_leftovers, write_json
from .subspaces import Subspaces, subspaces_header
from .targets import LABEL

_INDEX = "index.json"
# What each batch has of a class: how many images, and the digest of the batch.
_Batches: TypeAlias = dict[int, tuple[int, str | None]]


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
    def load(cls, folder: PathLike) -> ClassIndex:
        """Read `index.json` in the folder of a job."""
        file = Path(folder) / _INDEX
        if not file.is_file():
            raise FileNotFoundError(f"no index at {file}; the job has not finished a class yet")
        content = read_json(file)
        classes = {int(label): entry for label, entry in content["classes"].items()}
        return cls(Path(folder), classes, {int(label): why for label, why in content["failed"].items()})

    def subspaces(self, label: int) -> Subspaces:
        """The subspaces of a class."""
        if label not in self.classes:
            why = self.failed.get(label, "there is no such class in this job")
            raise ValueError(f"class {label} has no subspaces in {self.folder}: {why}")
        return Subspaces.load(self.folder / self.classes[label]["file"])

    def save(self) -> None:
        """Write `index.json`."""
        write_json(self.folder / _INDEX, {"classes": self.classes, "failed": self.failed})


def fit_many(
    explainer: Explainer,
    loader: Iterable[Any],
    folder: PathLike,
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

    Started again with the same arguments after a crash, the job does what is missing. With more batches at
    the end of the loader, they are added, and their classes learned again. The first and the last batch that
    are done are loaded to see whether the data is the same.

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
        Default those of `torchrun`, or this process.

    Returns
    -------
    ClassIndex
        On every rank. A class whose fit was refused (too few pairs, no relevance, a damaged file) is in
        `failed`, and is tried again in the next run.
    """
    made = Provenance(
        **explainer._origin(),
        channel_dim=explainer.channel_dim,
        target=LABEL,
        positions=None if positions is None else as_int(positions, "positions", 1),
        random_state=as_int(random_state, "random_state", 0),
        skip_tokens=as_int(skip_tokens, "skip_tokens", 0),
    )
    solver = DRSA(n_subspaces=4, random_state=made.random_state) if solver is None else solver
    wanted = None if classes is None else frozenset(as_int(label, "every class", 0) for label in classes)
    job = _Job(Path(folder), made)
    with ExitStack() as stack:
        ranks = stack.enter_context(joined_ranks()) if ranks is None else ranks
        with ranks.all_or_none(f"opening {folder}"):
            if ranks.is_first:
                job.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(job.folder))
                job.open(
                    {"classes": None if wanted is None else sorted(wanted), "solver": _described(solver)}
                )
        with ranks.all_or_none(f"opening {folder}"):
            if not job.settings.exists():
                raise FileNotFoundError(f"rank {ranks.rank} does not see {folder}; all ranks need one folder")
        with explainer._session(), ranks.all_or_none("collecting"):
            batches = Batches(loader, ranks, progress, resumes=True)
            job.collect(explainer, batches, wanted)
        ranks.barrier("the end of the collection")
        n_batches = sum(ranks.all_gather(len(batches.own)))
        if job.numbers() != list(range(n_batches)):
            raise ValueError(
                f"{folder} holds {len(job.numbers())} batches, but the loader gives {n_batches}: the job was "
                "begun with more data. Give all of it again, or use another folder"
            )
        with ranks.all_or_none("fitting"):
            contents, failed, names = job.contents(), {}, names or {}
            # The first rank says which are missing, so that a late one does not miss what another finished.
            missing = ranks.from_first(job.outdated(contents) if ranks.is_first else None)
            mine = missing[ranks.rank :: ranks.size]
            bar = tqdm(mine, "fitting classes", unit="class", disable=hidden(batches.progress))
            for label in bar:
                try:
                    job.fit(label, contents[label], deepcopy(solver), memory)
                except ValueError as error:
                    failed[label] = f"{type(error).__name__}: {error}"
                if ranks.is_first:
                    job.index(contents, names, failed).save()
        said = ranks.all_gather([*failed.items()])
        index = job.index(contents, names, {label: why for part in said for label, why in part})
        if ranks.is_first:
            index.save()
        ranks.barrier("the index")
        return index


def _described(solver: Solver) -> str:
    """A solver with its parameters, those that change nothing in its result left out."""
    parameters: dict[str, Any] = getattr(solver, "get_params", dict)()
    named = {name: value for name, value in parameters.items() if name != "progress"}
    # Of others the state: a `repr` may hold an address, which is another one in every run.
    return f"{type(solver).__name__} {named or content_digest(solver)}"


@dataclass(frozen=True)
class _Job:
    """The folder of a job: pairs and subspaces by class, and the journal of batches."""

    folder: Path
    provenance: Provenance

    @property
    def settings(self) -> Path:
        """File of the settings with which the job was begun."""
        return self.folder / "job.json"

    def open(self, settings: dict[str, Any]) -> None:
        """Make what is missing, remove what killed writers left; ValueError if it has other settings."""
        for name in ("batches", "pairs", "subspaces"):
            (self.folder / name).mkdir(exist_ok=True)
        for place in (*self.folder.iterdir(), *(self.folder / "pairs").iterdir()):
            if place.is_dir():
                remove_leftovers(place)
        settings = {"provenance": self.provenance.as_dict(), **settings}
        before = read_json(self.settings) if self.settings.exists() else settings
        if other := [
            f"{k}: {before.get(k)} there, {v} here" for k, v in settings.items() if before.get(k) != v
        ]:
            raise ValueError(
                f"{self.folder} was begun with other settings ({'; '.join(other)}); use another folder"
            )
        write_json(self.settings, settings)

    def collect(self, explainer: Explainer, batches: Batches, wanted: Collection[int] | None) -> None:
        """This rank's batches, each explained for its labels, into the folders of their classes."""
        parameter = next(explainer._known_model().parameters(), None)
        made = self.provenance
        for batch in batches.missing(self._holds):
            digest = batch.digest(with_labels=True)
            if batch.is_done:
                before = read_json(self._journal(batch.number)).get("batch")
                check_same_batch(before, digest, f"batch {batch.number} of {self.folder}")
                continue
            rows: dict[int, list[int]] = defaultdict(list)
            for i, label in enumerate(batch.labels()):
                if wanted is None or label in wanted:
                    rows[label].append(i)
            if rows:
                inputs = batch.inputs(None if parameter is None else parameter.device)
                chosen = sorted(i for of_label in rows.values() for i in of_label)
                some = tuple(x[chosen] for x in inputs) if isinstance(inputs, tuple) else inputs[chosen]
                a, c = explainer.context(some, [batch.labels()[i] for i in chosen])
            for label, of_label in rows.items():
                here = [chosen.index(i) for i in of_label]
                examples = [batch.examples[i] for i in of_label]
                pairs = pairs_at_positions(
                    a[here], c[here], made.positions, made.random_state or 0, examples, made.channel_dim,
                    made.skip_tokens or 0,
                )  # fmt: skip
                file = self._pairs(label, batch.number)
                file.parent.mkdir(exist_ok=True)
                pairs.with_provenance(replace(made, target=label)).save(file)
            classes = {str(label): len(of_label) for label, of_label in sorted(rows.items())}
            entry = {"images": batch.size, "classes": classes, "batch": digest}
            write_json(self._journal(batch.number), entry)

    def numbers(self) -> list[int]:
        """Numbers of the batches in the journal."""
        return sorted(int(file.stem) for file in (self.folder / "batches").glob("*.json"))

    def contents(self) -> dict[int, _Batches]:
        """For each class, in order, what each batch has of it, by the number of the batch."""
        found: dict[int, _Batches] = defaultdict(dict)
        for number in self.numbers():
            entry = read_json(self._journal(number))
            for label, n_images in entry["classes"].items():
                found[int(label)][number] = n_images, entry.get("batch")
        return {label: found[label] for label in sorted(found)}

    def outdated(self, contents: dict[int, _Batches]) -> list[int]:
        """Classes without subspaces; those that were learned from other batches are removed."""
        missing = []
        for label, batches in contents.items():
            file = self._subspaces(label)
            if file.exists() and not self._learned_from(batches).items() <= _metadata(file).items():
                file.unlink()  # so that the index does not show it meanwhile
            if not file.exists():
                missing.append(label)
        return missing

    def fit(self, label: int, batches: _Batches, solver: Solver, memory: int) -> None:
        """Learn the subspaces of a class."""
        store = PairStore(self.folder / "pairs" / str(label))
        made = replace(self.provenance, target=label)
        store.close(batches, made)
        begin = time.perf_counter()
        if sum(file.stat().st_size for file in store.files()) > memory:
            fit: Any = solver.fit
            fit(store.shards(memory=memory))
            found = solver.subspaces_.with_provenance(made)
        else:
            found = learn_subspaces(solver, store.load())
        about = {"class_index": label, "fit_seconds": round(time.perf_counter() - begin, 3)}
        found.with_metadata(**about, **self._learned_from(batches)).save(self._subspaces(label))

    def index(self, contents: Iterable[int], names: Mapping[int, str], failed: dict[int, str]) -> ClassIndex:
        """What is finished, in the order of the labels."""
        classes = {}
        for label in contents:
            file = self._subspaces(label)
            if file.exists():
                about = {
                    key: v
                    for key, v in _metadata(file).items()
                    if key in ("n_images", "fit_seconds", "solver")
                }
                name = {"name": names[label]} if label in names else {}
                classes[label] = {"file": str(file.relative_to(self.folder)), **name, **about}
        return ClassIndex(self.folder, classes, dict(sorted(failed.items())))

    def _learned_from(self, batches: _Batches) -> dict[str, Any]:
        """Number of images and digest of the batches of a class, for the metadata of its subspaces."""
        return {"n_images": sum(n for n, _ in batches.values()), "batches": content_digest(batches)}

    def _holds(self, number: int, n_images: int) -> bool:
        """Whether a batch is in the journal and all of its files are there."""
        if not self._journal(number).exists():
            return False
        entry = read_json(self._journal(number))
        if entry["images"] != n_images:
            raise ValueError(
                f"batch {number} of {self.folder} has {entry['images']} images, but the loader gives "
                f"{n_images}: the job was begun with batches of another size. Use that size again, or "
                "another folder"
            )
        return all(self._pairs(int(label), number).exists() for label in entry["classes"])

    def _journal(self, number: int) -> Path:
        return self.folder / "batches" / f"{number:06d}.json"

    def _pairs(self, label: int, number: int) -> Path:
        return self.folder / "pairs" / str(label) / f"{number:06d}.safetensors"

    def _subspaces(self, label: int) -> Path:
        return self.folder / "subspaces" / f"{label}.safetensors"


def _metadata(file: Path) -> dict[str, Any]:
    return dict(subspaces_header(file)["metadata"])
