"""`NFNetGamma`: LRP for normaliser-free networks of timm (Note K)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drsa_core.lrp.nfnet_canonizer import NFNetCanonizer, find_nfnets, gates, orphans
from torch import nn
from zennit.composites import register_composite
from zennit.core import Hook
from zennit.layer import Sum
from zennit.types import AvgPool, ConvolutionStandard

from ..composite_options import (
    AboveLayer,
    Bound,
    Channels,
    RevertedOnError,
    checked_number,
    input_bounds,
    modules_above,
)
from ..families import composite
from ..rules import THRESHOLD, BoundedInput, GeneralizedGamma, PassLarge


@register_composite("nfnet_gamma")
class NFNetGamma(RevertedOnError):
    """LRP for timm's NFNets as in the paper: Note K, all seven cases.

    z^B at the first convolution, the generalised γ rule with one γ for all other linear layers (convolutions,
    the classifier, average pooling, shortcuts), and R(z) = R(a) for activations and attention.

    Parameters
    ----------
    low, high : tensor or float
        Smallest and largest value of each input, broadcastable to the input, for instance
        (0 − mean) / std and (1 − mean) / std of shape (1, 3, 1, 1).
    gamma : float
        γ ≥ 0; the paper uses 0.1.
    mean, std : one number per input channel
        Normalisation of the input, instead of `low` and `high`; one of the two pairs is needed.
    layer : str or module, optional
        The concept layer. Linear layers above it have `gamma_above`.
    gamma_above : float, optional
        γ above `layer`. Default: 0.
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
        checked_number("gamma", gamma)
        checked_number("threshold", threshold)
        if bias not in ("neuron", "authors"):
            raise ValueError(f"bias must be 'neuron' (the paper) or 'authors' (their program), got {bias!r}")
        bounds = input_bounds(low, high, mean, std)
        if bounds is None:
            raise ValueError("NFNetGamma needs the bounds of its input, as low= and high= or mean= and std=")
        self.above_layer = AboveLayer.of(layer, gamma_above)
        gamma_above = gamma if self.above_layer is None else self.above_layer.gamma
        self.first_rule = BoundedInput(*bounds, threshold, bias)
        self.linear_rule = GeneralizedGamma(gamma, threshold, bias)
        self.rule_above = GeneralizedGamma(gamma_above, threshold, bias)
        self.pass_rule = PassLarge(threshold)
        super().__init__(module_map=self.mapping, canonizers=[NFNetCanonizer(), *(canonizers or ())])

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        """Whether there is an NFNet in the model; `doctor` asks."""
        return NFNetCanonizer.suits(model)

    def mapping(self, ctx: dict[Any, Any], name: str, module: nn.Module) -> Hook | None:
        """The rule for a module, known from its place in the NFNet."""
        if not ctx:  # the root comes first
            ctx["above"] = modules_above(self.above_layer, module)
            ctx.update(self._plan(module))
        if module in ctx:
            return ctx[module]
        is_linear = isinstance(module, (ConvolutionStandard, nn.Linear, AvgPool, Sum))
        if not is_linear and type(module).__name__ != "FastAdaptiveAvgPool":
            return None
        return self.rule_above if module in ctx["above"] else self.linear_rule

    def _plan(self, root: nn.Module) -> dict[nn.Module, Hook | None]:
        plan: dict[nn.Module, Hook | None] = {root: None}
        for net in find_nfnets(root):
            # What computes a gate receives no relevance.
            plan |= {part: None for _, gate in gates(net) for part in gate.modules()}
            plan |= dict.fromkeys(orphans(net), self.pass_rule)
            plan[next(part for part in net.stem.modules() if isinstance(part, nn.Conv2d))] = self.first_rule  # type: ignore[union-attr]
        return plan


REMEDIES = (
    composite(
        "zennit_drsa.NFNetGamma(low, high), which has the canonizer and rules for NFNets",
        lambda input: NFNetGamma(float(input.min()), float(input.max())),
        NFNetGamma.suits,
        NFNetCanonizer,
    ),
)
