"""Step 1 of Note B: activations a = φ(x) and contexts c, with R_k = (U_kᵀa)ᵀ(U_kᵀc)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..checks import as_int
from .backward import BackwardPass
from .quadrature import Array, gauss_legendre, nested_levels
from .request import Request
from .upper_network import UpperNetwork

# A context method maps a request to activations and contexts, both of shape (N, …, D, …).
ContextMethod: TypeAlias = Callable[[Request], tuple[Tensor, Tensor]]

#: What the relevance may miss of y(a) − y(0), relative to it.
TOLERANCE = 0.01
#: Points of a path are 2^3 − 1 = 7, 15, …, 2^9 − 1 = 511.
FIRST_LEVEL, N_LEVELS = 3, 7
#: Steps if the number is not given and cannot be found.
FIXED_STEPS = 100


@dataclass(frozen=True)
class GradientContext:
    """c = ∂y/∂a (Note B.2, Gradient × Input)."""

    def __call__(self, request: Request) -> tuple[Tensor, Tensor]:
        """Activations and contexts from one forward pass and a backward pass down to the layer."""
        backward = BackwardPass(request)
        return backward.activation, backward.context.detach()


@dataclass(frozen=True)
class IntegratedGradientsContext:
    """c = ∫ ∂y/∂a dt along the straight path from 0 to a (Note B.2, Integrated Gradients).

    Attributes
    ----------
    n_steps : int, optional
        Points of Gauss and Legendre's quadrature, as Captum's; 100 in Note D. Default: as many as each
        example needs, see Notes.
    internal_batch_size : int, optional
        Activations per run of the upper network: bounds the memory. Default: as many as 128 MB hold.

    Notes
    -----
    The relevance aᵀc must sum to y(a) − y(0), which is known. So by default 7, 15, 31, … points are taken, up
    to 511, until the sum misses less than 1 % of that, and missed less than 10 % with half as many points: a
    first hit may be chance. The rule is Fejér's, whose points hold those of the rule before, so that none is
    run twice: the cost is that of the last number of points. Beyond 511 there is a warning.

    For an `attr_output` of Zennit's that depends on the output there is no such y; then it is 100 steps.
    """

    n_steps: int | None = None
    internal_batch_size: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.n_steps is not None:
            as_int(self.n_steps, "n_steps, if not None,", 1)

    def __call__(self, request: Request) -> tuple[Tensor, Tensor]:
        """Activations and contexts, example by example."""
        missed: list[tuple[float, int]] = []

        def integrate(upper: UpperNetwork, activation: Tensor) -> Tensor:
            path = _Path(upper, activation, self.internal_batch_size)
            if self.n_steps is None and upper.is_potential:
                context, error, n_steps = path.refined()
            else:
                n_steps = self.n_steps or FIXED_STEPS
                points, weights = gauss_legendre(n_steps)
                context = path.sums(points, weights[None])[0]
                error = float(_conservation_error(activation, context, upper))
            if upper.is_potential:
                missed.append((error, n_steps))
            return context.to(activation.dtype)

        # The whole pass says whether the score depends on the layer, and what goes around it.
        backward = BackwardPass(request)
        score = request.select(backward.output).detach()
        activation = backward.activation
        del backward
        context = contexts_by_example(request, activation, score, integrate)
        if missed:
            self._warn_of_few_steps(*max(missed), request.layer_name)
        return activation, context

    def _warn_of_few_steps(self, error: float, n_steps: int, layer_name: str) -> None:
        if error > (TOLERANCE if self.n_steps is None else 0.1):
            warnings.warn(
                f"the integral above layer {layer_name!r} with {n_steps} steps is off by {error:.0%} of "
                "y(a) − y(0), to which the relevance aᵀc must sum; take more steps, "
                f"context_method=IntegratedGradientsContext(n_steps={4 * n_steps})",
                stacklevel=3,
            )


class _Path:
    """Gradients along the straight path from 0 to the activation of one example."""

    def __init__(self, upper: UpperNetwork, activation: Tensor, batch_size: int | None) -> None:
        self.upper, self.activation, self.batch_size = upper, activation, batch_size

    def sums(self, points: Array, weights: Array) -> Tensor:
        """Σ_i w_li ∂y/∂a at t_i a, shape (L, 1, …, D, …), for points (n,) and weights (L, n)."""
        activation = self.activation
        size = min(self.batch_size or rows_per_run(len(points), activation), len(points))
        path = torch.as_tensor(points).to(activation).reshape(-1, *[1] * (activation.ndim - 1))
        # A hundred terms in half precision would leave two digits.
        exact = torch.promote_types(activation.dtype, torch.float32)
        weight = torch.as_tensor(weights).to(activation.device, exact)
        result = torch.zeros(len(weights), *activation.shape, dtype=exact, device=activation.device)
        for some, their_weights in zip(path.split(size), weight.split(size, dim=1), strict=True):
            gradient = self.upper.gradient(some * activation)
            result += torch.tensordot(their_weights, gradient.to(exact), 1).unsqueeze(1)
        return result

    def refined(self) -> tuple[Tensor, float, int]:
        """The context, what its sum misses, and the number of points that it took."""
        levels, before = nested_levels(FIRST_LEVEL, N_LEVELS), math.inf
        sums = self.activation.new_zeros(())
        for number, (points, weights) in enumerate(levels):
            later = np.stack([w[len(weights) - len(points) : len(weights)] for _, w in levels[number:]])
            # One sum for each level to come, as a point has another weight in each.
            sums = self.sums(points, later) + (sums[1:] if number else 0)
            error = float(_conservation_error(self.activation, sums[0], self.upper))
            if not math.isfinite(error) or (error <= TOLERANCE and before <= 10 * TOLERANCE):
                break
            before = error
        return sums[0], error, len(weights)


def contexts_by_example(
    request: Request,
    activation: Tensor,
    score: Tensor,
    explain: Callable[[UpperNetwork, Tensor], Tensor],
) -> Tensor:
    """Contexts (N, …, D, …) of a method that looks at one example at a time.

    Parameters
    ----------
    activation, score : tensor, shapes (N, …, D, …) and (N,)
        φ(x) and y.
    explain : function
        The network above the layer and the activation (1, …, D, …) of one example ↦ its context.
    """
    contexts = []
    for i in range(len(request)):
        a = activation[i : i + 1]
        contexts.append(explain(UpperNetwork(request.example(i), a, score[i : i + 1]), a))
    return torch.cat(contexts)


def rows_per_run(n_rows: int, activation: Tensor) -> int:
    """Size of equal batches of activations, each of at most 128 MB, if there are `n_rows` in all.

    In large batches the weights of the upper network are read less often, and so is the lower part run.
    """
    at_most = max(1, 2**27 // max(activation.nbytes, 1))
    n_runs = math.ceil(n_rows / at_most)
    return math.ceil(n_rows / n_runs)


def _conservation_error(activation: Tensor, context: Tensor, upper: UpperNetwork) -> Tensor:
    """What Σ aᵀc misses of y(a) − y(0), relative to that, shape ().

    Where y(a) − y(0) is itself small, next to terms that cancel in the sum, these are the measure.
    """
    relevance = activation * context
    gained = (upper.score - upper.score_at_zero).sum()
    scale = torch.maximum(gained.abs(), 0.05 * relevance.abs().sum())
    return (relevance.sum() - gained).abs() / scale.clamp(min=1e-30)
