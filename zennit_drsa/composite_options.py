"""What γ composites share: the bounds of their input, γ above the concept layer, taking back on an error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from drsa_core.layer import find_layer
from torch import Tensor, nn
from zennit.core import Composite

Bound: TypeAlias = Tensor | float
Channels: TypeAlias = Sequence[float] | Tensor

# ImageNet's statistics, with which torchvision's weights expect their input to be normalised.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class RevertedOnError(Composite):  # type: ignore[misc]
    """A composite whose canonizers may refuse a model: it is then left as it was."""

    def register(self, module: nn.Module) -> None:
        """Canonize the model and attach the rules; on an error, leave the model as it was."""
        try:
            super().register(module)
        except BaseException:
            self.remove()
            raise


def input_bounds(
    low: Bound | None, high: Bound | None, mean: Channels | None, std: Channels | None
) -> tuple[Bound, Bound] | None:
    """Bounds of the input for z^B: as given, or those of pixels in [0, 1] after normalisation; None if none.

    Parameters
    ----------
    low, high : tensor or float, optional
        Smallest and largest value of each input, broadcastable to the input.
    mean, std : one number per channel, optional
        Normalisation, which gives (0 − mean)/std and (1 − mean)/std of shape (1, C, 1, 1).
    """
    if (low is None) != (high is None) or (mean is None) != (std is None):
        raise ValueError("the bounds of the input are low= with high=, or mean= with std=; one is missing")
    if low is not None and mean is not None:
        raise ValueError("give the bounds of the input either as low=, high= or as mean=, std=, not as both")
    if low is not None and high is not None:
        _check_bounds(low, high)
        return low, high
    if mean is None or std is None:
        return None
    means, stds = ([float(value) for value in values] for values in (mean, std))
    if len(means) != len(stds) or any(not s > 0 for s in stds):
        raise ValueError(
            f"mean and std must have one entry per input channel and std be positive, got mean "
            f"{tuple(means)} and std {tuple(stds)}"
        )
    lowest, highest = (
        torch.tensor([(pixel - m) / s for m, s in zip(means, stds, strict=True)], dtype=torch.float64)
        for pixel in (0.0, 1.0)
    )
    return lowest.view(1, -1, 1, 1), highest.view(1, -1, 1, 1)


def checked_number(name: str, value: float) -> float:
    """A finite number of at least 0, γ for instance."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and at least 0, got {value}")
    return value


@dataclass(frozen=True)
class AboveLayer:
    """γ of the layers above the concept layer: 0 in the paper's rules for VGG16 (Note D).

    With a large γ above, the context c is close to a multiple of a: evidence against the class is hidden,
    and DRSA finds what PCA-like methods find.
    """

    layer: str | nn.Module
    gamma: float

    @classmethod
    def of(cls, layer: str | nn.Module | None, gamma_above: float | None) -> AboveLayer | None:
        """From a composite's arguments; γ is 0 if only the layer is named."""
        if layer is None:
            if gamma_above is not None:
                raise ValueError(
                    f"gamma_above={gamma_above} needs the concept layer, above which it holds: pass layer="
                )
            return None
        return cls(layer, 0.0 if gamma_above is None else checked_number("gamma_above", gamma_above))

    def modules(self, root: nn.Module) -> frozenset[nn.Module]:
        """The modules behind the layer, in the order in which the model was built (`model.modules()`)."""
        _, layer = find_layer(root, self.layer)
        inside = set(layer.modules())
        modules = list(root.modules())
        last = max(index for index, module in enumerate(modules) if module in inside)
        return frozenset(modules[last + 1 :])


def modules_above(above: AboveLayer | None, root: nn.Module) -> frozenset[nn.Module]:
    """The modules above the concept layer; none if no layer is named."""
    return frozenset() if above is None else above.modules(root)


class GammaByName:
    """γ by the name of a module, for it and all inside it; the longest name counts.

    Parameters
    ----------
    gamma : float or mapping of str to float
        One for the whole model, or a mapping with an entry for it, "".
    above : AboveLayer, optional
        What holds above the concept layer instead.
    """

    def __init__(self, gamma: float | Mapping[str, float], above: AboveLayer | None = None) -> None:
        self._gammas = dict(gamma) if isinstance(gamma, Mapping) else {"": gamma}
        for name, value in self._gammas.items():
            checked_number(f"gamma[{name!r}]" if isinstance(gamma, Mapping) else "gamma", value)
        if "" not in self._gammas:
            raise ValueError(
                'gamma must have an entry for the whole model, "", for layers that no other name covers; got '
                f"{self._gammas}"
            )
        self._above = above

    def check_names(self, root: nn.Module) -> None:
        """Raise if a name is not that of a module of the model."""
        unknown = self._gammas.keys() - {name for name, _ in root.named_modules()}
        if unknown:
            raise ValueError(
                f"gamma names {', '.join(sorted(unknown))}, which this {type(root).__name__} does not have; "
                "names are those of model.named_modules()"
            )

    def of(self, name: str, is_above: bool) -> float:
        """γ of the module with this name."""
        if is_above and self._above is not None:
            return self._above.gamma
        while name not in self._gammas:
            name = name.rpartition(".")[0]
        return self._gammas[name]


def _check_bounds(low: Bound, high: Bound) -> None:
    for name, bound in (("low", low), ("high", high)):
        if isinstance(bound, bool) or not isinstance(bound, int | float | Tensor):
            raise TypeError(f"{name} must be a tensor or a number, got {type(bound).__name__}")
        if not bool(torch.as_tensor(bound).isfinite().all()):
            raise ValueError(f"{name} must be finite")
    if not bool((torch.as_tensor(low) <= torch.as_tensor(high)).all()):
        raise ValueError("low must be at most high, everywhere; are the two exchanged?")
