"""`VGGGamma`: the paper's LRP-γ for the VGG family (Notes A and D)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from zennit.canonizers import Canonizer
from zennit.composites import register_composite
from zennit.core import Composite, Hook
from zennit.torchvision import VGGCanonizer
from zennit.types import Convolution, MaxPool

from .._zennit import applied_reversibly, rule_for_others
from ..composite_options import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    AboveLayer,
    Bound,
    Channels,
    input_bounds,
    modules_above,
)
from ..families import CHAINS, networks_but
from ..rules import STABILIZER, PixelBox, PositiveGamma, ZeroRule


class ChainCanonizer(Canonizer):  # type: ignore[misc]
    """Zennit's canonizer for VGG, which merges batch norms, for plain chains of layers alone."""

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        """Whether nothing in the model is known to be of another family."""
        return next(networks_but(CHAINS, model), None) is None

    def apply(self, root_module: nn.Module) -> list[Any]:
        """Merge the batch norms.

        Raises
        ------
        ValueError
            If there is a network of another family in the model: its sums have no rule in `VGGGamma`, and its
            blocks are not told apart by max-pooling.
        """
        other = next(networks_but(CHAINS, root_module), None)
        if other is not None:
            raise ValueError(
                f"VGGGamma is for VGG and other plain chains of layers, but {other[0] or 'the model'} is a "
                f"{other[1]}: its relevance would be wrong. Use another composite, such as ConvNetGamma or "
                "EpsilonPlus, with a canonizer for this network, as in "
                "EpsilonPlus(canonizers=[zennit.torchvision.ResNetCanonizer()]) for torchvision's ResNet; "
                "zennit_drsa.doctor(model, EpsilonPlus(), input) says which"
            )
        return applied_reversibly(VGGCanonizer(), root_module)

    def register(self) -> None:
        """Nothing: `apply` registers Zennit's canonizer."""

    def remove(self) -> None:
        """Nothing: what `apply` returns is removed by itself."""


@register_composite("vgg_gamma")
class VGGGamma(Composite):  # type: ignore[misc]
    """LRP-γ as the paper sets it for VGG: γ = 0.5, 0.5, 0.25, 0.1, 0 by block and 0 in the head (Note D).

    z^B at the input, winner-take-all pooling, batch norm merged into the convolution before it. For
    torchvision's VGG family; blocks are told apart by their max-pooling.

    Parameters
    ----------
    gammas : sequence of float
        γ of each convolutional block; further blocks have the last one. Dense layers have γ = 0.
    mean, std : one number per input channel, optional
        Normalisation of the input, which gives the bounds (0 − mean)/std and (1 − mean)/std of z^B. Default:
        ImageNet's.
    stabilizer : float
        Added to denominators with their sign. Zennit's usual 1e-6 is visible in maps of small relevance.
    canonizers : sequence of Canonizer, optional
        Applied after that which merges batch norm.
    low, high : tensor or float, optional
        The bounds of z^B themselves, broadcastable to the input, instead of `mean` and `std`.
    layer : str or module, optional
        The concept layer. Convolutions above it have `gamma_above`, whatever their block.
    gamma_above : float, optional
        γ above `layer`. Default: 0, which is what `gammas` has above Conv4_3, the paper's concept layer.
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
        # One of mean and std alone goes with the other one of ImageNet.
        if low is None and high is None:
            mean, std = (IMAGENET_MEAN if mean is None else mean), (IMAGENET_STD if std is None else std)
        bounds = input_bounds(low, high, mean, std)
        if bounds is None:
            raise ValueError("VGGGamma needs the bounds of its input, as mean= and std= or low= and high=")
        self._first = PixelBox(*bounds, stabilizer)
        self._blocks = [_rule(gamma, stabilizer) for gamma in gammas]
        self._head = ZeroRule(stabilizer)
        self._above_layer = AboveLayer.of(layer, gamma_above)
        gamma = 0.0 if self._above_layer is None else self._above_layer.gamma
        self._above = _rule(gamma, stabilizer)
        self._stabilizer = stabilizer
        super().__init__(self._mapping, [ChainCanonizer(), *(canonizers or ())])

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        """Whether nothing in the model is known to be of another family."""
        return ChainCanonizer.suits(model)

    def _mapping(self, ctx: dict[str, Any], name: str, module: nn.Module) -> Hook | None:
        if "above" not in ctx:  # the root comes first
            ctx.update(above=modules_above(self._above_layer, module), pools=0, convolutions=0)
        if isinstance(module, MaxPool):
            ctx["pools"] += 1
            return None  # the gradient of max-pooling is winner-take-all
        if isinstance(module, Convolution):
            ctx["convolutions"] += 1
            if ctx["convolutions"] == 1:
                return self._first
            if module in ctx["above"]:
                return self._above
            return self._blocks[min(ctx["pools"], len(self._blocks) - 1)]
        if isinstance(module, nn.Linear):
            return self._head
        return rule_for_others(module, self._stabilizer)


def _rule(gamma: float, stabilizer: float) -> PositiveGamma | ZeroRule:
    return PositiveGamma(gamma, stabilizer) if gamma else ZeroRule(stabilizer)
