"""Attribution methods of Note D, behind one interface: pairs for the solvers, and K maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from captum.attr import Attribution, InputXGradient, IntegratedGradients, ShapleyValueSampling
from drsa_core import Pairs, PairStore, Subspaces
from torch import Tensor
from zennit.attribution import Gradient

import zennit_drsa
from captum_drsa import DisentangledAttribution, ShapleyContext, patch_mask
from zennit_drsa import DisentangledAttributor

from .networks import Network

PATCH = 16  # Shapley values are those of patches (Note D)
SAMPLES = {"shapley": 25, "ig": 10, "gxi": 1}  # permutations and steps of Note D


class Backend(Protocol):
    """Inputs are as the network takes them, (N, 3, H, W)."""

    def collect(
        self, batches: list[Tensor], target: int, positions: int, seed: int, store: PairStore
    ) -> Pairs:
        """Pairs (a, c) at random positions; batches that the store holds are not computed again."""

    def explain(self, inputs: Tensor, target: int, subspaces: Subspaces) -> Tensor:
        """Maps (N, K, 3, H, W)."""


@dataclass(frozen=True)
class LRP:
    """Zennit's rules: one pass for both steps."""

    network: Network
    layer: str

    def collect(
        self, batches: list[Tensor], target: int, positions: int, seed: int, store: PairStore
    ) -> Pairs:
        """As in `Backend`."""
        composite, model = self.network.composite(), self.network.model
        return zennit_drsa.collect(
            model, composite, self.layer, batches, target, positions, random_state=seed, store=store
        )

    def explain(self, inputs: Tensor, target: int, subspaces: Subspaces) -> Tensor:
        """As in `Backend`."""
        attributor = Gradient(self.network.model, self.network.composite())

        def chosen(output: Tensor) -> Tensor:
            # Relevance starts as the output itself (Note A).
            return output * torch.nn.functional.one_hot(torch.tensor(target), output.shape[1])

        with DisentangledAttributor(attributor, self.layer, subspaces) as disentangled:
            maps: Tensor = disentangled(inputs, chosen)[1]
        return maps.detach()


@dataclass(frozen=True)
class Captum:
    """Captum's methods in two steps (Note B); `samples` are permutations (Shapley) or input steps (IG)."""

    network: Network
    layer: str
    kind: str
    samples: int

    def collect(
        self, batches: list[Tensor], target: int, positions: int, seed: int, store: PairStore
    ) -> Pairs:
        """As in `Backend`."""
        with torch.random.fork_rng(devices=[]):  # Captum's samplers draw from the global generator
            torch.manual_seed(seed)
            return self._method(None).collect(batches, target, positions, seed, True, store)

    def explain(self, inputs: Tensor, target: int, subspaces: Subspaces) -> Tensor:
        """As in `Backend`."""
        method = self._method(subspaces)
        if self.kind == "gxi":
            maps: Tensor = method.attribute(inputs, target=target)
        elif self.kind == "ig":
            maps = method.attribute(inputs, target=target, n_steps=self.samples)
        else:
            maps = _shapley(method, inputs, target, self.samples)
        return maps.detach()

    def _method(self, subspaces: Subspaces | None) -> DisentangledAttribution:
        kinds = {"gxi": InputXGradient, "ig": IntegratedGradients, "shapley": ShapleyValueSampling}
        context = ShapleyContext(n_samples=self.samples) if self.kind == "shapley" else None
        return DisentangledAttribution(
            kinds[self.kind](self.network.model), self.layer, subspaces, context_method=context
        )


def _shapley(method: Attribution, inputs: Tensor, target: int, samples: int) -> Tensor:
    """Shapley values of patches; every call meets the same permutations."""
    mask = patch_mask(inputs, PATCH)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        maps: Tensor = method.attribute(
            inputs, target=target, feature_mask=mask, n_samples=samples, perturbations_per_eval=14
        )
    # Captum gives each value of a patch the relevance of the whole patch: share it out.
    return maps / (torch.bincount(mask.flatten())[mask] * inputs.shape[1])


def attribute(kind: str, network: Network, inputs: Tensor, target: int, samples: int | None) -> Tensor:
    """Maps (N, 3, H, W) in one step, of a backend or, for "noise", at random (Note D)."""
    if kind == "noise":
        return torch.rand(inputs.shape, generator=torch.Generator().manual_seed(target))
    if kind == "lrp":
        with Gradient(network.model, network.composite()) as attributor:
            one_hot = torch.nn.functional.one_hot(torch.tensor(target), network.n_outputs)
            maps: Tensor = attributor(inputs, lambda output: output * one_hot)[1]
    elif kind == "shapley":
        maps = _shapley(ShapleyValueSampling(network.model), inputs, target, samples or SAMPLES[kind])
    elif kind == "ig":
        maps = IntegratedGradients(network.model).attribute(inputs, target=target, n_steps=SAMPLES[kind])
    else:
        maps = InputXGradient(network.model).attribute(inputs.clone().requires_grad_(), target=target)
    return maps.detach()


def make_backend(name: str, network: Network, layer: str, samples: int | None) -> Backend:
    """The backend by name; `samples` defaults to the paper's 25 permutations or 10 steps."""
    if name == "lrp":
        return LRP(network, layer)
    return Captum(network, layer, name, samples or SAMPLES[name])
