"""`run_fit_all`: concepts of every class of a folder of class folders, shared by the ranks of `torchrun`."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from drsa_core import DRSA, ClassIndex, fit_many, joined_ranks
from drsa_core.explainer import Explainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from zennit_drsa import DisentangledAttributor

from .audit_steps import PASSES, forward_seconds
from .backends import Backend
from .concepts import AUTO
from .errors import BadInput
from .fitting import FitSettings
from .folders import TargetClass, class_files, find_target
from .images import load_images
from .networks import Network
from .opening import count_outputs, open_network
from .progress import Progress
from .session import open_session

ALL = "all"


class LabelledFiles(Dataset[tuple[Tensor, int]]):
    """Images with the number of their output, read when they are asked for.

    An image that cannot be read is black, with `n_outputs` as its number, which no class has.
    """

    def __init__(self, network: Network, files: list[tuple[Path, int]], n_outputs: int) -> None:
        self.network, self.files, self.n_outputs = network, files, n_outputs
        self.unreadable: list[Path] = []

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        file, output = self.files[number]
        network = self.network
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it becomes a note
                pixels, _, _ = load_images([file], network.size, network.resize, network.interpolation)
        except ValueError:
            self.unreadable.append(file)
            return torch.zeros(3, network.size, network.size), self.n_outputs
        return network.preprocessing.to_inputs(pixels)[0], output


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
    the ranks. A run that was interrupted goes on. Fits are not repeated: stability is not tested.
    """
    if settings.subspaces == AUTO:
        raise BadInput(f"--target {ALL} needs a number of concepts, got --subspaces {AUTO}")
    if settings.out.is_file():
        raise BadInput(f"{settings.out} is a file; --target {ALL} writes a folder")
    with joined_ranks() as ranks:
        progress.shown = progress.shown and ranks.is_first
        if settings.device.startswith("cuda"):
            settings = replace(settings, device=str(ranks.device))
        with progress.step("prepare", "Loading the model"):
            network = open_network(settings)
            device = next(network.model.parameters()).device
            blank = torch.zeros(1, 3, network.size, network.size, device=device)
            n_outputs = count_outputs(network, blank)
            by_class = class_files(settings.train, settings.train_images)
            targets = {
                # A number says more than a name, which two classes may have.
                name: find_target(network, n_outputs, _number(name) or name, [settings.train])
                for name in by_class
            }
            _check_different(targets)
            files = [(file, targets[name].output) for name, own in by_class.items() for file in own]
            images = LabelledFiles(network, files, n_outputs)
            first = torch.stack([images[i][0] for i in range(min(2, len(images)))]).to(device)
            session = open_session(
                network,
                settings.name,
                next(iter(targets.values())),
                first,
                layer=settings.layer,
                backend=settings.backend,
                samples=settings.samples,
                seed=settings.seed,
                batch_size=settings.batch_size,
                progress=progress,
                force=settings.force,
            )
        images.unreadable.clear()
        estimate = (
            forward_seconds(session, first) * len(images) * PASSES[session.choice.backend][0] / ranks.size
        )
        what = (
            f"Collecting pairs from {len(images)} images, then learning concepts of {len(by_class)} classes"
        )
        with progress.step("classes", f"{what}; pairs", estimate), _entered(session.backend) as explainer:
            index = fit_many(
                explainer,
                DataLoader(images, batch_size=settings.batch_size),
                settings.out,
                DRSA(int(settings.subspaces), balance=settings.balance, random_state=settings.seed),
                classes=[target.output for target in targets.values()],
                names={target.output: target.name for target in targets.values()},
                positions=settings.positions,
                random_state=settings.seed,
                progress=progress.shown,
                ranks=ranks,
            )
        unreadable = [
            str(file) for said in ranks.messages([str(f) for f in images.unreadable]) for file in said
        ]
        if unreadable:
            shown = ", ".join(unreadable[:5]) + (", …" if len(unreadable) > 5 else "")
            progress.note(f"{len(unreadable)} images cannot be read and were skipped: {shown}")
        return index


def _entered(backend: Backend) -> AbstractContextManager[Explainer]:
    """The explainer, with Zennit's rules registered for the whole job: pairs then know by which they came."""
    explainer = backend.explainer(None)
    return explainer if isinstance(explainer, DisentangledAttributor) else nullcontext(explainer)


def _number(folder_name: str) -> str | None:
    found = re.match(r"(\d+)(_|$)", folder_name)
    return found[1] if found else None


def _check_different(targets: dict[str, TargetClass]) -> None:
    outputs = [target.output for target in targets.values()]
    for name, target in targets.items():
        if outputs.count(target.output) > 1:
            raise BadInput(f"more than one class folder is of output {target.output}, e.g. {name}")
