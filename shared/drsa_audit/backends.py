"""Attribution methods of Note D by name, behind one interface: pairs for the solvers, K maps, whole maps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from captum.attr import Attribution, InputXGradient, IntegratedGradients, ShapleyValueSampling
from drsa_core import Explanation, Pairs, PairStore, Subspaces
from drsa_core.explainer import Explainer
from drsa_core.targets import Target
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

    def explanation(self, inputs: Tensor, target: int, subspaces: Subspaces) -> Explanation:
        """The maps with the whole map, R_k, the score, and what adds up to what."""

    def concept_relevance(self, inputs: Tensor, target: int, subspaces: Subspaces) -> Tensor:
        """R_k at the layer, (N, K); much cheaper than maps."""

    def attribute(self, inputs: Tensor, target: int) -> Tensor:
        """Standard maps in one step, (N, 3, H, W)."""

    def explainer(self, subspaces: Subspaces | None) -> Explainer:
        """The wrapper of the adapter behind it."""


def make_backend(
    name: str,
    network: Network,
    layer: str,
    samples: int | None = None,
    channel_dim: int = 1,
    strict: bool = False,
    skip_tokens: int = 0,
) -> Backend:
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
    channel_dim : int
        Axis of the features in the layer's output: 1 for (N, D, H, W), −1 for tokens (N, T, D).
    strict : bool
        Whether subspaces that were learned for something else are an error instead of a warning.
    skip_tokens : int
        Tokens to leave out of the pairs, as in `drsa_core`'s `collect`.
    """
    if name not in SAMPLES:
        raise ValueError(f"backend must be one of {', '.join(SAMPLES)}, got {name!r}")
    if samples is not None and samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    if name == "lrp":
        return LRP(network, layer, channel_dim, strict, skip_tokens)
    number = (samples or SAMPLES[name]) if SAMPLES[name] else None
    return Captum(network, layer, name, number, channel_dim, strict, skip_tokens)


@contextmanager
def repeatable(seed: int = 0) -> Iterator[None]:
    """Samplers of Captum, which draw from the global generator, draw the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class _SeededBatches:
    """Batches that each have a seed of their own, also where those before are not computed again."""

    def __init__(self, batches: list[Tensor], seed: int) -> None:
        self.batches, self.seed = batches, seed

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        for number, batch in enumerate(self.batches):
            torch.manual_seed(self.seed + number)
            yield batch


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
    channel_dim: int = 1
    strict: bool = False
    skip_tokens: int = 0

    def collect(
        self, batches: list[Tensor], target: int, positions: int, seed: int, store: PairStore
    ) -> Pairs:
        """As in `Backend`."""
        return self.explainer(None).collect(
            batches, target, positions, seed, store=store, skip_tokens=self.skip_tokens
        )

    def explain(self, inputs: Tensor, target: int, subspaces: Subspaces) -> Tensor:
        """As in `Backend`."""
        with self.explainer(subspaces) as wrapped:
            maps: Tensor = wrapped(inputs, relevance_at(target))[1]
        return maps.detach()

    def explanation(self, inputs: Tensor, target: int, subspaces: Subspaces) -> Explanation:
        """As in `Backend`."""
        return self.explainer(subspaces).explain(inputs, target)

    def concept_relevance(self, inputs: Tensor, target: int, subspaces: Subspaces) -> Tensor:
        """As in `Backend`."""
        return self.explainer(subspaces).concept_relevance(inputs, target).detach()

    def attribute(self, inputs: Tensor, target: int) -> Tensor:
        """As in `Backend`."""
        with Gradient(self.network.model, self.network.composite(self.layer)) as gradient:
            maps: Tensor = gradient(inputs, relevance_at(target))[1]
        return maps.detach()

    def explainer(self, subspaces: Subspaces | None) -> DisentangledAttributor:
        """As in `Backend`."""
        gradient = Gradient(self.network.model, self.network.composite(self.layer))
        return DisentangledAttributor(
            gradient, self.layer, subspaces, channel_dim=self.channel_dim, strict=self.strict
        )


@dataclass(frozen=True)
class Captum:
    """Captum's methods in two steps (Note B); `samples` are permutations (Shapley) or input steps (IG)."""

    network: Network
    layer: str
    kind: str
    samples: int | None
    channel_dim: int = 1
    strict: bool = False
    skip_tokens: int = 0

    def collect(
        self, batches: list[Tensor], target: int, positions: int, seed: int, store: PairStore
    ) -> Pairs:
        """As in `Backend`."""
        with repeatable(seed):
            seeded = _SeededBatches(batches, seed)
            return self.explainer(None).collect(
                seeded, target, positions, seed, store=store, skip_tokens=self.skip_tokens
            )

    def explain(self, inputs: Tensor, target: int, subspaces: Subspaces) -> Tensor:
        """As in `Backend`."""
        return self._attribute(self.explainer(subspaces), inputs, target)

    def explanation(self, inputs: Tensor, target: int, subspaces: Subspaces) -> Explanation:
        """As in `Backend`."""
        wrapped, options = self.explainer(subspaces), self._options(inputs)
        with repeatable():
            found = wrapped.explain(self._leaf(inputs), target, **options)
        shares = self._shares(inputs)
        whole = None if found.whole is None else found.whole / shares
        return replace(found, maps=found.maps / shares, whole=whole, entries_per_feature=None)

    def concept_relevance(self, inputs: Tensor, target: int, subspaces: Subspaces) -> Tensor:
        """As in `Backend`."""
        wrapped = self.explainer(subspaces)
        with repeatable():
            return wrapped.concept_relevance(self._leaf(inputs), target).detach()

    def attribute(self, inputs: Tensor, target: int) -> Tensor:
        """As in `Backend`."""
        return self._attribute(self._method(), inputs, target)

    def _method(self) -> Attribution:
        methods = {"gxi": InputXGradient, "ig": IntegratedGradients, "shapley": ShapleyValueSampling}
        return methods[self.kind](self.network.model)

    def explainer(self, subspaces: Subspaces | None) -> DisentangledAttribution:
        """As in `Backend`."""
        context = None
        if self.kind == "shapley" and self.samples is not None:
            context = ShapleyContext(n_samples=self.samples)
        return DisentangledAttribution(
            self._method(),
            self.layer,
            subspaces,
            context_method=context,
            channel_dim=self.channel_dim,
            strict=self.strict,
        )

    def _attribute(self, method: Attribution, inputs: Tensor, target: int) -> Tensor:
        """The method's maps, of whatever it wraps."""
        options = self._options(inputs)
        with repeatable():
            maps: Tensor = method.attribute(self._leaf(inputs), target=target, **options).detach()
        return maps / self._shares(inputs)

    def _leaf(self, inputs: Tensor) -> Tensor:
        return inputs.clone().requires_grad_(self.kind == "gxi")

    def _options(self, inputs: Tensor) -> dict[str, Any]:
        if self.kind == "ig":
            return {"n_steps": self.samples}
        if self.kind == "shapley":
            mask = patch_mask(inputs, PATCH)
            return {"feature_mask": mask, "n_samples": self.samples, "perturbations_per_eval": 14}
        return {}

    def _shares(self, inputs: Tensor) -> Tensor | int:
        """Captum gives each value of a patch the relevance of the whole patch: it is shared out."""
        if self.kind != "shapley":
            return 1
        mask = patch_mask(inputs, PATCH)
        return torch.bincount(mask.flatten())[mask] * inputs.shape[1]
