"""Maximisers of the DRSA objective over orthogonal matrices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .objective import Objective

Callback = Callable[[int, float], None]


@dataclass(frozen=True)
class Result:
    """What a solver returns.

    Attributes
    ----------
    basis : tensor, shape (D, D)
        The orthogonal matrix reached.
    history : list of float
        J at the start and after each iteration.
    converged : bool
        Whether the stopping criterion was met within the budget.
    reason : str
        Why the solver stopped.
    """

    basis: Tensor
    history: list[float] = field(repr=False)
    converged: bool
    reason: str

    @property
    def objective(self) -> float:
        """J at `basis`."""
        return self.history[-1]

    @property
    def n_iter(self) -> int:
        """Iterations made."""
        return len(self.history) - 1


def gradient_ascent(
    objective: Objective, start: Tensor, max_iter: int, tol: float, callback: Callback
) -> Result:
    """The paper's loop: U ← orth(U + ∂J/∂U), with a step of 1 and orth(V) = V (VᵀV)^-½ (section 4.2)."""
    basis, at = start, objective.evaluate(start)
    history = [at.value]
    while len(history) <= max_iter:
        basis = orthogonalise(basis + objective.gradient(at))
        at = objective.evaluate(basis)
        history.append(at.value)
        callback(len(history) - 1, at.value)
        if _stalled(history, tol):
            return Result(basis, history, True, f"the objective gained less than tol = {tol:g}")
    return Result(basis, history, False, f"max_iter = {max_iter} was reached")


def quasi_newton(
    objective: Objective,
    start: Tensor,
    max_iter: int,
    tol: float,
    callback: Callback,
    memory: int = 20,
) -> Result:
    """Limited-memory BFGS in left-trivialised coordinates, with a Cayley retraction.

    At U the unknown is a block-lower-triangular L, and the trial point is U·cayley(L − Lᵀ). In these
    coordinates gradients and steps of different iterations are compared as they are, without transport.
    """
    basis, at = start, objective.evaluate(start)
    gradient = objective.tangent_gradient(at)
    history = [at.value]
    pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=memory)
    while len(history) <= max_iter:
        direction = _lbfgs_direction(gradient, pairs)
        slope = float((gradient * direction).sum())
        if slope <= 0:
            pairs.clear()
            direction, slope = gradient, float(gradient.square().sum())
        if not pairs:
            # First step: turn the largest angle pair by a tenth of a radian, not by the gradient's own scale.
            scale = 0.1 / float(torch.linalg.matrix_norm(direction - direction.T, ord=2))
            direction, slope = direction * scale, slope * scale
        length, moved = 1.0, None
        for _ in range(20):
            trial = basis @ cayley(length * (direction - direction.T))
            trial_at = objective.evaluate(trial)
            if trial_at.value >= at.value + 1e-4 * length * slope:
                moved = trial
                break
            # Maximum of the parabola through value, slope and the trial value.
            curvature = at.value + length * slope - trial_at.value
            length = min(max(length * slope * length / (2 * curvature), 0.1 * length), 0.5 * length)
        if moved is None:
            if not pairs:
                return Result(basis, history, True, "no step along the gradient increases the objective")
            pairs.clear()
            continue
        new_gradient = objective.tangent_gradient(trial_at)
        step, change = length * direction, gradient - new_gradient
        if float((step * change).sum()) > 1e-10 * float(change.square().sum()):
            pairs.append((step, change))
        basis, at, gradient = orthogonalise(moved, newton=True), trial_at, new_gradient
        history.append(at.value)
        callback(len(history) - 1, at.value)
        if _stalled(history, tol):
            return Result(basis, history, True, f"the objective gained less than tol = {tol:g}")
    return Result(basis, history, False, f"max_iter = {max_iter} was reached")


SOLVERS = {"quasi-newton": quasi_newton, "paper": gradient_ascent}


def orthogonalise(matrix: Tensor, newton: bool = False) -> Tensor:
    """The closest orthogonal matrix V (VᵀV)^-½; `newton` is one Newton-Schulz step, for small errors."""
    gram = matrix.T @ matrix
    if newton:
        return 1.5 * matrix - 0.5 * matrix @ gram
    values, vectors = torch.linalg.eigh(gram.double())
    root = (vectors * values.rsqrt()) @ vectors.T
    return (matrix.double() @ root).to(matrix.dtype)


def cayley(skew: Tensor) -> Tensor:
    """The orthogonal matrix (I − Ω/2)⁻¹(I + Ω/2), which agrees with exp(Ω) to second order."""
    identity = torch.eye(len(skew), dtype=skew.dtype, device=skew.device)
    return torch.linalg.solve(identity - skew / 2, identity + skew / 2)


def _lbfgs_direction(gradient: Tensor, pairs: deque[tuple[Tensor, Tensor]]) -> Tensor:
    """The two-loop recursion; `pairs` are (step, decrease of the gradient), oldest first."""
    direction, coefficients = gradient.clone(), []
    for step, change in reversed(pairs):
        coefficient = float((step * direction).sum() / (step * change).sum())
        coefficients.append(coefficient)
        direction -= coefficient * change
    if pairs:
        step, change = pairs[-1]
        direction *= float((step * change).sum() / change.square().sum())
    for (step, change), coefficient in zip(pairs, reversed(coefficients), strict=True):
        direction += (coefficient - float((change * direction).sum() / (step * change).sum())) * step
    return direction


def _stalled(history: list[float], tol: float, window: int = 10) -> bool:
    """Whether the last `window` iterations gained less than `tol` of the objective, per iteration."""
    if len(history) <= window:
        return False
    return history[-1] - history[-1 - window] <= tol * window * abs(history[-1])
