"""The parts that every transformer is made of in canonical form. Each carries relevance by itself.

They are modules without children, so that what each of them keeps can be measured (`zennit_drsa.kept`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from drsa_core.lrp import by_contribution, passing
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kept import BIASES, CanonicalPart

READINGS = ("constant", "attnlrp")


def checked_reading(attention: str) -> str:
    """The reading of attention, or an error."""
    if attention not in READINGS:
        raise ValueError(
            "attention must be 'constant' (attention weights are constants) or 'attnlrp' (both products of "
            f"attention hand half of the relevance to each factor), got {attention!r}"
        )
    return attention


class ContributionSum(CanonicalPart):
    """A sum, of a block's input and its branches for instance: R_i = x_i / Σ_i x_i · R."""

    def forward(self, *terms: Tensor) -> Tensor:
        """The sum of tensors of one shape."""
        return by_contribution(lambda first, *others: sum(others, first), *terms)


class PositionSum(CanonicalPart):
    """Tokens plus position embeddings, or other learned ones, which keep their part of the relevance."""

    def __init__(self, keeps: str = "position embeddings") -> None:
        super().__init__()
        self.keeps = keeps

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """The sum of tokens (N, T, D) and what does not depend on the input, broadcast to it."""
        constant = position.detach()
        return by_contribution(lambda tokens: tokens + constant, x)


class PrefixTokens(CanonicalPart):
    """Class and register tokens before those of the patches. They keep what reaches them."""

    keeps = "prefix tokens"

    def forward(self, x: Tensor, *tokens: Tensor) -> Tensor:
        """Learned tokens (1, t, D) before tokens (N, T, D)."""
        return torch.cat([*(token.detach().expand(len(x), -1, -1) for token in tokens), x], dim=1)


class TokenPool(CanonicalPart):
    """Tokens (N, T, D) pooled to (N, D): each has relevance by its contribution.

    In a maximum, that is the largest alone.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self._pool = _POOLS[how]

    def forward(self, x: Tensor) -> Tensor:
        """The mean, the maximum, or the mean of both."""
        return by_contribution(self._pool, x)


class WeightedPool(CanonicalPart):
    """Tokens (N, T, D) pooled to (N, D) with fixed weights: each has relevance by its contribution."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """The sum of tokens with weights (N, T)."""
        return by_contribution(lambda tokens: (tokens * weights.unsqueeze(-1)).sum(1), x)


_POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "avg": lambda x: x.mean(1),
    "max": lambda x: x.amax(1),
    "avgmax": lambda x: 0.5 * (x.amax(1) + x.mean(1)),
}


class AttentionProduct(CanonicalPart):
    """softmax(scale · q kᵀ + bias) v, written out: of fused attention, the weights could not be read.

    Parameters
    ----------
    reading : {"constant", "attnlrp"}
        "constant": the weights are constants, and o = A v is linear in v. "attnlrp": both products hand half
        of the relevance to each factor, and softmax follows its own derivative, which keeps some. A factor
        that is learned, as the query of attention pooling, is a weight and takes none.
    scale : float
    """

    def __init__(self, reading: str, scale: float) -> None:
        super().__init__()
        self.reading, self.scale = reading, scale
        self.keeps = BIASES if self.is_constant else "softmax"

    def rule(self) -> str:
        """The reading."""
        return f"attention={self.reading}"

    @property
    def is_constant(self) -> bool:
        """Whether the weights are constants."""
        return self.reading == "constant"

    def source(self, x: Tensor) -> Tensor:
        """What queries and keys are to be computed from: x, without its graph if they get no relevance."""
        return x.detach() if self.is_constant else x

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Queries (…, T, d), keys (…, S, d) and values (…, S, e) to outputs (…, T, e).

        `bias` (…, T, S) is added to the logits: a mask, or learned relative positions.
        """
        if self.is_constant:
            q, k = q.detach(), k.detach()
        constant = None if bias is None else bias.detach()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            logits = _product(q * self.scale, k.transpose(-2, -1))
            weights = (logits if constant is None else logits + constant).softmax(-1)
            return _product(weights, v)

        return by_contribution(attend, q, k, v)


class GateProduct(CanonicalPart):
    """signal ⊙ gate. "constant": the signal takes all relevance (Note K); "attnlrp": each takes half."""

    def __init__(self, reading: str) -> None:
        super().__init__()
        self.reading = reading

    def rule(self) -> str:
        """The reading of attention, which is that of gates as well."""
        return f"attention={self.reading}"

    def forward(self, signal: Tensor, gate: Tensor) -> Tensor:
        """The product of two tensors of one shape."""
        if self.reading == "constant":
            factor = gate.detach()
            return passing(signal, lambda value: value * factor)
        return by_contribution(lambda a, b: _half(a) * _half(b), signal, gate)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; if both carry relevance, the gradient of each is halved."""
    return _half(a) @ _half(b) if a.requires_grad and b.requires_grad else a @ b


class _HalfGradient(torch.autograd.Function):
    """Identity forwards, half of the gradient backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        return 0.5 * gradient[0]


def _half(x: Tensor) -> Tensor:
    return _HalfGradient.apply(x)
