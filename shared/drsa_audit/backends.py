"""Attribution methods of Note D by name, behind one interface: pairs for the solvers, K maps, whole maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from captum.attr import Attribution, InputXGradient, IntegratedGradients, ShapleyValueSampling
from drsa_core import Pairs, PairStore, Subspaces
from drsa_core.target import Target
from torch import Tensor
from zennit.attribution import Gradient

from captum_drsa import DisentangledAttribution, ShapleyContext, patch_mask
from zennit_drsa import DisentangledAttributor
from zennit_drsa.explained import start_of_target

from .networks import Network

PATCH = 16  # Shapley values are those of patches (Note D)
# Permutations and steps on the input of Note D, where a method has them.
SAMPLES = {"lrp": None, "gxi": None, "ig": 10, "shapley": 25}


class Backend(Protocol):
    """Inputs are as the network takes them, (N, 3, H, W); the target is the number of an output."""

    def collect(
        self, batches: list[Tensor], target: int, positions: int, seed: int, store: PairStore
    ) -> Pairs:
        """Pairs (a, c) at random positions; batches that the store holds are not computed again."""

    def explain(self, inputs: Tensor, target: int, subspaces: Subspaces) -> Tensor:
        """Maps (N, K, 3, H, W)."""

    def attribute(self, inputs: Tensor, target: int) -> Tensor:
        """Standard maps in one step, (N, 3, H, W)."""


def make_backend(name: str, network: Network, layer: str, samples: int | None = None) -> Backend:
    """A backend by name: "lrp", "gxi", "ig" or "shapley".

    Parameters
    ----------
    name : str
    network : Network
    layer : str
        The layer that is split.
    samples : int, optional
        Permutations of "shapley", by default the paper's 25, or steps on the input of "ig", by default 10.
        The others have none.
    """
    if name not in SAMPLES:
        raise ValueError(f"backend must be one of {', '.join(SAMPLES)}, got {name!r}")
    if samples is not None and samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    if name == "lrp":
        return LRP(network, layer)
    return Captum(network, layer, name, (samples or SAMPLES[name]) if SAMPLES[name] else None)


def relevance_at(target: Target) -> Callable[[Tensor], Tensor]:
    """Zennit's `attr_output` for a target: relevance starts as the output itself (Note A).

    Parameters
    ----------
    target : int, list or tensor of int, or function of the output
        As in `zennit_drsa.DisentangledAttributor.context`.
    """
    return start_of_target(target, holds_relevance=True)


@dataclass(frozen=True)
class LRP:
    """Zennit's rules: one pass for both steps."""

    network: Network
    layer: str

    def collect(
        self, batches: list[Tensor], target: int, positions: int, seed: int, store: PairStore
    ) -> Pairs:
        """As in `Backend`."""
        return self._wrapped(None).collect(batches, target, positions, seed, store=store)

    def explain(self, inputs: Tensor, target: int, subspaces: Subspaces) -> Tensor:
        """As in `Backend`."""
        with self._wrapped(subspaces) as wrapped:
            maps: Tensor = wrapped(inputs, relevance_at(target))[1]
        return maps.detach()

    def attribute(self, inputs: Tensor, target: int) -> Tensor:
        """As in `Backend`."""
        with Gradient(self.network.model, self.network.composite(self.layer)) as gradient:
            maps: Tensor = gradient(inputs, relevance_at(target))[1]
        return maps.detach()

    def _wrapped(self, subspaces: Subspaces | None) -> DisentangledAttributor:
        gradient = Gradient(self.network.model, self.network.composite(self.layer))
        return DisentangledAttributor(gradient, self.layer, subspaces)


@dataclass(frozen=True)
class Captum:
    """Captum's methods in two steps (Note B); `samples` are permutations (Shapley) or input steps (IG)."""

    network: Network
    layer: str
    kind: str
    samples: int | None

    def collect(
        self, batches: list[Tensor], target: int, positions: int, seed: int, store: PairStore
    ) -> Pairs:
        """As in `Backend`."""
        with torch.random.fork_rng(devices=[]):  # Captum's samplers draw from the global generator
            torch.manual_seed(seed)
            return self._wrapped(None).collect(batches, target, positions, seed, store=store)

    def explain(self, inputs: Tensor, target: int, subspaces: Subspaces) -> Tensor:
        """As in `Backend`."""
        return self._attribute(self._wrapped(subspaces), inputs, target)

    def attribute(self, inputs: Tensor, target: int) -> Tensor:
        """As in `Backend`."""
        return self._attribute(self._method(), inputs, target)

    def _method(self) -> Attribution:
        methods = {"gxi": InputXGradient, "ig": IntegratedGradients, "shapley": ShapleyValueSampling}
        return methods[self.kind](self.network.model)

    def _wrapped(self, subspaces: Subspaces | None) -> DisentangledAttribution:
        context = None
        if self.kind == "shapley" and self.samples is not None:
            context = ShapleyContext(n_samples=self.samples)
        return DisentangledAttribution(self._method(), self.layer, subspaces, context_method=context)

    def _attribute(self, method: Attribution, inputs: Tensor, target: int) -> Tensor:
        """The method's maps, of whatever it wraps; every call meets the same permutations."""
        options: dict[str, Any] = {}
        mask = patch_mask(inputs, PATCH)
        if self.kind == "ig":
            options = {"n_steps": self.samples}
        elif self.kind == "shapley":
            options = {"feature_mask": mask, "n_samples": self.samples, "perturbations_per_eval": 14}
        x = inputs.clone().requires_grad_(self.kind == "gxi")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            maps: Tensor = method.attribute(x, target=target, **options).detach()
        if self.kind == "shapley":
            # Captum gives each value of a patch the relevance of the whole patch: share it out.
            maps = maps / (torch.bincount(mask.flatten())[mask] * inputs.shape[1])
        return maps
