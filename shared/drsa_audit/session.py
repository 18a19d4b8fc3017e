"""What every step of an audit needs: network, class, layer and attribution method."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from drsa_core import Subspaces, model_fingerprint
from drsa_core.layer import find_layer
from drsa_core.provenance import Provenance, ProvenanceWarning, check_provenance
from drsa_core.storage import versions
from drsa_core.token_maps import find_layout
from torch import Tensor

from .backend_choice import Choice, choose_backend
from .backends import Backend, make_backend
from .errors import BadInput
from .folders import TargetClass
from .layers import LayerInfo, inspect_layers, is_cut, suggested_layer, tell_axis
from .networks import Network
from .opening import RunSettings, describe_preprocessing, read_first, read_images
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
            self.skip_tokens,
        )

    @property
    def skip_tokens(self) -> int:
        """Class and register tokens at the layer: they stand for no place, and concepts are of places."""
        if len(self.layer.shape or ()) != 2:
            return 0
        example = torch.empty(1, 3, self.network.size, self.network.size)
        layout = find_layout(self.network.model, example, self.layer.n_positions)
        return 0 if layout is None else layout.n_prefix

    def used_for(self) -> Provenance:
        """What subspaces are used for here: model, layer, class, and the method with its parameters."""
        return self.backend.explainer(None)._used_for(self.target.output)

    def check_use(self, subspaces: Subspaces) -> None:
        """Compare what the subspaces were learned for with what they are used for.

        Raises
        ------
        ValueError
            If they differ and the session is strict; otherwise there is a `ProvenanceWarning`.
        """
        check_provenance(subspaces.provenance, self.used_for(), "subspaces", self.strict)
        made = subspaces.metadata.get("preprocessing")
        here = describe_preprocessing(self.network)
        if not isinstance(made, dict):
            return
        other = [
            f"{key}: {made[key]} there, {here[key]} here"
            for key in here
            if made.get(key, here[key]) != here[key]
        ]
        if other:
            message = f"the subspaces were made for something else: {'; '.join(other)}"
            if self.strict:
                raise ValueError(message)
            warnings.warn(message, ProvenanceWarning, stacklevel=2)

    def decided_by(self, files: list[Path]) -> dict[str, Any]:
        """What decides results on these files."""
        return {
            "version": versions().get("captum-zennit-drsa"),
            "model": model_fingerprint(self.network.model),
            "layer": self.layer.name,
            "channel_dim": self.layer.channel_dim,
            "skip_tokens": self.skip_tokens,
            "target": self.target.output,
            "backend": self.choice.backend,
            "rules": self.choice.reason,
            "method": self.used_for().method,
            "samples": self.samples,
            "seed": self.seed,
            # What is kept lies there batch by batch.
            "batch_size": self.batch_size,
            **inputs_decided_by(self.network, files),
        }

    def read(self, files: list[Path]) -> tuple[Tensor, Tensor, list[str]]:
        """Inputs and pixels (N, 3, H, W) on the device and the CPU, and names; unreadable ones are noted."""
        return read_images(self.network, files, self.progress, self.device)


def inputs_decided_by(network: Network, files: list[Path]) -> dict[str, Any]:
    """What decides the inputs that a network gets from files."""
    return {
        "size": [network.size, network.resize, network.interpolation],
        "range": network.preprocessing.to_inputs(torch.eye(3)[None, :, :, None]).tolist(),
        "files": files_digest(files),
    }


def find_concept_layer(
    network: Network, layer: str | None, example: Tensor, channel_dim: int | None = None
) -> LayerInfo:
    """The named layer, the network's default one, or the suggested one.

    Parameters
    ----------
    channel_dim : {1, -1}, optional
        Axis of the features in its output, if the user says so.
    """
    name = layer or network.layer
    layers = {info.name: info for info in inspect_layers(network.model, example, name)}
    if not name:
        found = suggested_layer(list(layers.values()))
        if found is None:
            raise BadInput("no layer of this model suits concepts by itself: name one with --layer")
        name = found.name
    try:
        find_layer(network.model, name)
    except ValueError as error:
        raise BadInput(str(error)) from error
    info = replace(layers[name], given_dim=channel_dim)
    if info.n_runs != 1 or info.shape is None:
        why = "does not run" if not info.n_runs else f"runs {info.n_runs} times"
        why = "gives no single tensor" if info.n_runs == 1 else why
        raise BadInput(f"layer {name!r} {why} in a forward pass; choose another, see `drsa layers`")
    if channel_dim not in (None, 1, -1):
        raise BadInput(f"--channel-dim must be 1 or -1, got {channel_dim}")
    info = tell_axis(network.model, info, example)
    if info.is_ambiguous:
        shape = "×".join(map(str, info.shape or ()))
        raise BadInput(
            f"the output of layer {name!r}, {shape}, does not say which axis holds the features; give "
            "--channel-dim 1 if it is the first one, --channel-dim -1 if it is the last"
        )
    return replace(info, is_cut=is_cut(network.model, name, example)) if info.is_cut is None else info


def open_session(
    settings: RunSettings,
    network: Network,
    target: TargetClass,
    files: Sequence[Path],
    progress: Progress,
    *,
    layer: str | None = None,
    channel_dim: int | None = None,
) -> tuple[Session, Tensor]:
    """Choose layer and method for a network and a class.

    Parameters
    ----------
    settings : RunSettings
        With `force`, LRP is taken where it is not valid, and subspaces that were made for something else.
    network : Network
        As `open_model` gives it.
    target : TargetClass
    files : sequence of path
        The first ones that can be read are looked at.
    progress : Progress
    layer, channel_dim
        Where the concepts are, as far as it is known.

    Returns
    -------
    Session
    tensor, shape (n, 3, H, W)
        Inputs of the first files, at most a batch.
    """
    force = settings.force
    inputs = read_first(network, files, max(2, settings.batch_size))
    info = find_concept_layer(network, layer, inputs[:1], channel_dim)
    choice = choose_backend(settings.backend, network, inputs[:2], target.output, force, info.name)
    if choice.is_other or "by force" in choice.reason:
        progress.note(choice.reason)
    session = Session(
        choice.network,
        settings.name,
        info,
        target,
        choice,
        settings.samples,
        settings.seed,
        settings.batch_size,
        inputs.device,
        progress,
        strict=not force,
    )
    return session, inputs
