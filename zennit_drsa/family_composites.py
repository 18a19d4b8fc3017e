"""LRP-γ for families of models: `VGGGamma`, `ConvNetGamma`, `NFNetGamma` and `TransformerGamma`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from drsa_core.layer import find_layer
from drsa_core.lrp import SMALLEST
from drsa_core.nfnet import NFNetCanonizer, find_nfnets, gates, orphans
from torch import Tensor, nn
from zennit.canonizers import Canonizer
from zennit.composites import register_composite
from zennit.core import Composite, Hook
from zennit.layer import Sum
from zennit.types import AvgPool, Convolution, ConvolutionStandard, MaxPool

from ._zennit import rule_for_others
from .canonizers import CANONIZERS, CHAINS, ChainCanonizer, networks_but
from .rules import (
    STABILIZER,
    THRESHOLD,
    Bound,
    BoundedInput,
    GeneralizedGamma,
    PassLarge,
    PixelBox,
    PositiveGamma,
    ZeroRule,
)
from .transformers import ATTENTION, TransformerCanonizer

Channels: TypeAlias = Sequence[float] | Tensor
Gamma: TypeAlias = float | Mapping[str, float]

# ImageNet's statistics, with which torchvision's weights expect their input to be normalised.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# Chosen by patch flipping on a real ViT-S/14 (`tests/benchmarks/study_vit.py tune`): of γ = 0, 0.01, 0.05,
# 0.1 and 0.25 in both readings, this has the smallest area under the curve on 48 training photographs of four
# classes: 1.17, against 1.49 with γ = 0. γ = 0.1 and "constant" are as good within the noise.
GAMMA = 0.05


class _GammaComposite(Composite):  # type: ignore[misc]
    """γ by the name of a module, and another one above the concept layer; subclasses say which rule is where.

    With a large γ above, the context c is close to a multiple of a: evidence against the class is hidden, and
    DRSA finds what PCA-like methods find.
    """

    def __init__(
        self,
        gamma: Gamma,
        layer: str | nn.Module | None,
        gamma_above: float | None,
        canonizers: Sequence[Canonizer],
    ) -> None:
        self._gammas = dict(gamma) if isinstance(gamma, Mapping) else {"": gamma}
        for name, value in self._gammas.items():
            checked_number(f"gamma[{name!r}]" if name else "gamma", value)
        if "" not in self._gammas:
            raise ValueError(f'gamma must have an entry for the whole model, "", got {self._gammas}')
        if layer is None and gamma_above is not None:
            raise ValueError(f"gamma_above={gamma_above} needs the concept layer: pass layer=")
        self._layer = layer
        self._gamma_above = 0.0 if gamma_above is None else checked_number("gamma_above", gamma_above)
        super().__init__(self._mapping, list(canonizers))

    def register(self, module: nn.Module) -> None:
        """Canonize the model and attach the rules; on an error, leave the model as it was."""
        try:
            super().register(module)
        except BaseException:
            self.remove()
            raise

    def _mapping(self, ctx: dict[Any, Any], name: str, module: nn.Module) -> Hook | None:
        if "above" not in ctx:  # the root comes first
            names = {name for name, _ in module.named_modules()}
            if unknown := self._gammas.keys() - names:
                raise ValueError(
                    f"gamma names {', '.join(sorted(unknown))}, which this {type(module).__name__} does not "
                    "have; names are those of model.named_modules()"
                )
            ctx.update(above=self._modules_above(module), n_linear=0, n_pools=0, root=module)
        return self._rule(ctx, name, module)

    def _rule(self, ctx: dict[Any, Any], name: str, module: nn.Module) -> Hook | None:
        raise NotImplementedError

    def _gamma(self, ctx: dict[Any, Any], name: str, module: nn.Module) -> float:
        if module in ctx["above"]:
            return self._gamma_above
        while name not in self._gammas:
            name = name.rpartition(".")[0]
        return self._gammas[name]

    def _modules_above(self, root: nn.Module) -> frozenset[nn.Module]:
        """The modules behind the layer, in the order in which the model was built (`model.modules()`)."""
        if self._layer is None:
            return frozenset()
        inside = set(find_layer(root, self._layer)[1].modules())
        modules = list(root.modules())
        last = max(index for index, module in enumerate(modules) if module in inside)
        return frozenset(modules[last + 1 :])


def input_bounds(
    low: Bound | None, high: Bound | None, mean: Channels | None, std: Channels | None
) -> tuple[Bound, Bound] | None:
    """Bounds of the input for z^B: as given, or of pixels in [0, 1] after normalisation; None if none."""
    if (low is None) != (high is None) or (mean is None) != (std is None):
        raise ValueError("the bounds of the input are low= with high=, or mean= with std=; one is missing")
    if low is not None and mean is not None:
        raise ValueError("give the bounds of the input either as low=, high= or as mean=, std=, not as both")
    if mean is not None and std is not None:
        means, stds = (torch.as_tensor(values, dtype=torch.float64).flatten() for values in (mean, std))
        if len(means) != len(stds) or bool((stds <= 0).any()):
            raise ValueError(
                "mean and std must have one entry per input channel and std be positive, got mean "
                f"{means.tolist()} and std {stds.tolist()}"
            )
        return (-means / stds).view(1, -1, 1, 1), ((1 - means) / stds).view(1, -1, 1, 1)
    if low is None or high is None:
        return None
    ends = torch.as_tensor(low), torch.as_tensor(high)
    if not all(bool(end.isfinite().all()) for end in ends):
        raise ValueError("low and high must be finite")
    if not bool((ends[0] <= ends[1]).all()):
        raise ValueError("low must be at most high, everywhere; are the two exchanged?")
    return low, high


def checked_number(name: str, value: float) -> float:
    """A finite number of at least 0, γ for instance."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and at least 0, got {value}")
    return value


class _VGGCanonizer(ChainCanonizer):
    """Merge batch norms, in plain chains of layers only."""

    def register(self, root_module: nn.Module) -> None:
        """Apply the changes; `remove` takes them back."""
        for name, network in networks_but(CHAINS, root_module):
            raise ValueError(
                f"VGGGamma is for VGG and other plain chains of layers, but {name or 'the model'} is a "
                f"{network}: its relevance would be wrong. Use another composite, such as ConvNetGamma, or "
                "EpsilonPlus with a canonizer for this network; zennit_drsa.doctor(model, EpsilonPlus(), "
                "input) says which"
            )
        super().register(root_module)


@register_composite("vgg_gamma")
class VGGGamma(_GammaComposite):
    """LRP-γ as the paper sets it for VGG: γ = 0.5, 0.5, 0.25, 0.1, 0 by block and 0 in the head (Note D).

    z^B at the input, winner-take-all pooling, batch norm merged into the convolution before it. For
    torchvision's VGG family; blocks are told apart by their max-pooling.

    Parameters
    ----------
    gammas : sequence of float
        γ of each convolutional block; further blocks have the last one. Dense layers have γ = 0.
    stabilizer : float
        Added to denominators with their sign. Zennit's usual 1e-6 is visible in maps of small relevance.
    canonizers : sequence of Canonizer, optional
        Applied after that which merges batch norm.
    mean, std, low, high, layer, gamma_above
        As in `ConvNetGamma`. By default the bounds are those of ImageNet's normalisation.
    """

    def __init__(
        self,
        gammas: Sequence[float] = (0.5, 0.5, 0.25, 0.1, 0.0),
        mean: Channels | None = None,
        std: Channels | None = None,
        stabilizer: float = STABILIZER,
        canonizers: Sequence[Canonizer] | None = None,
        *,
        low: Bound | None = None,
        high: Bound | None = None,
        layer: str | nn.Module | None = None,
        gamma_above: float | None = None,
    ) -> None:
        if not len(gammas) or any(not gamma >= 0 for gamma in gammas):
            raise ValueError(f"gammas must be one number of at least 0 per block, got {tuple(gammas)}")
        if low is None and high is None:  # one of mean and std goes with the other one of ImageNet
            mean, std = (IMAGENET_MEAN if mean is None else mean), (IMAGENET_STD if std is None else std)
        bounds = input_bounds(low, high, mean, std)
        if bounds is None:
            raise ValueError("VGGGamma needs the bounds of its input, as mean= and std= or low= and high=")
        self._first, self._stabilizer, self._block_gammas = PixelBox(*bounds, stabilizer), stabilizer, gammas
        super().__init__(0.0, layer, gamma_above, [_VGGCanonizer(), *(canonizers or ())])

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        """Whether nothing in the model is known to be of another family."""
        return ChainCanonizer.suits(model)

    def _rule(self, ctx: dict[Any, Any], name: str, module: nn.Module) -> Hook | None:
        if isinstance(module, MaxPool):
            ctx["n_pools"] += 1
            return None  # the gradient of max-pooling is winner-take-all
        if isinstance(module, Convolution):
            ctx["n_linear"] += 1
            if ctx["n_linear"] == 1:
                return self._first
            gamma = self._block_gammas[min(ctx["n_pools"], len(self._block_gammas) - 1)]
            gamma = self._gamma_above if module in ctx["above"] else gamma
            return PositiveGamma(gamma, self._stabilizer) if gamma else ZeroRule(self._stabilizer)
        if isinstance(module, nn.Linear):
            return ZeroRule(self._stabilizer)
        return rule_for_others(module, self._stabilizer)


class FamilyCanonizer(Canonizer):  # type: ignore[misc]
    """The canonizer of the family that a model belongs to, chosen when it is applied.

    Where no family is known, batch norms that follow a linear layer are merged into it, and a model without
    any is left alone.
    """

    def apply(self, root_module: nn.Module) -> list[Any]:
        """Apply the first canonizer that suits the model, and return the instances that take it back.

        Raises
        ------
        ValueError
            If there is a network of torchvision or timm in the model that needs one, and none is known.
        """
        suitable = next((c for c in (*CANONIZERS, TransformerCanonizer) if c.suits(root_module)), None)
        if suitable is None:
            # In GoogLeNet, too, branches are only put side by side.
            for name, network in networks_but((*CHAINS, "googlenet"), root_module):
                raise ValueError(
                    f"{name or 'the model'} is a {network}, for which no canonizer is known: its relevance "
                    "would be wrong. zennit_drsa.doctor(model, EpsilonPlus(), input) says what is missing. "
                    "Give the composite canonizers of your own, or use a method that needs no rules, such "
                    "as Integrated Gradients"
                )
        applied: list[Any] = (suitable or ChainCanonizer)().apply(root_module)
        return applied

    def register(self) -> None:
        """Nothing: `apply` registers another canonizer."""

    def remove(self) -> None:
        """Nothing: what `apply` returns is removed by itself."""


@register_composite("convnet_gamma")
class ConvNetGamma(_GammaComposite):
    """LRP-γ for any convolutional network that has a canonizer, with γ by depth and 0 above the concepts.

    z^B at the first layer, the generalised γ rule in convolutions, LRP-0 in dense layers, contributions in
    sums and average pooling. These are the rules of Zennit's `EpsilonGammaBox`, with one more forward pass
    for a layer with γ instead of five. The canonizer is the one of the model's family.

    Parameters
    ----------
    gamma : float or mapping of str to float
        γ ≥ 0 of convolutions: one for all, or by the name of a module, for it and all inside it; the longest
        name counts, and "" is the whole model. `{"": 0.25, "layer3": 0.1, "layer4": 0}` is γ by depth.
    mean, std : one number per input channel, optional
        Normalisation of the input, which gives the bounds (0 − mean)/std and (1 − mean)/std of z^B.
    low, high : tensor or float, optional
        The bounds of z^B themselves, broadcastable to the input. Without bounds the first layer is as others.
    layer : str or module, optional
        The concept layer. Convolutions above it, those that the model defines behind it, have `gamma_above`.
    gamma_above : float, optional
        γ above `layer`. Default: 0, as in the paper's rules for VGG16 (Note D).
    stabilizer : float
        Added to denominators with their sign.
    canonizers : sequence of Canonizer, optional
        Instead of the one of the model's family, `FamilyCanonizer`.

    Examples
    --------
    >>> composite = ConvNetGamma(0.25, low=-2.5, high=2.5, layer="features.22")
    >>> attributor = DisentangledAttributor(Gradient(model, composite), "features.22", subspaces)
    >>> tuple(attributor.explain(images, target=430).maps.shape)
    (2, 4, 3, 32, 32)
    """

    def __init__(
        self,
        gamma: Gamma = 0.25,
        *,
        mean: Channels | None = None,
        std: Channels | None = None,
        low: Bound | None = None,
        high: Bound | None = None,
        layer: str | nn.Module | None = None,
        gamma_above: float | None = None,
        stabilizer: float = 1e-6,
        canonizers: Sequence[Canonizer] | None = None,
    ) -> None:
        bounds = input_bounds(low, high, mean, std)
        self._first = None if bounds is None else PixelBox(*bounds, stabilizer)
        self._stabilizer = stabilizer
        super().__init__(gamma, layer, gamma_above, [FamilyCanonizer()] if canonizers is None else canonizers)

    def _rule(self, ctx: dict[Any, Any], name: str, module: nn.Module) -> Hook | None:
        if not isinstance(module, Convolution | nn.Linear):
            return rule_for_others(module, self._stabilizer)
        ctx["n_linear"] += 1
        if ctx["n_linear"] == 1 and self._first is not None:
            return self._first
        gamma = 0.0 if isinstance(module, nn.Linear) else self._gamma(ctx, name, module)
        return GeneralizedGamma(gamma, threshold=0.0, stabilizer=self._stabilizer)


@register_composite("nfnet_gamma")
class NFNetGamma(_GammaComposite):
    """LRP for timm's NFNets as in the paper: Note K, all seven cases.

    z^B at the first convolution, the generalised γ rule with one γ for all other linear layers (convolutions,
    the classifier, average pooling, shortcuts), and R(z) = R(a) for activations and attention.

    Parameters
    ----------
    gamma : float
        γ ≥ 0; the paper uses 0.1.
    mean, std, low, high, layer, gamma_above
        As in `ConvNetGamma`; bounds of the input are needed.
    threshold : float
        Denominators of at most this size drop out.
    bias : {"neuron", "authors"}
        "neuron", as the paper has it (Note A): a bias b is a neuron of weight b, under γ too, and the z^B
        rule knows none. "authors" reproduces the authors' program: b enters the denominators without γ, and
        z^B subtracts it.
    canonizers : sequence of canonizers, optional
        Applied after `NFNetCanonizer`, which is always there.

    Examples
    --------
    >>> composite = NFNetGamma(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    >>> with Gradient(nfnet, composite) as attributor:
    ...     output, relevance = attributor(images, one_hot)
    >>> tuple(relevance.shape)
    (2, 3, 32, 32)
    """

    def __init__(
        self,
        low: Bound | None = None,
        high: Bound | None = None,
        gamma: float = 0.1,
        *,
        mean: Channels | None = None,
        std: Channels | None = None,
        layer: str | nn.Module | None = None,
        gamma_above: float | None = None,
        threshold: float = THRESHOLD,
        bias: str = "neuron",
        canonizers: Sequence[Any] | None = None,
    ) -> None:
        checked_number("threshold", threshold)
        if bias not in ("neuron", "authors"):
            raise ValueError(f"bias must be 'neuron' (the paper) or 'authors' (their program), got {bias!r}")
        bounds = input_bounds(low, high, mean, std)
        if bounds is None:
            raise ValueError("NFNetGamma needs the bounds of its input, as low= and high= or mean= and std=")
        self._first = BoundedInput(*bounds, threshold, bias)
        self._threshold, self._bias = threshold, bias
        super().__init__(gamma, layer, gamma_above, [NFNetCanonizer(), *(canonizers or ())])

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        """Whether there is an NFNet in the model."""
        return NFNetCanonizer.suits(model)

    def _rule(self, ctx: dict[Any, Any], name: str, module: nn.Module) -> Hook | None:
        if module is ctx["root"]:
            ctx[module] = None
            for net in find_nfnets(module):
                # What computes a gate receives no relevance.
                ctx |= {part: None for _, gate in gates(net) for part in gate.modules()}
                ctx |= dict.fromkeys(orphans(net), PassLarge(self._threshold))
                ctx[next(part for part in net.stem.modules() if isinstance(part, nn.Conv2d))] = self._first
        if module in ctx:
            rule: Hook | None = ctx[module]
            return rule
        is_linear = isinstance(module, (ConvolutionStandard, nn.Linear, AvgPool, Sum))
        if not is_linear and type(module).__name__ != "FastAdaptiveAvgPool":
            return None
        return GeneralizedGamma(self._gamma(ctx, name, module), self._threshold, self._bias)


@register_composite("transformer_gamma")
class TransformerGamma(_GammaComposite):
    """LRP for transformers: the generalised γ rule of Note K in linear layers.

    All else is in `TransformerCanonizer`. With γ = 0 there are no forward passes but the model's own.

    Parameters
    ----------
    gamma : float or mapping of str to float
        γ ≥ 0 of linear layers: one for all, or by the name of a module, for it and all inside it; the longest
        name counts, and "" is the whole model. `{"": 0.1, "blocks.8": 0}` is γ by depth. With 0, a map costs
        little more than a gradient.
    attention : {"constant", "attnlrp"}
        How relevance crosses attention, as in `TransformerCanonizer`.
    mean, std, low, high, layer, gamma_above
        As in `ConvNetGamma`. Without bounds the patch embedding is a linear layer like the others.
    canonizers : sequence of Canonizer, optional
        Applied after `TransformerCanonizer`, which is always there.

    Examples
    --------
    >>> composite = TransformerGamma(attention="attnlrp")
    >>> attributor = DisentangledAttributor(Gradient(vit, composite), "blocks.3", channel_dim=-1)
    >>> attributor = attributor.fit(loader, target=430, solver=DRSA(4, random_state=0))
    >>> tuple(attributor.explain(images, target=430).maps.shape)
    (2, 4, 3, 32, 32)
    """

    def __init__(
        self,
        gamma: Gamma = GAMMA,
        attention: str = ATTENTION,
        *,
        mean: Channels | None = None,
        std: Channels | None = None,
        low: Bound | None = None,
        high: Bound | None = None,
        layer: str | nn.Module | None = None,
        gamma_above: float | None = None,
        canonizers: Sequence[Canonizer] = (),
    ) -> None:
        bounds = input_bounds(low, high, mean, std)
        self._first = None if bounds is None else BoundedInput(*bounds, threshold=SMALLEST)
        super().__init__(gamma, layer, gamma_above, [TransformerCanonizer(attention), *canonizers])

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        """Whether there is a transformer in the model that has a canonizer."""
        return TransformerCanonizer.suits(model)

    def _rule(self, ctx: dict[Any, Any], name: str, module: nn.Module) -> Hook | None:
        if not isinstance(module, Convolution | nn.Linear):
            return None
        ctx["n_linear"] += 1
        if ctx["n_linear"] == 1 and self._first is not None:
            if not isinstance(module, Convolution):
                raise ValueError(
                    f"the first layer with weights is {name}, a {type(module).__name__}, not a convolution "
                    "over pixels, for which the bounds of z^B are; leave out low=, high=, mean= and std="
                )
            return self._first
        return GeneralizedGamma(self._gamma(ctx, name, module), threshold=SMALLEST)
