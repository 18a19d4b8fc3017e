"""Attribution methods of Note D by name: pairs for the solvers, K maps, and standard maps in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from captum.attr import Attribution, InputXGradient, IntegratedGradients, ShapleyValueSampling
from drsa_audit import Network
from drsa_audit.networks import SuitableRules, is_torchvision_resnet
from drsa_audit.wrappers import (
    NAMES,
    PATCH,
    SeededBatches,
    Wrapper,
    make_wrapper,
    options_of,
    repeatable,
)
from drsa_core import Pairs, PairStore, Subspaces
from torch import Tensor, nn
from zennit.attribution import Gradient
from zennit.composites import EpsilonGammaBox, MixedComposite, NameMapComposite
from zennit.core import Composite
from zennit.rules import Epsilon, Gamma

from captum_drsa import patch_mask
from zennit_drsa import TorchvisionCanonizer


def entries_of_patch(method: str, inputs: Tensor) -> Tensor | int:
    """How many entries of a map share a value: Captum gives each the relevance of the whole patch."""
    if method != "shapley":
        return 1
    mask = patch_mask(inputs, PATCH)
    return torch.bincount(mask.flatten())[mask] * inputs.shape[1]


@dataclass(frozen=True)
class Backend:
    """A method on a network at a layer. Inputs are (N, 3, H, W); the target is the number of an output.

    Parameters
    ----------
    name : {"lrp", "gxi", "ig", "shapley"}
    network : Network
    layer : str
        The layer that is split.
    samples : int, optional
        Permutations of "shapley", by default the paper's 25, or steps on the input of "ig", by default 10.
    """

    name: str
    network: Network
    layer: str
    samples: int | None = None

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"backend must be one of {', '.join(NAMES)}, got {self.name!r}")
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}")

    def explainer(self, subspaces: Subspaces | None = None) -> Wrapper:
        """The wrapper of the adapter behind it."""
        return make_wrapper(self.name, self.network, self.layer, subspaces, samples=self.samples)

    def collect(
        self, batches: list[Tensor], target: int, positions: int, seed: int, store: PairStore
    ) -> Pairs:
        """Pairs (a, c) at random positions; batches that the store holds are not computed again."""
        with repeatable(seed):
            return self.explainer().collect(
                SeededBatches(batches, seed), target, positions, seed, store=store
            )

    def explain(self, inputs: Tensor, target: int, subspaces: Subspaces) -> Tensor:
        """Maps (N, K, 3, H, W)."""
        wrapped, options = self.explainer(subspaces), options_of(self.name, inputs, self.samples)
        with repeatable():
            found = wrapped.explain(self._leaf(inputs), target, whole=False, **options)
        return found.maps.detach() / entries_of_patch(self.name, inputs)

    def attribute(self, inputs: Tensor, target: int) -> Tensor:
        """Standard maps in one step, (N, 3, H, W)."""
        model = self.network.model
        if self.name == "lrp":
            with Gradient(model, self.network.composite(self.layer or None)) as gradient:
                relevance: Tensor = gradient(inputs, relevance_at(target))[1]
            return relevance.detach()
        kinds = {"gxi": InputXGradient, "ig": IntegratedGradients, "shapley": ShapleyValueSampling}
        method: Attribution = kinds[self.name](model)
        options = options_of(self.name, inputs, self.samples)
        with repeatable():
            maps: Tensor = method.attribute(self._leaf(inputs), target=target, **options)
        return maps.detach() / entries_of_patch(self.name, inputs)

    def _leaf(self, inputs: Tensor) -> Tensor:
        return inputs.clone().requires_grad_(self.name == "gxi")


def relevance_at(target: int | Sequence[int] | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Zennit's `attr_output` for a target: relevance starts as the output itself (Note A).

    Parameters
    ----------
    target : int, sequence of int, or function of the output
        One class, one for each image, or output ↦ scores (N,): then it is ∂score/∂output times the output.
    """

    def start(output: Tensor) -> Tensor:
        value = output.detach()
        if callable(target):
            with torch.enable_grad():
                leaf = value.clone().requires_grad_()
                (gradient,) = torch.autograd.grad(target(leaf).sum(), leaf)
            return value * gradient
        chosen = torch.zeros_like(value)
        chosen[torch.arange(len(value)), torch.as_tensor(target, device=value.device)] = 1
        return value * chosen

    return start


def with_gamma(network: Network, gamma: float) -> Network:
    """The network with LRP-γ of another γ in the convolutions below the concept layer.

    Which γ suits a network is found by patch flipping on training images, as in Note D for NFNets. VGGs and
    NFNets keep the paper's rules.
    """
    rules = network.composite
    if not isinstance(rules, SuitableRules) or not rules.has_gamma:
        raise ValueError("γ can be chosen for networks with ConvNetGamma; this one has rules of its own")
    return replace(network, composite=replace(rules, gamma=gamma))


def with_upper_gamma(network: Network, layer: str, gamma: float) -> Network:
    """The network with LRP-γ of another γ in the convolutions above a layer, LRP-ε if it is 0.

    The paper's rules for VGG16 have γ = 0 there (Note D); a large γ hides evidence against the class.
    """
    names = [name for name, _ in network.model.named_modules()]
    below = [i for i, name in enumerate(names) if name == layer or name.startswith(f"{layer}.")]
    if not below:
        raise ValueError(f"there is no layer {layer!r} in this network")
    above = [n for n in names[below[-1] + 1 :] if isinstance(network.model.get_submodule(n), nn.Conv2d)]
    if not above:
        raise ValueError(f"there is no convolution above {layer!r}, of which γ could be another")
    rules = network.composite

    def composite(layer: str | None) -> Composite:
        rule = Gamma(gamma) if gamma else Epsilon(1e-6)
        below = rules(None)
        if isinstance(rules, SuitableRules) and is_torchvision_resnet(network.model):
            # Without a layer these networks get Zennit's rules for ResNets, which have no γ.
            below = EpsilonGammaBox(*rules.bounds(), gamma=rules.gamma, canonizers=[TorchvisionCanonizer()])
        # The first composite that knows a module decides.
        return MixedComposite([NameMapComposite([(above, rule)]), below])

    return replace(network, composite=composite)
