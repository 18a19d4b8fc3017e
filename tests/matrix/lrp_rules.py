"""The rules of Note A as formulas, for the reference: R_j = Σ_k (a_j w_jk / Σ_j a_j w_jk) R_k and its kin."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.matrix.networks import Affine
from tests.matrix.reference import Rule, gradient, vjp

_POOLING = (nn.AvgPool2d, nn.MaxPool2d)


def _with(
    module: nn.Module, weight: Callable[[Tensor], Tensor], bias: Callable[[Tensor], Tensor]
) -> nn.Module:
    """The layer with other weights."""
    changed = copy.deepcopy(module)
    with torch.no_grad():
        for name, change in (("weight", weight), ("bias", bias)):
            parameter = getattr(changed, name)
            parameter.copy_(change(parameter))
    return changed


def _stable(z: Tensor, epsilon: float) -> Tensor:
    return z + epsilon * torch.where(z < 0, -1.0, 1.0).to(z)


def _ratio(terms: list[tuple[nn.Module, Tensor]], signal: Tensor, epsilon: float) -> Tensor:
    """Σ_terms input ⊙ Jᵀ(signal / Σ_terms output)."""
    with torch.no_grad():
        total = torch.stack([module(z) for module, z in terms]).sum(0)
    share = signal / _stable(total, epsilon)
    return torch.stack([z * vjp(module, z, share) for module, z in terms]).sum(0)


def _zero(p: Tensor) -> Tensor:
    return torch.zeros_like(p)


def epsilon_rule(module: nn.Module, z: Tensor, signal: Tensor, epsilon: float) -> Tensor:
    """LRP-ε."""
    return _ratio([(module, z)], signal, epsilon)


def plus_rule(module: nn.Module, z: Tensor, signal: Tensor) -> Tensor:
    """z⁺ for inputs of either sign: only positive contributions count."""

    def up(p: Tensor) -> Tensor:
        return p.clamp(min=0)

    positive = _with(module, up, up)
    negative = _with(module, lambda p: p.clamp(max=0), _zero)
    return _ratio([(positive, z.clamp(min=0)), (negative, z.clamp(max=0))], signal, 1e-6)


def gamma_rule(module: nn.Module, z: Tensor, signal: Tensor, gamma: float = 0.25) -> Tensor:
    """The generalised LRP-γ of Note A: one ratio where the output is positive, another elsewhere."""

    def up(p: Tensor) -> Tensor:
        return p + gamma * p.clamp(min=0)

    def down(p: Tensor) -> Tensor:
        return p + gamma * p.clamp(max=0)

    with torch.no_grad():
        output = module(z)
    above, below = z.clamp(min=0), z.clamp(max=0)
    where_positive = [(_with(module, up, up), above), (_with(module, down, _zero), below)]
    where_negative = [(_with(module, down, down), above), (_with(module, up, _zero), below)]
    return _ratio(where_positive, signal * (output > 0), 1e-6) + _ratio(
        where_negative, signal * (output < 0), 1e-6
    )


def box_rule(module: nn.Module, z: Tensor, signal: Tensor, low: float, high: float) -> Tensor:
    """z^B: x w − l w⁺ − h w⁻."""
    positive = _with(module, lambda p: p.clamp(min=0), lambda p: p.clamp(min=0))
    negative = _with(module, lambda p: p.clamp(max=0), lambda p: p.clamp(max=0))
    lows, highs = torch.full_like(z, low), torch.full_like(z, high)
    with torch.no_grad():
        share = signal / _stable(module(z) - positive(lows) - negative(highs), 1e-6)
    return z * vjp(module, z, share) - lows * vjp(positive, lows, share) - highs * vjp(negative, highs, share)


# ---------------------------------------------------------------------- composites


def captum_epsilon(module: nn.Module, z: Tensor, signal: Tensor) -> Tensor:
    """Captum's default: ε on linear layers, pooling and batch norm; activation functions pass relevance."""
    if isinstance(module, nn.Conv2d | nn.Linear | Affine | nn.AvgPool2d | nn.MaxPool2d):
        return epsilon_rule(module, z, signal, 1e-9)
    return signal if isinstance(module, nn.ReLU) else gradient(module, z, signal)


def captum_gamma(first: nn.Module) -> Rule:
    """γ on the first layer (weights alone), ε on the others."""

    def rule(module: nn.Module, z: Tensor, signal: Tensor) -> Tensor:
        if module is not first:
            return captum_epsilon(module, z, signal)
        raised = _with(module, lambda w: w + 0.25 * w.clamp(min=0), lambda b: b)
        return _ratio([(raised, z)], signal, 1e-9)

    return rule


def _zennit_base(module: nn.Module, z: Tensor, signal: Tensor) -> Tensor:
    if isinstance(module, nn.ReLU | Affine):
        return signal
    if isinstance(module, nn.Linear | nn.AvgPool2d):
        return epsilon_rule(module, z, signal, 1e-6)
    return gradient(module, z, signal)


def epsilon_plus(module: nn.Module, z: Tensor, signal: Tensor) -> Tensor:
    """Zennit's EpsilonPlus."""
    if isinstance(module, nn.Conv2d):
        return plus_rule(module, z, signal)
    return _zennit_base(module, z, signal)


def epsilon_gamma_box(first: nn.Module, low: float, high: float) -> Rule:
    """Zennit's EpsilonGammaBox."""

    def rule(module: nn.Module, z: Tensor, signal: Tensor) -> Tensor:
        if not isinstance(module, nn.Conv2d):
            return _zennit_base(module, z, signal)
        return box_rule(module, z, signal, low, high) if module is first else gamma_rule(module, z, signal)

    return rule


def beta_smooth(module: nn.Module, z: Tensor, signal: Tensor) -> Tensor:
    """The gradient of a softplus in the place of ReLU's."""
    return torch.sigmoid(10 * z) * signal if isinstance(module, nn.ReLU) else gradient(module, z, signal)


def guided(module: nn.Module, z: Tensor, signal: Tensor, whole: Tensor) -> Tensor:
    """GuidedBackprop: ReLU lets a gradient pass where the input and the whole gradient are positive."""
    if isinstance(module, nn.ReLU):
        return torch.where((z > 0) & (whole > 0), signal, 0)
    return gradient(module, z, signal)


def deconv(module: nn.Module, z: Tensor, signal: Tensor, whole: Tensor) -> Tensor:
    """DeconvNet: ReLU lets a gradient pass where the whole gradient is positive."""
    return torch.where(whole > 0, signal, 0) if isinstance(module, nn.ReLU) else gradient(module, z, signal)
