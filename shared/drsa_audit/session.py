"""What every step of an audit needs: network, class, layer and attribution method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from drsa_core import model_fingerprint
from drsa_core.layer import find_layer
from drsa_core.storage import versions
from torch import Tensor

from .backend_choice import Choice, choose_backend
from .backends import Backend, make_backend
from .errors import BadInput
from .folders import TargetClass
from .layers import LayerInfo, inspect_layers, is_cut, suggested_layer
from .networks import Network
from .opening import read_images
from .progress import Progress
from .work import files_digest


@dataclass(frozen=True)
class Session:
    """What every step needs.

    Attributes
    ----------
    network : Network
        On the device, with the LRP rules that passed.
    name : str
        What the model is called.
    layer : LayerInfo
        Where concepts are found.
    target : TargetClass
    choice : Choice
        The attribution method, and why.
    samples : int or None
        Permutations or steps of the method.
    seed, batch_size : int
    device : torch.device
    progress : Progress
    strict : bool
        Whether subspaces that were made for something else are refused.
    """

    network: Network
    name: str
    layer: LayerInfo
    target: TargetClass
    choice: Choice
    samples: int | None
    seed: int
    batch_size: int
    device: torch.device
    progress: Progress
    strict: bool = True

    @property
    def backend(self) -> Backend:
        """The attribution method on this network at this layer."""
        return make_backend(
            self.choice.backend,
            self.network,
            self.layer.name,
            self.samples,
            self.layer.channel_dim,
            self.strict,
        )

    def decided_by(self, files: list[Path]) -> dict[str, Any]:
        """What decides results on these files."""
        return {
            "version": versions().get("captum-zennit-drsa"),
            "model": model_fingerprint(self.network.model),
            "layer": self.layer.name,
            "target": self.target.output,
            "backend": self.choice.backend,
            "rules": self.choice.reason,
            "samples": self.samples,
            "seed": self.seed,
            "size": [self.network.size, self.network.resize, self.network.interpolation],
            "range": self.network.preprocessing.to_inputs(torch.eye(3)[None, :, :, None]).tolist(),
            "files": files_digest(files),
        }

    def read(self, files: list[Path]) -> tuple[Tensor, Tensor, list[str]]:
        """Inputs and pixels (N, 3, H, W) on the device and the CPU, and names; unreadable ones are noted."""
        return read_images(self.network, files, self.progress, self.device)


def find_concept_layer(network: Network, layer: str | None, example: Tensor) -> LayerInfo:
    """The named layer, the network's default one, or the suggested one."""
    name = layer or network.layer
    layers = {info.name: info for info in inspect_layers(network.model, example, suggest=not name)}
    if not name:
        found = suggested_layer(list(layers.values()))
        if found is None:
            raise BadInput("no layer of this model suits concepts by itself: name one with --layer")
        name = found.name
    try:
        find_layer(network.model, name)
    except ValueError as error:
        raise BadInput(str(error)) from error
    info = layers[name]
    if info.n_runs != 1 or info.shape is None:
        why = "does not run" if not info.n_runs else f"runs {info.n_runs} times"
        why = "gives no single tensor" if info.n_runs == 1 else why
        raise BadInput(f"layer {name!r} {why} in a forward pass; choose another, see `drsa layers`")
    return replace(info, is_cut=is_cut(network.model, name, example)) if info.is_cut is None else info


def open_session(
    network: Network,
    name: str,
    target: TargetClass,
    inputs: Tensor,
    *,
    layer: str | None = None,
    backend: str = "lrp",
    samples: int | None = None,
    seed: int = 0,
    batch_size: int = 4,
    progress: Progress | None = None,
    force: bool = False,
) -> Session:
    """Choose layer and method for a network and a class.

    Parameters
    ----------
    inputs : tensor, shape (N, 3, H, W)
        Real inputs; the doctor looks at the first two.
    force : bool
        Take LRP where it is not valid, and subspaces that were made for something else.
    """
    progress = progress or Progress(shown=False)
    info = find_concept_layer(network, layer, inputs[:1])
    choice = choose_backend(backend, network, inputs[:2], target.output, force)
    if choice.is_other or "by force" in choice.reason:
        progress.note(choice.reason)
    device = next(network.model.parameters()).device
    return Session(
        choice.network,
        name,
        info,
        target,
        choice,
        samples,
        seed,
        batch_size,
        device,
        progress,
        strict=not force,
    )
