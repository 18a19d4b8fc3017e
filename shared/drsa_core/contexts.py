"""Step 1 of Note B: activations a = φ(x) and contexts c, with R_k = (U_kᵀa)ᵀ(U_kᵀc)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .checks import as_int, warn_user
from .layer import Request, Split

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

# A context method maps a request to activations and contexts, both of shape (N, …, D, …).
ContextMethod: TypeAlias = Callable[[Request], tuple[Tensor, Tensor]]

#: By how much the relevance a ⊙ c may change, relative to its norm, when the points of a path are doubled.
#: What is missed then is about half as much (on VGG16 0.4 times).
TOLERANCE = 0.01
#: Points of a path are 2^3 − 1 = 7, 15, …, 2^9 − 1 = 511.
FIRST_LEVEL, N_LEVELS = 3, 7


@dataclass(frozen=True)
class GradientContext:
    """c = ∂y/∂a (Note B.2, Gradient × Input)."""

    def __call__(self, request: Request) -> tuple[Tensor, Tensor]:
        """Activations and contexts from one forward pass and a backward pass down to the layer."""
        split = Split(request)
        return split.activation, split.context.detach()


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
    By default 7, 15, 31, … points are taken, up to 511, until a ⊙ c changes by less than 1 % of its Euclidean
    norm, having changed by less than 10 % before, which leaves an error of 1 to 3 %. Neither the relevance of
    a concept nor a map can then hide an error that cancels in the total. The rule is Fejér's second, whose
    points hold those of the rule before, so that none is run twice: the cost is that of the last number of
    points. Beyond 511 there is a warning.
    """

    n_steps: int | None = None
    internal_batch_size: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.n_steps is not None:
            as_int(self.n_steps, "n_steps", 1)

    def __call__(self, request: Request) -> tuple[Tensor, Tensor]:
        """Activations and contexts, example by example."""
        split = Split(request)  # which says whether the score depends on the layer, and what goes around it
        score, activation = request.scores(split.output).detach(), split.activation
        del split
        errors: list[float] = []
        context = contexts_by_example(request, activation, score, partial(self._integrate, errors))
        if max(errors) > (TOLERANCE if self.n_steps is None else 0.1):
            warn_user(
                f"the path integral above layer {request.layer_name!r} is off by {max(errors):.0%}; take "
                f"more steps, say {4 * (self.n_steps or 2**9)}: n_steps of the context method "
                "IntegratedGradientsContext, or context_steps in zennit_drsa",
            )
        return activation, context

    def _integrate(self, errors: list[float], upper: UpperNetwork, activation: Tensor) -> Tensor:
        """Context (1, …, D, …) of one example; `errors` takes by how much it is off."""
        if self.n_steps is not None:
            points, weights = gauss_legendre(self.n_steps)
            context = self._sums(upper, activation, points, weights[None])[0]
            errors.append(_missed(activation, context, upper))
            return context.to(activation.dtype)
        levels, sums = nested_levels(FIRST_LEVEL, N_LEVELS), None
        before, error = torch.zeros_like(activation), math.inf
        for number, (points, weights) in enumerate(levels):
            # One sum for each level to come, as a point has another weight in each.
            later = np.stack([w[len(weights) - len(points) : len(weights)] for _, w in levels[number:]])
            added = self._sums(upper, activation, points, later)
            sums = added if sums is None else added + sums[1:]
            relevance = activation * sums[0]
            change = (relevance - activation * before).norm() / relevance.norm().clamp(min=1e-30)
            earlier, error = error, float(change)
            # A first agreement may be chance.
            if (error <= TOLERANCE and earlier <= 10 * TOLERANCE) or not math.isfinite(error):
                break
            before = sums[0]
        errors.append(error)
        return (before if sums is None else sums[0]).to(activation.dtype)

    def _sums(self, upper: UpperNetwork, activation: Tensor, points: Array, weights: Array) -> Tensor:
        """Σ_i w_li ∂y/∂a at t_i a, shape (L, 1, …, D, …), for points (n,) and weights (L, n)."""
        size = min(self.internal_batch_size or rows_per_run(len(points), activation), len(points))
        path = torch.as_tensor(points).to(activation).reshape(-1, *[1] * (activation.ndim - 1))
        # A hundred terms in half precision would leave two digits.
        exact = torch.promote_types(activation.dtype, torch.float32)
        weight = torch.as_tensor(weights).to(activation.device, exact)
        result = torch.zeros(len(weights), *activation.shape, dtype=exact, device=activation.device)
        for some, their_weights in zip(path.split(size), weight.split(size, dim=1), strict=True):
            gradient = upper.gradient(some * activation)
            result += torch.tensordot(their_weights, gradient.to(exact), 1).unsqueeze(1)
        return result


def _missed(activation: Tensor, context: Tensor, upper: UpperNetwork) -> float:
    """What Σ aᵀc misses of y(a) − y(0), relative to that; where terms cancel, they are the measure."""
    relevance = activation * context
    gained = (upper.score - upper.score_at_zero).sum()
    scale = torch.maximum(gained.abs(), 0.05 * relevance.abs().sum()).clamp(min=1e-30)
    return float((relevance.sum() - gained).abs() / scale)


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
    """Size of equal batches of activations, each of at most 128 MB, if there are `n_rows` in all."""
    at_most = max(1, 2**27 // max(activation.nbytes, 1))
    return math.ceil(n_rows / math.ceil(n_rows / at_most))


class UpperNetwork:
    """The network above the layer, g: a ↦ y, for one example and many activations at a time.

    What lies below the layer runs for the one example only, unless a trial shows that the model needs as many
    inputs as there are activations (it concatenates a bypass, say).

    Parameters
    ----------
    request : Request
        A batch of one.
    activation : tensor, shape (1, …, D, …)
        φ(x), for the trial.
    score : tensor, shape (1,)
        y = g(φ(x)).

    Attributes
    ----------
    score, score_at_zero : tensor, shape (1,)
        g(φ(x)) and g(0).
    """

    def __init__(self, request: Request, activation: Tensor, score: Tensor) -> None:
        self._request, self.score, self._repeats = request, score, False
        rows = torch.cat([activation, activation, torch.zeros_like(activation)])
        # The batch size may change the order of summation; half precision has few digits.
        tolerance = 1e-3 if score.dtype in (torch.float32, torch.float64) else 0.05
        with torch.no_grad():
            try:
                scores = self(rows)
                self._repeats = not torch.allclose(scores[:2], score.expand(2), rtol=tolerance, atol=0)
            except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
                self._repeats = True
            if self._repeats:
                scores = self(rows)
                if not torch.allclose(scores[:2], score.expand(2), rtol=tolerance, atol=1e-2 * tolerance):
                    warn_user(
                        "the model gives an example another score in its batch than among copies of itself: "
                        "it mixes "
                        f"examples, or draws random numbers. Contexts at layer {request.layer_name!r} are "
                        "those of the example by itself; explain one example at a time",
                    )
        self.score_at_zero = scores[2:]

    def __call__(self, rows: Tensor) -> Tensor:
        """Scores y, shape (n,), of activations of shape (n, …, D, …)."""
        request = self._request_for(len(rows))
        with request.running(lambda _: rows.clone()) as output:
            return request.scores(output, len(rows))

    def gradient(self, rows: Tensor) -> Tensor:
        """Gradients ∂y/∂a at activations, both of shape (n, …, D, …)."""
        rows = rows.detach().requires_grad_()
        request = self._request_for(len(rows))
        with torch.enable_grad(), request.running(lambda _: rows.clone()) as output:
            (gradient,) = torch.autograd.grad(request.scores(output, len(rows)).sum(), rows)
        return gradient

    def _request_for(self, n_rows: int) -> Request:
        if not self._repeats:
            return self._request
        return self._request.mapped(lambda row: row.expand(n_rows, *row.shape[1:]), self._request.target)


# ---------------------------------------------------------------------- quadrature on [0, 1]


def gauss_legendre(n_points: int) -> tuple[Array, Array]:
    """Points and weights (n,) of Gauss and Legendre's rule, as Captum's."""
    points, weights = np.polynomial.legendre.leggauss(n_points)
    return (points + 1) / 2, weights / 2


def fejer(n_points: int) -> tuple[Array, Array]:
    """Points and weights (n,) of Fejér's second rule, exact for polynomials of degree n − 1.

    Its points (1 + cos(jπ/(n + 1))) / 2 hold those of (n − 1)/2 points at every second place. There is none
    at the ends, where a network without biases has a kink.
    """
    angles = np.pi * np.arange(1, n_points + 1) / (n_points + 1)
    odd = 2 * np.arange(1, (n_points + 1) // 2 + 1) - 1
    series = (np.sin(np.outer(angles, odd)) / odd).sum(1)
    return (1 + np.cos(angles)) / 2, 2 * np.sin(angles) * series / (n_points + 1)


@cache
def nested_levels(first: int, n_levels: int) -> list[tuple[Array, Array]]:
    """Fejér's rules of 2^first − 1 points and n_levels − 1 times twice as many and one.

    Each comes as the points (p,) that it adds, and the weights of all points so far, shape (2^m − 1,), in the
    order in which the points were added.
    """
    levels: list[tuple[Array, Array]] = []
    order: Array = np.zeros(0)  # j / 2^m of all points so far
    for m in range(first, first + n_levels):
        points, weights = fejer(2**m - 1)
        places = np.arange(1, 2**m, 1 if m == first else 2)
        order = np.concatenate([order, places / 2**m])
        levels.append((points[places - 1], weights[np.rint(order * 2**m).astype(int) - 1]))
    return levels
