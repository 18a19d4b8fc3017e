"""`ConvNetGamma`: LRP-γ by depth for the convolutional networks of timm and torchvision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from zennit.canonizers import Canonizer
from zennit.composites import register_composite
from zennit.core import Composite, Hook
from zennit.types import Convolution

from .._zennit import rule_for_others
from ..composite_options import AboveLayer, Bound, Channels, GammaByName, input_bounds, modules_above
from ..families import FamilyCanonizer
from ..rules import GeneralizedGamma, PixelBox


@register_composite("convnet_gamma")
class ConvNetGamma(Composite):  # type: ignore[misc]
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
        γ above `layer`. Default: 0, as in the paper's rules for VGG16 (Note D). With a large γ there, the
        contexts are close to a multiple of the activations, and DRSA finds what it would find without them.
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
        gamma: float | Mapping[str, float] = 0.25,
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
        self._stabilizer, self._above_layer = stabilizer, AboveLayer.of(layer, gamma_above)
        self._gammas = GammaByName(gamma, self._above_layer)
        super().__init__(self._mapping, [FamilyCanonizer()] if canonizers is None else list(canonizers))

    def _mapping(self, ctx: dict[str, Any], name: str, module: nn.Module) -> Hook | None:
        if "above" not in ctx:  # the root comes first
            ctx.update(above=modules_above(self._above_layer, module), is_first=True)
            self._gammas.check_names(module)
        if not isinstance(module, Convolution | nn.Linear):
            return rule_for_others(module, self._stabilizer)
        is_first, ctx["is_first"] = ctx["is_first"], False
        if is_first and self._first is not None:
            return self._first
        gamma = 0.0 if isinstance(module, nn.Linear) else self._gammas.of(name, module in ctx["above"])
        return GeneralizedGamma(gamma, threshold=0.0, stabilizer=self._stabilizer)
