"""LRP for normaliser-free networks: the generalised γ rule and the composite `NFNetGamma` (Note K)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from drsa_core.lrp import DropSmall, OverDenominator, TimesInput
from drsa_core.lrp.nfnet_canonizer import NFNetCanonizer, find_nfnets, gates, orphans
from torch import Tensor, nn
from zennit.composites import register_composite
from zennit.core import Composite, Hook, RemovableHandle, RemovableHandleList
from zennit.layer import Sum
from zennit.types import AvgPool, ConvolutionStandard

THRESHOLD = 1e-3
"""Denominators of at most this size drop out (Note K, numerical stability)."""


class ForwardRule(Hook):  # type: ignore[misc]
    """Zennit hook for a rule that is written as a graph of ordinary operations, built in the forward pass.

    Unlike Zennit's `BasicHook`, which computes its denominators anew in each backward pass, all backward
    passes share one forward graph: K maps cost K backward passes, and no forward pass more.
    """

    def register(self, module: nn.Module) -> RemovableHandleList:
        """Attach the rule to a module."""
        return RemovableHandleList(
            [
                RemovableHandle(self),
                module.register_forward_pre_hook(self.pre_forward),
                module.register_forward_hook(self.forward),
            ]
        )

    def pre_forward(self, module: nn.Module, input: tuple[Tensor, ...]) -> Tensor | None:
        """Nothing to prepare, unless a rule says so."""
        return None


class GeneralizedGamma(ForwardRule):
    """Generalised LRP-γ for a linear module (Note K, cases 1, 2, 5 and 7).

    With contributions u_jk = a_j w_jk, the bias among them as a neuron of activation 1 (Note A), the rule is

        R_j = Σ_k (u_jk + γ u_jk^s) / d_k · R_k,   d_k = Σ_j u_jk + γ u_jk^s,   s = sign of z_k.

    As u^± = (u ± |u|)/2, this is d = (1 + γ/2) z + s γ/2 Σ_j |a_j||w_jk|: one more forward pass of the
    module, with absolute values, replaces the four of the formula with w⁺, w⁻, a⁺, a⁻.

    Parameters
    ----------
    gamma : float
        γ ≥ 0; 0 is LRP-0.
    threshold : float
        Neurons with |d| ≤ threshold hand no relevance down.
    bias : {"neuron", "authors"}
        "neuron": the paper. "authors": their program, where b enters d as it is, without γ.
    """

    def __init__(self, gamma: float, threshold: float = THRESHOLD, bias: str = "neuron") -> None:
        super().__init__()
        self.gamma = gamma
        self.threshold = threshold
        self.bias = bias
        self._absolute: dict[str, Tensor | None] | None = None

    def pre_forward(self, module: nn.Module, input: tuple[Tensor, ...]) -> Tensor | None:
        """Mark where gradients turn into relevance."""
        (a,) = input
        return TimesInput.apply(a, a.detach()) if a.requires_grad else None

    def forward(self, module: nn.Module, input: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """Replace the output by one of the same value whose backward pass follows the rule."""
        (a,) = input
        if not a.requires_grad:
            return None
        z = output
        denominator = z
        if self.gamma:
            if self._absolute is None:
                self._absolute = {name: _map(p, torch.abs) for name, p in module._parameters.items()}
                if self.bias == "authors" and self._absolute.get("bias") is not None:
                    self._absolute["bias"] = None
            with _parameters(module, self._absolute):
                magnitude = module.forward(a.abs())
            sign = torch.where(z.detach() >= 0, 1.0, -1.0).to(z.dtype)
            denominator = (1 + self.gamma / 2) * z + (self.gamma / 2 * sign) * magnitude
            if self.bias == "authors" and getattr(module, "bias", None) is not None:
                b = module.get_parameter("bias").detach()
                denominator = denominator - self.gamma / 2 * b.view(-1, *(1,) * (z.ndim - 2))
        return OverDenominator.apply(denominator, z.detach(), self.threshold)

    def copy(self) -> GeneralizedGamma:
        """A hook of the same parameters for another module."""
        return type(self)(self.gamma, self.threshold, self.bias)

    def remove(self) -> None:
        """Forget the absolute parameters."""
        self._absolute = None
        super().remove()


class BoundedInput(ForwardRule):
    """LRP-z^B for the first convolution (Note K, case 6); its denominator carries no bias.

    R_p = Σ_j (x_p w_pj − l_p w⁺_pj − h_p w⁻_pj) / d_j · R_j, with d_j the sum of these terms over p.

    Parameters
    ----------
    low, high : tensor or float
        Smallest and largest value of each input, broadcastable to the input.
    threshold : float
        Neurons with |d| ≤ threshold hand no relevance down.
    bias : {"neuron", "authors"}
        "neuron": the paper, no bias in d. "authors": their program, which subtracts b from d.
    """

    def __init__(
        self, low: Tensor | float, high: Tensor | float, threshold: float = THRESHOLD, bias: str = "neuron"
    ) -> None:
        super().__init__()
        self.low = low
        self.high = high
        self.threshold = threshold
        self.bias = bias

    def forward(self, module: nn.Module, input: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """Replace the output by one of the same value whose backward pass follows the rule."""
        (x,) = input
        if not x.requires_grad:
            return None
        weight = module.get_parameter("weight").detach()
        low, high = (_bound(bound, name, x) for bound, name in ((self.low, "low"), (self.high, "high")))
        values = x.detach()
        if bool((values < low).any()) or bool((values > high).any()):
            warnings.warn(
                f"the input ranges from {float(values.min()):.4g} to {float(values.max()):.4g} and leaves "
                "[low, high]: the z^B rule at the first convolution is made for inputs in that box. "
                "Normalise low and high as the input",
                stacklevel=2,
            )

        def term(value: Tensor, weight: Tensor) -> Tensor:
            with _parameters(module, {"weight": weight, "bias": None}):
                return module.forward(TimesInput.apply(x, value))

        denominator = term(values, weight) - term(low, weight.clamp(min=0)) - term(high, weight.clamp(max=0))
        if self.bias == "authors" and module.bias is not None:
            denominator = denominator - module.get_parameter("bias").detach().view(-1, 1, 1)
        return OverDenominator.apply(denominator, output.detach(), self.threshold)

    def copy(self) -> BoundedInput:
        """A hook of the same parameters for another module."""
        return type(self)(self.low, self.high, self.threshold, self.bias)


class PassLarge(ForwardRule):
    """R(z) = R(a) for an orphan activation or a gate, and 0 where |z| ≤ threshold (Note K, cases 3 and 4).

    The module itself passes relevance on, since `NFNetCanonizer` made it so.
    """

    def __init__(self, threshold: float = THRESHOLD) -> None:
        super().__init__()
        self.threshold = threshold

    def pre_forward(self, module: nn.Module, input: tuple[Tensor, ...]) -> Tensor | None:
        """Mark where relevance is dropped."""
        (z,) = input
        return DropSmall.apply(z, self.threshold) if z.requires_grad else None

    def copy(self) -> PassLarge:
        """A hook of the same parameters for another module."""
        return type(self)(self.threshold)


@register_composite("nfnet_gamma")
class NFNetGamma(Composite):  # type: ignore[misc]
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
    >>> composite = NFNetGamma(low, high)                          # doctest: +SKIP
    >>> with Gradient(model, composite) as attributor:             # doctest: +SKIP
    ...     output, relevance = attributor(images, one_hot)
    """

    def __init__(
        self,
        low: Tensor | float,
        high: Tensor | float,
        gamma: float = 0.1,
        *,
        threshold: float = THRESHOLD,
        bias: str = "neuron",
        canonizers: Sequence[Any] | None = None,
    ) -> None:
        for name, value in (("gamma", gamma), ("threshold", threshold)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {type(value).__name__}")
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and at least 0, got {value}")
        if bias not in ("neuron", "authors"):
            raise ValueError(f"bias must be 'neuron' (the paper) or 'authors' (their program), got {bias!r}")
        _check_bounds(low, high)
        self.first_rule = BoundedInput(low, high, threshold, bias)
        self.linear_rule = GeneralizedGamma(gamma, threshold, bias)
        self.pass_rule = PassLarge(threshold)
        super().__init__(module_map=self.mapping, canonizers=[NFNetCanonizer(), *(canonizers or ())])

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        """Whether there is an NFNet in the model; `doctor` asks."""
        return NFNetCanonizer.suits(model)

    def register(self, module: nn.Module) -> None:
        """Canonize the model and attach the rules; on an error, leave the model as it was."""
        try:
            super().register(module)
        except BaseException:
            self.remove()
            raise

    def mapping(self, ctx: dict[Any, Any], name: str, module: nn.Module) -> Hook | None:
        """The rule for a module, known from its place in the NFNet."""
        if not ctx:  # the root comes first
            ctx.update(self._plan(module))
        if module in ctx:
            return ctx[module]
        is_linear = isinstance(module, (ConvolutionStandard, nn.Linear, AvgPool, Sum))
        return self.linear_rule if is_linear or type(module).__name__ == "FastAdaptiveAvgPool" else None

    def _plan(self, root: nn.Module) -> dict[nn.Module, Hook | None]:
        plan: dict[nn.Module, Hook | None] = {root: None}
        for net in find_nfnets(root):
            # What computes a gate receives no relevance.
            plan |= {part: None for _, gate in gates(net) for part in gate.modules()}
            plan |= dict.fromkeys(orphans(net), self.pass_rule)
            plan[next(part for part in net.stem.modules() if isinstance(part, nn.Conv2d))] = self.first_rule  # type: ignore[union-attr]
        return plan


def _map(parameter: Tensor | None, function: Callable[[Tensor], Tensor]) -> Tensor | None:
    return None if parameter is None else function(parameter.detach())


@contextmanager
def _parameters(module: nn.Module, parameters: dict[str, Tensor | None]) -> Iterator[None]:
    """Exchange parameters of a module for a while."""
    originals = dict(module._parameters)
    try:
        module._parameters.update(parameters)  # type: ignore[arg-type]
        yield
    finally:
        module._parameters.update(originals)


def _bound(bound: Tensor | float, name: str, x: Tensor) -> Tensor:
    try:
        return torch.as_tensor(bound, dtype=x.dtype, device=x.device).expand_as(x)
    except RuntimeError as error:
        raise ValueError(
            f"{name} must be broadcastable to the input of shape {tuple(x.shape)}, "
            f"got shape {tuple(torch.as_tensor(bound).shape)}"
        ) from error


def _check_bounds(low: Tensor | float, high: Tensor | float) -> None:
    for name, bound in (("low", low), ("high", high)):
        if isinstance(bound, bool) or not isinstance(bound, int | float | Tensor):
            raise TypeError(f"{name} must be a tensor or a number, got {type(bound).__name__}")
        if not bool(torch.as_tensor(bound).isfinite().all()):
            raise ValueError(f"{name} must be finite")
    if not bool((torch.as_tensor(low) <= torch.as_tensor(high)).all()):
        raise ValueError("low must be at most high, everywhere; are the two exchanged?")
