"""What every step of a run needs: network, class, layer and attribution method."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from drsa_core import (
    ProvenanceWarning,
    RelevanceLossWarning,
    Subspaces,
    check_provenance,
    model_fingerprint,
)
from drsa_core.storage import read_json, versions, write_json
from torch import Tensor

from .folders import TargetClass
from .images import load_images
from .layers import LayerInfo, find_concept_layer
from .networks import Network
from .progress import BadInput, Progress, one_line
from .settings import RunSettings
from .work import files_digest
from .wrappers import PASSES, Choice, Wrapper, choose_method, make_wrapper


@dataclass(frozen=True)
class Session:
    """What every step needs."""

    settings: RunSettings
    network: Network  # with the LRP rules that passed
    target: TargetClass
    layer: LayerInfo  # where concepts are found
    choice: Choice  # the attribution method, and why
    progress: Progress
    forward: float  # seconds of a forward pass of one image

    @property
    def method(self) -> str:
        """Name of the attribution method."""
        return self.choice.backend

    def wrapper(self, subspaces: Subspaces | None = None) -> Wrapper:
        """The explainer of the adapter, new each time."""
        return make_wrapper(
            self.method,
            self.network,
            self.layer.name,
            subspaces,
            samples=self.settings.samples,
            channel_dim=self.layer.channel_dim,
        )

    def seconds(self, n_images: int, n_concepts: int | None = None) -> float:
        """About how long it takes to collect pairs from images, or to explain them by concepts."""
        pairs, once, each = PASSES[self.method]
        return self.forward * n_images * (pairs if n_concepts is None else once + each * n_concepts)

    @contextmanager
    def step(
        self, name: str, what: str, seconds: float | None = None, notes: Path | None = None
    ) -> Iterator[None]:
        """A step of the run: timed, with its estimate shown, and noted; see `Progress.step` and `noted`."""
        with self.progress.step(name, what, seconds), noted(self.progress, notes):
            yield

    def check_use(self, subspaces: Subspaces) -> None:
        """Refuse subspaces that were learned for something else; by force there is a warning instead."""
        strict = not self.settings.force
        used = self.wrapper()._used_for(self.target.output)
        try:
            check_provenance(subspaces.provenance, used, "subspaces", strict)
        except ValueError as error:
            raise BadInput(f"{error}; --force uses them all the same") from error
        made, here = subspaces.metadata.get("preprocessing") or {}, self.network.describe_preprocessing()
        other = [
            f"{key}: {made[key]} there, {here[key]} here"
            for key in here
            if made.get(key, here[key]) != here[key]
        ]
        if other:
            text = f"the subspaces were made for something else: {'; '.join(other)}"
            if strict:
                raise BadInput(f"{text}; --force uses them all the same")
            warnings.warn(text, ProvenanceWarning, stacklevel=2)

    def decided_by(self, files: list[Path]) -> dict[str, Any]:
        """What decides results on these files."""
        return {
            "version": versions().get("captum-zennit-drsa"),
            "model": model_fingerprint(self.network.model),
            "layer": self.layer.name,
            "channel_dim": self.layer.channel_dim,
            "target": self.target.output,
            "method": self.wrapper()._used_for(self.target.output).method,
            "rules": self.choice.reason,
            "samples": self.settings.samples,
            "seed": self.settings.seed,
            # What is kept lies there batch by batch.
            "batch_size": self.settings.batch_size,
            **inputs_decided_by(self.network, files),
        }

    def read(self, files: list[Path]) -> tuple[Tensor, Tensor, list[str]]:
        """Inputs and pixels (N, 3, H, W), and names; files that cannot be read are noted."""
        with noted(self.progress):
            pixels, names, _ = load_images(files, *_shape(self.network))
        return to_inputs(self.network, pixels), pixels, names


@contextmanager
def noted(progress: Progress, file: Path | None = None) -> Iterator[None]:
    """What the library warns about becomes a note; a run that finds notes in the file says the same."""
    kept: list[str] = read_json(file) if file is not None and file.exists() else []
    for text in kept:
        progress.note(text)
    before = len(progress.notes)
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        for warning in caught:
            # Of lost relevance the certificate tells in numbers.
            if issubclass(warning.category, UserWarning) and warning.category is not RelevanceLossWarning:
                progress.note(one_line(warning.message, 300))
        new = progress.notes[before:]
        if file is not None and new:
            write_json(file, [*kept, *new])


def open_session(
    settings: RunSettings,
    network: Network,
    target: TargetClass,
    files: Sequence[Path],
    progress: Progress,
    layer: str | None,
    channel_dim: int | None,
) -> Session:
    """Choose layer and method for a network and a class; the first files that can be read are looked at."""
    inputs = read_first(network, files, max(2, settings.batch_size))
    info = find_concept_layer(network, layer, inputs[:1], channel_dim)
    choice = choose_method(settings.backend, network, inputs[:2], target.output, settings.force, info.name)
    if choice.is_other or "by force" in choice.reason:
        progress.note(choice.reason)
    with torch.no_grad():
        network.model(inputs.clone())
        begin = time.perf_counter()
        network.model(inputs.clone())
    forward = (time.perf_counter() - begin) / len(inputs)
    return Session(settings, choice.network, target, info, choice, progress, forward)


def read_first(network: Network, files: Sequence[Path], n_images: int) -> Tensor:
    """Inputs (n, 3, H, W) of the first files that can be read, on the network's device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all files are read later
        pixels, _, _ = load_images(files, *_shape(network), limit=n_images)
    return to_inputs(network, pixels)


def to_inputs(network: Network, pixels: Tensor) -> Tensor:
    """Pixels as the network takes them, on its device."""
    inputs = network.preprocessing.to_inputs(pixels)
    return inputs.contiguous(memory_format=torch.channels_last).to(network.device)


def inputs_decided_by(network: Network, files: list[Path]) -> dict[str, Any]:
    """What decides the inputs that a network gets from files."""
    return {
        "size": _shape(network),
        "range": network.preprocessing.to_inputs(torch.eye(3)[None, :, :, None]).tolist(),
        "files": files_digest(files),
    }


def metadata_of(network: Network, target: TargetClass, name: str) -> dict[str, Any]:
    """What subspaces remember beside their provenance: class, name of the network, preprocessing."""
    return {
        "explained_class": {"name": target.name, "index": target.index},
        "network": name,
        "preprocessing": network.describe_preprocessing(),
    }


def _shape(network: Network) -> tuple[int, int | None, str]:
    return network.size, network.resize, network.interpolation
