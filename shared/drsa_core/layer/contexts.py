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

from .backward import BackwardPass
from .request import Request
from .upper_network import UpperNetwork

# A context method maps a request to activations and contexts, both of shape (N, …, D, …).
ContextMethod: TypeAlias = Callable[[Request], tuple[Tensor, Tensor]]


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
    n_steps : int
        Points of Gauss and Legendre's quadrature, as Captum's. Default 100, as in Note D.
    internal_batch_size : int, optional
        Activations per run of the upper network: bounds the memory. Default: as many as 128 MB hold.
    """

    n_steps: int = 100
    internal_batch_size: int | None = field(default=None, repr=False)

    def __call__(self, request: Request) -> tuple[Tensor, Tensor]:
        """Activations and contexts, example by example."""
        errors: list[Tensor] = []
        points, weights = np.polynomial.legendre.leggauss(self.n_steps)
        points, weights = (points + 1) / 2, weights / 2  # from [−1, 1] to [0, 1]

        def integrate(upper: UpperNetwork, activation: Tensor) -> Tensor:
            size = min(self.internal_batch_size or rows_per_run(self.n_steps, activation), self.n_steps)
            shape = (-1, *[1] * (activation.ndim - 1))
            path = torch.as_tensor(points).to(activation).reshape(shape)
            # A hundred terms in half precision would leave two digits.
            exact = torch.promote_types(activation.dtype, torch.float32)
            weight = torch.as_tensor(weights).to(activation.device, exact).reshape(shape)
            context = torch.zeros_like(activation, dtype=exact)
            for some, their_weight in zip(path.split(size), weight.split(size), strict=True):
                rows = (some * activation).requires_grad_()
                with torch.enable_grad():
                    score = upper(rows.clone())
                (gradient,) = torch.autograd.grad(score.sum(), rows)
                context += (their_weight * gradient).sum(0, keepdim=True)
            if getattr(request.target, "is_potential", True):
                errors.append(_conservation_error(activation, context, upper))
            return context.to(activation.dtype)

        # The whole pass says whether the score depends on the layer, and what goes around it.
        backward = BackwardPass(request)
        score = request.select(backward.output).detach()
        activation = backward.activation
        del backward
        context = contexts_by_example(request, activation, score, integrate)
        if errors:
            self._warn_of_few_steps(float(torch.stack(errors).max()), request.layer_name)
        return activation, context

    def _warn_of_few_steps(self, error: float, layer_name: str) -> None:
        if error > 0.1:
            warnings.warn(
                f"the integral above layer {layer_name!r} with {self.n_steps} steps is off by {error:.0%} of "
                "y(a) − y(0), to which the relevance aᵀc must sum; take more steps, "
                f"context_method=IntegratedGradientsContext(n_steps={4 * self.n_steps})",
                stacklevel=3,
            )


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
