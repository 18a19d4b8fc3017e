"""What solvers of the DRSA objective share, and the paper's own loop, kept as the yardstick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .objective import Objective

#: Called with the objective after every iteration.
Callback = Callable[[float], None]


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

    basis: Tensor = field(repr=False)
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
    """The paper's loop: U ← orth(U + ∂J/∂U), with a step of 1 and orth(V) = V (VᵀV)^-½ (section 4.2).

    Four products of N×D×D and one D×D eigenproblem an iteration.
    """
    basis, at = start, objective.evaluate(start)
    history = [at.value]
    while len(history) <= max_iter:
        basis = orthogonalise(basis + objective.gradient(at))
        at = objective.evaluate(basis)
        history.append(at.value)
        callback(at.value)
        if stalled(history, tol):
            return Result(basis, history, True, f"the gain per iteration fell below tol = {tol:g}")
    return Result(basis, history, False, f"max_iter = {max_iter} was reached")


def orthogonalise(matrix: Tensor) -> Tensor:
    """The closest orthogonal matrix, V (VᵀV)^-½."""
    values, vectors = torch.linalg.eigh((matrix.T @ matrix).double())
    root = (vectors * values.rsqrt()) @ vectors.T
    return (matrix.double() @ root).to(matrix.dtype)


def stalled(history: list[float], tol: float, window: int = 10) -> bool:
    """Whether the relative gain per iteration, over the last `window` iterations, is at most `tol`.

    Zero asks for no gain at all in the window, which rounding alone may bring about: it never stalls.
    """
    if tol <= 0 or len(history) <= window:
        return False
    return history[-1] - history[-1 - window] <= tol * window * abs(history[-1])
