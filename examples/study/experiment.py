"""Runs jobs class by class, and keeps every result in a file of its own: an interrupted run goes on."""

from __future__ import annotations

import glob
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from drsa_audit import Network, load_images
from drsa_audit.work import files_digest
from drsa_core import Pairs, PairStore, Subspaces, model_fingerprint
from drsa_core.evaluation import (
    Preprocessing,
    check_maps,
    patch_flipping,
    peakness,
    separability,
    total_relevance,
)
from drsa_core.storage import remove_leftovers, write_atomically
from torch import Tensor

from .backends import Backend
from .classes import ClassImages
from .jobs import Job, Reading

Record: TypeAlias = dict[str, Any]
#: What tells the records of a folder apart.
IDENTITY = ("stage", "layer", "class", "method", "n_subspaces", "dims", "seed")


class OutOfTime(Exception):
    """The time that the user granted is over; what is done is on disk."""


@dataclass(frozen=True)
class Evaluation:
    """How maps are evaluated by patch flipping; see `drsa_core.evaluation.patch_flipping`."""

    schedule: str = "squares"
    fill: str = "telea"
    patch_size: int = 16


class Experiment:
    """Collects, fits, explains and evaluates, and keeps what it finds in a folder.

    Parameters
    ----------
    network : Network
    out : path
        Folder for pairs, subspaces and results.
    settings : dict
        What decides the numbers, as JSON. A folder that was begun with other settings is refused.
    evaluation : Evaluation
    positions : int
        Pairs per training image.
    seed : int
        Of the positions.
    batch_size : int
        Images explained at a time.
    deadline : float, optional
        `time.monotonic()` after which no further job is begun.
    say : function
        What a line about each evaluation is given to.
    learned_from : sequence of ClassImages
        Classes whose training images all subspaces are learned from, each image explained for its own class.
        Without them each class has subspaces of its own.
    """

    def __init__(
        self,
        network: Network,
        out: Path,
        settings: dict[str, Any],
        evaluation: Evaluation,
        positions: int = 20,
        seed: int = 0,
        batch_size: int = 4,
        deadline: float | None = None,
        say: Callable[[str], None] = print,
        learned_from: Sequence[ClassImages] = (),
    ) -> None:
        self.network, self.out, self.evaluation, self.say = network, out, evaluation, say
        self.learned_from = learned_from
        self.positions, self.seed, self.batch_size, self.deadline = positions, seed, batch_size, deadline
        self._images: dict[str, tuple[Tensor, list[str]]] = {}
        self.unreadable: set[str] = set()
        out.mkdir(parents=True, exist_ok=True)
        for folder in (out, *(path for path in out.rglob("*") if path.is_dir())):
            remove_leftovers(folder)  # of a run that was killed
        begun = out / "settings.json"
        if begun.exists():
            before = json.loads(begun.read_text())
            # A setting may be named in one of the two only, where its default goes without saying.
            other = sorted(key for key in {*before, *settings} if before.get(key) != settings.get(key))
            if other:
                changes = ", ".join(f"{key}: {before.get(key)} → {settings.get(key)}" for key in other)
                raise ValueError(f"{out} was begun with other settings ({changes}); choose another folder")
        write_json(begun, settings)

    def check_network(self) -> None:
        """Refuse to go on with another network, or other inputs to it, than those that the results are of.

        The settings hold names alone: a file of weights may have been written anew. A folder from before the
        network was noted goes on with that of now.
        """
        file = self.out / "network.json"
        here = {
            "fingerprint": model_fingerprint(self.network.model),
            "preprocessing": self.network.describe_preprocessing(),
        }
        if file.exists():
            before = json.loads(file.read_text())
            other = [key for key in here if before.get(key) != here[key]]
            if other:
                raise ValueError(
                    f"the results in {self.out} are of another network, by its {' and '.join(other)}; put "
                    "that of before back, or choose another folder for the results"
                )
        elif (self.out / "results").exists():
            self.say(
                f"{self.out} does not say of which network its results are; it is taken to be that of now"
            )
        write_json(file, here)

    def check_photographs(self, classes: Sequence[ClassImages]) -> None:
        """Refuse to go on with other photographs of a class than those that its results are of.

        To be called with all photographs that the runs may use. A folder from before they were noted goes on
        with those of now.
        """
        for images in classes:
            file = self.out / "photographs" / f"{images.name}.json"
            here = _digests(images)
            if self._has_begun(images):
                if file.exists():
                    self._compare(images, json.loads(file.read_text()), here)
                else:
                    self.say(
                        f"{self.out} does not say of which photographs of {images.name} its results are; "
                        "they are taken to be those of now"
                    )
            write_json(file, here)

    def _has_begun(self, images: ClassImages) -> bool:
        kinds, name = ("pairs", "subspaces", "results"), glob.escape(images.name)
        return any(next((self.out / kind).rglob(name), None) is not None for kind in kinds)

    def _compare(self, images: ClassImages, before: dict[str, str], here: dict[str, str]) -> None:
        changes = {
            "changed": [name for name in here if name in before and before[name] != here[name]],
            "new": [name for name in here if name not in before],
            "missing": [name for name in before if name not in here],
        }
        found = [f"{what}: {_some(names)}" for what, names in changes.items() if names]
        if found:
            raise ValueError(
                f"the results of {images.name} in {self.out} are of other photographs ({'; '.join(found)}); "
                "put those of before back, or choose another folder for the results"
            )

    def run(
        self, stage: str, layer: str, backend: Backend, classes: Sequence[ClassImages], jobs: Sequence[Job]
    ) -> list[Record]:
        """Records of all jobs for all classes; those on disk are read."""
        records: list[Record] = []
        # Job by job, so that a run that is cut short has the same methods for all classes.
        for job in jobs:
            for images in classes:
                file = self.out / "results" / stage / layer / images.name / f"{job.name}.json"
                if not file.exists():
                    self.check_time()
                    write_json(file, self._run_job(stage, layer, backend, images, job))
                records += json.loads(file.read_text())
        return records

    def run_attributions(
        self,
        kinds: Sequence[str],
        classes: Sequence[ClassImages],
        samples: int | None = None,
        rules: Network | None = None,
    ) -> list[Record]:
        """Records of standard explanations in one step; Shapley values for a tenth of the images (Note D).

        There is no concept layer here: LRP has one γ in all layers, where in the other stages `ConvNetGamma`
        has γ = 0 above theirs.

        Parameters
        ----------
        kinds : sequence of str
            Names of backends, or "noise" for a map at random.
        classes : sequence of ClassImages
        samples : int, optional
            Permutations of "shapley" and steps of "ig".
        rules : Network, optional
            The network with other LRP rules.
        """
        records: list[Record] = []
        for kind in kinds:
            for images in classes:
                file = self.out / "results" / "attribution" / images.name / f"{kind}.json"
                if not file.exists():
                    self.check_time()
                    write_json(file, [self._attribute(kind, images, samples, rules or self.network)])
                records += json.loads(file.read_text())
        return records

    def _attribute(self, kind: str, images: ClassImages, samples: int | None, rules: Network) -> Record:
        inputs, names = self.inputs(images.val)
        if kind == "shapley":
            names = names[: max(1, len(names) // 10)]
            inputs = inputs[: len(names)]
        target = self.network.output_of(images.index)
        begin = time.perf_counter()
        if kind == "noise":
            maps = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(images.index))
        else:
            backend = Backend(kind, rules, "", samples)
            maps = torch.cat([backend.attribute(x, target) for x in inputs.split(self.batch_size)])
        seconds = time.perf_counter() - begin
        scores = self.evaluate(inputs, maps[:, None].float(), target)
        about = {"stage": "attribution", "layer": "", "class": images.name, "method": kind, "n_subspaces": 1}
        about |= {"dims": None, "seed": 0, "files": names, "explain_seconds": seconds, "blocks": 1}
        self.say(f"attribution {images.name} {kind}: AUPC {sum(scores['aupc']) / len(names):.3f}")
        return about | scores

    def check_time(self) -> None:
        """Raise `OutOfTime` if the time that was granted is over."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise OutOfTime

    def finished(self) -> list[Record]:
        """All records on disk."""
        return read_records(self.out)

    def pairs(self, layer: str, backend: Backend, images: ClassImages) -> Pairs:
        """Activations and contexts of the training images of a class, or of all that are learned from."""
        if not self.learned_from:
            return self._pairs(layer, backend, images)
        parts = [self._pairs(layer, backend, each) for each in self.learned_from]
        # Common subspaces are meant for any target.
        known = [part.provenance and replace(part.provenance, target=None) for part in parts]
        return Pairs.concatenate([part.with_provenance(p) for part, p in zip(parts, known, strict=True)])

    def _pairs(self, layer: str, backend: Backend, images: ClassImages) -> Pairs:
        folder = self.out / "pairs" / layer / images.name
        whole = folder / "all.safetensors"
        if not whole.exists():
            inputs, _ = self.inputs(images.train)
            batches = list(inputs.split(self.batch_size))
            target = self.network.output_of(images.index)
            backend.collect(batches, target, self.positions, self.seed, PairStore(folder)).save(whole)
        return Pairs.load(whole)

    def subspaces(self, layer: str, backend: Backend, images: ClassImages, job: Job) -> Subspaces:
        """The fitted subspaces of a job, with the training curve in their metadata."""
        whose = "common" if self.learned_from else images.name
        file = self.out / "subspaces" / layer / whose / f"{job.name}.safetensors"
        if not file.exists():
            begin = time.perf_counter()
            pairs = self.pairs(layer, backend, images)
            found = job.fit(pairs)
            file.parent.mkdir(parents=True, exist_ok=True)
            found = found.with_metadata(fit_seconds=time.perf_counter() - begin)
            if not self.learned_from:
                found = found.with_metadata(class_index=images.index)
            if pairs.provenance is not None:  # explaining with another method or network gives a warning
                found = found.with_provenance(pairs.provenance)
            found.save(file)
        return Subspaces.load(file)

    def _run_job(
        self, stage: str, layer: str, backend: Backend, images: ClassImages, job: Job
    ) -> list[Record]:
        subspaces = self.subspaces(layer, backend, images, job)
        inputs, names = self.inputs(images.val)
        target = self.network.output_of(images.index)
        begin = time.perf_counter()
        parts = [backend.explain(batch, target, subspaces).float() for batch in inputs.split(self.batch_size)]
        blocks = check_maps(torch.cat(parts), inputs, subspaces.n_subspaces)
        seconds = time.perf_counter() - begin
        records = []
        for reading in job.readings:
            maps = torch.stack([blocks[:, list(group)].sum(1) for group in reading.groups], dim=1)
            scores = self.evaluate(inputs, maps, target)
            about = asdict(reading) | {"stage": stage, "layer": layer, "class": images.name}
            about |= {"seed": job.seed, "files": names, "explain_seconds": seconds, "blocks": blocks.shape[1]}
            records.append(about | scores)
        self._say(stage, layer, images, job, records)
        return records

    def evaluate(self, inputs: Tensor, maps: Tensor, target: int) -> Record:
        """Scores of maps (N, K, 3, H, W), one for each image."""
        curves = patch_flipping(
            self.network.model,
            inputs,
            maps,
            target,
            self.network.preprocessing,
            patch_size=self.evaluation.patch_size,
            schedule=self.evaluation.schedule,
            fill=self.evaluation.fill,
            batch_size=8,
        )
        return {
            "aupc": curves.aupc.tolist(),
            "aupc_of_removed": curves.aupc_of_removed.tolist(),
            "total_relevance": total_relevance(maps).sum(1).tolist(),
            "separability": separability(maps).tolist(),
            "peakness": peakness(maps).tolist(),
            "share": curves.share.tolist(),
            "curves": curves.scores.tolist(),
            "fill_seconds": curves.fill_seconds,
            "network_seconds": curves.network_seconds,
        }

    def inputs(self, files: list[Path]) -> tuple[Tensor, list[str]]:
        """Photographs as the network takes them, and their names; kept in memory."""
        key = "\n".join(map(str, files))
        if key not in self._images:
            pixels, names, unreadable = load_images(files, self.network.size)
            self.unreadable |= set(unreadable)
            preprocessing: Preprocessing = self.network.preprocessing
            inputs = preprocessing.to_inputs(pixels).contiguous(memory_format=torch.channels_last)
            self._images[key] = inputs, names
        return self._images[key]

    def _say(self, stage: str, layer: str, images: ClassImages, job: Job, records: list[Record]) -> None:
        for record in records:
            aupc = sum(record["aupc"]) / len(record["aupc"])
            network = record["network_seconds"] + record["fill_seconds"]
            self.say(
                f"{time.strftime('%H:%M:%S')} {stage} {layer} {images.name} {label(record)} seed {job.seed}: "
                f"AUPC {aupc:.3f}; {record['explain_seconds']:.0f} s maps, {network:.0f} s flipping"
            )


def read_records(out: Path) -> list[Record]:
    """All records in a folder of results, each once: two runs of curves over d may share dimensions."""
    found: dict[tuple[Any, ...], Record] = {}
    for file in sorted((out / "results").rglob("*.json")):
        for record in json.loads(file.read_text()):
            found.setdefault(tuple(record[name] for name in IDENTITY), record)
    return list(found.values())


def _digests(images: ClassImages) -> dict[str, str]:
    """Digest of the content of each photograph, by part, folder and name."""
    parts = [("train", file) for file in images.train] + [("val", file) for file in images.val]
    by_name: dict[str, list[Path]] = defaultdict(list)  # folders inside of a class may share their names
    for part, file in parts:
        by_name[f"{part}/{file.parent.name}/{file.name}"].append(file)
    return {name: files_digest(files) for name, files in by_name.items()}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def label(record: Record | Reading) -> str:
    """Name of a reading: method with d or K."""
    fields = record if isinstance(record, dict) else asdict(record)
    size = f"d={fields['dims']}" if fields["dims"] else f"K={fields['n_subspaces']}"
    return f"{fields['method']} {size}"


def write_json(file: Path, content: Any) -> None:
    """Write atomically: an interrupted run leaves no half file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(content, indent=1).encode())
