"""`run_fit_all`: concepts of every class of a folder of class folders, shared by the ranks of `torchrun`."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from drsa_core import DRSA, ClassIndex, Ranks, Subspaces, fit_many, joined_ranks
from drsa_core.storage import read_json, write_json
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from zennit_drsa import DisentangledAttributor

from .folders import TargetClass, class_files, find_target, images_in, number_of
from .images import UnreadablePhoto, load_photo, skipped
from .networks import Network, count_outputs, open_network
from .progress import BadInput, Progress
from .session import inputs_decided_by, metadata_of, open_session
from .settings import FitSettings
from .steps import AUTO
from .work import digest
from .wrappers import repeatable

ALL = "all"
#: In the folder of a job: from what it was learned.
INPUTS = "inputs.json"


class LabelledFiles(Dataset[tuple[Tensor, int]]):
    """Images with the number of their output, read when they are asked for.

    An image that cannot be read is black, with `n_outputs` as its number, which no class has.
    """

    def __init__(self, network: Network, files: list[tuple[Path, int]], n_outputs: int) -> None:
        self.network, self.files, self.n_outputs = network, files, n_outputs
        self.unreadable: list[str] = []

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        network, (file, output) = self.network, self.files[number]
        try:
            pixels = load_photo(file, network.size, network.resize, network.interpolation)
        except UnreadablePhoto as error:
            self.unreadable.append(str(error))
            return torch.zeros(3, network.size, network.size), self.n_outputs
        return network.preprocessing.to_inputs(pixels[None])[0], output


def check_alone(settings: FitSettings) -> None:
    """Refuse a single class under `torchrun`: every rank would do the same work in the same folder."""
    if settings.target != ALL and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BadInput(
            f"one class ({settings.target}) is learned by one process: start `drsa fit` without torchrun, or "
            f"give --target {ALL} for all class folders of {settings.train}"
        )


def run_fit_all(settings: FitSettings, progress: Progress) -> ClassIndex:
    """Learn the concepts of every class of a folder of class folders, into the folder `settings.out`.

    One pass over all images, then one fit for each class; under `torchrun` batches and classes are shared by
    the ranks. A run that was interrupted goes on; one with other images or another preprocessing is refused,
    also if a file that could not be read was repaired. Fits are not repeated: stability is not tested.
    Classes without an image that can be read are in `failed`.
    """
    if settings.subspaces == AUTO:
        raise BadInput(f"--target {ALL} needs a number of concepts, got --subspaces {AUTO}")
    if settings.work is not None:
        raise BadInput(f"--target {ALL} keeps finished parts in the folder of --out; leave out --work")
    if settings.out.is_file():
        raise BadInput(f"{settings.out} is a file; --target {ALL} writes a folder")
    with joined_ranks() as ranks:
        progress.shown = progress.shown and ranks.is_first
        if settings.device.startswith("cuda"):
            settings = replace(settings, device=str(ranks.device))
        with progress.step("prepare", "Loading the model"):
            network = open_network(settings)
            n_outputs = count_outputs(network)
            by_class = class_files(settings.train, settings.train_images)
            if beside := images_in(settings.train):
                progress.note(
                    f"images beside the class folders are not used: {len(beside)}, e.g. {beside[0]}"
                )
            targets = _targets(network, n_outputs, settings.train, by_class)
            files = [(file, targets[name].output) for name, own in by_class.items() for file in own]
            images = LabelledFiles(network, files, n_outputs)
            target, paths = next(iter(targets.values())), [file for file, _ in files]
            session = open_session(
                settings, network, target, paths, progress, settings.layer, settings.channel_dim
            )
            with ranks.all_or_none(f"opening {settings.out}"):
                if ranks.is_first:
                    _check_images(settings, network, files)
        what = (
            f"Collecting pairs from {len(images)} images, then learning concepts of {len(by_class)} classes; "
            "pairs"
        )
        explainer = session.wrapper()
        # With Zennit's rules registered for the whole job, pairs know by which they came.
        registered = explainer if isinstance(explainer, DisentangledAttributor) else nullcontext()
        seconds = session.seconds(len(images)) / ranks.size
        with (
            progress.step("classes", what, seconds),
            repeatable(settings.seed + ranks.rank),
            registered,
        ):
            index = fit_many(
                explainer,
                DataLoader(images, batch_size=settings.batch_size),
                settings.out,
                DRSA(int(settings.subspaces), balance=settings.balance, random_state=settings.seed),
                classes=[target.output for target in targets.values()],
                names={target.output: target.name for target in targets.values()},
                positions=settings.positions,
                random_state=settings.seed,
                skip_tokens=session.layer.n_prefix,
                progress=progress.shown,
                ranks=ranks,
            )
        unreadable = [text for said in ranks.all_gather(images.unreadable) for text in said]
        if unreadable:
            progress.note(skipped(unreadable, len(images)))
        return _completed(index, targets, by_class, network, settings.model_name, ranks)


def _targets(
    network: Network, n_outputs: int, folder: Path, by_class: dict[str, list[Path]]
) -> dict[str, TargetClass]:
    """The class of each folder; a number says more than a name, which two classes may have."""
    targets: dict[str, TargetClass] = {}
    for name in by_class:
        number = number_of(name)
        target = find_target(network, n_outputs, name if number is None else str(number), [folder])
        if any(other.output == target.output for other in targets.values()):
            raise BadInput(f"more than one class folder is of output {target.output}, e.g. {name}")
        targets[name] = target
    return targets


def _check_images(settings: FitSettings, network: Network, files: list[tuple[Path, int]]) -> None:
    """Refuse a folder in which a job on other images, or on other inputs from them, was begun.

    Pairs lie there by the number of their batch, which does not tell from what they came.
    """
    names = [[str(file.relative_to(settings.train)), output] for file, output in files]
    decided = {**inputs_decided_by(network, [file for file, _ in files]), "names": names}
    here = {
        "preprocessing": network.describe_preprocessing(),
        "batch size": settings.batch_size,
        "number of images": len(files),
        "names or contents of images": digest(decided),
    }
    file = settings.out / INPUTS
    if not file.exists():
        settings.out.mkdir(parents=True, exist_ok=True)
        write_json(file, here)
        return
    there = read_json(file)
    if other := [key for key in here if there.get(key) != here[key]]:
        raise BadInput(
            f"{settings.out} was learned from other inputs ({', '.join(other)}); use another folder, or "
            "remove this one"
        )


def _completed(
    index: ClassIndex,
    targets: dict[str, TargetClass],
    by_class: dict[str, list[Path]],
    network: Network,
    name: str,
    ranks: Ranks,
) -> ClassIndex:
    """The index with classes that have no image, and subspaces that know their class and preprocessing."""
    missing = {
        target.output: f"none of the {len(by_class[folder])} images in {folder} can be read"
        for folder, target in targets.items()
        if target.output not in index.classes and target.output not in index.failed
    }
    index = replace(index, failed=dict(sorted({**index.failed, **missing}.items())))
    with ranks.all_or_none("writing the index"):
        if ranks.is_first:
            for target in targets.values():
                if target.output in index.classes:
                    file = index.folder / index.classes[target.output]["file"]
                    made, about = Subspaces.load(file), metadata_of(network, target, name)
                    if any(made.metadata.get(key) != value for key, value in about.items()):
                        made.with_metadata(**about).save(file)
            index.save()
    if not index.classes:
        why = "; ".join(f"class {label}: {text}" for label, text in list(index.failed.items())[:3])
        raise BadInput(f"no class has concepts ({why})")
    return index
