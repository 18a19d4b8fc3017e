"""The default solver of DRSA: preconditioned L-BFGS on the orthogonal group.

The unknown at U is L, zero on and above the block diagonal, and the trial point is U·cayley(L − Lᵀ). In
these left-trivialised coordinates, steps and gradients of different iterations are compared as they are.
Three things make it faster than plain L-BFGS:

* The preconditioner is the diagonal of the Hessian in L, which the objective knows in closed form.
* It is applied in a frame of the objective's choice, rotated inside the blocks so that the Hessian is as
  diagonal as it can be. Inner products do not see the rotation, so that L-BFGS needs no rotation itself.
* Only pairs of different blocks enter the gradient, three eighths of the products for four blocks.

The solver sees no samples: `Problem` is all that it asks of an objective.

The first iterations are the paper's own. They decide which of the many local maxima is reached, and long
first steps lead to worse ones; where the paper's step is itself too long to gain, it is halved.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from .objective import Curvature
from .paper_loop import Callback, Result, orthogonalise, stalled

#: Iterations with the paper's step before the quasi-Newton ones.
#: Chosen, with FLOOR and the default tol, on the reference data of the tests and one VGG16 start: other data
#: may be served better by more, and `n_init` guards against a bad basin.
WARM_UP = 40
#: Where the paper's step overshoots, it is halved down to this part of it.
SMALLEST_FRACTION = 2.0**-10
#: Pairs of steps and gradient changes that L-BFGS remembers.
MEMORY = 20
#: Iterations between corrections of the basis, and between updates of the preconditioner and of the bases
#: inside the blocks.
REFRESH = 5
#: Smallest curvature, relative to the largest one: directions with less count as flat.
FLOOR = 1e-3
#: Largest angle, in radians, by which one step may turn the basis; the first quasi-Newton step is shorter.
#: FIRST_ANGLE and the iterations of `largest_angle` were chosen among nine combinations on the reference data
#: of the tests, where one start lies between two basins and five of the nine reach the better one.
MAX_ANGLE, FIRST_ANGLE = 1.0, 0.1


class Point(Protocol):
    """An objective at one U; what else it holds is the objective's own."""

    @property
    def value(self) -> float:
        """J(U)."""


At = TypeVar("At", bound=Point)


class Problem(Protocol[At]):
    """What the solver asks of an objective. U is (D, D), and L is zero on and above the block diagonal.

    Where the samples are, on one machine or on many, all or some of them, is the objective's business.

    Attributes
    ----------
    columns : list of slice
        Columns of U that belong to each block, the residual included.
    """

    columns: list[slice]

    def evaluate(self, basis: Tensor) -> At:
        """The objective at U."""

    def tangent_gradient(self, at: At) -> Tensor:
        """Gradient of J(U exp(L − Lᵀ)) at L = 0, shape (D, D)."""

    def curvature(self, at: At) -> Curvature:
        """Diagonal of the negative Hessian in L, and the frame in which it is taken."""


def quasi_newton(
    objective: Problem[At],
    start: Tensor,
    max_iter: int,
    tol: float,
    callback: Callback,
    warm_up: int = WARM_UP,
    memory: Memory | None = None,
    window: int = 10,
) -> Result:
    """Maximise the objective from an orthogonal `start` (D, D), with `warm_up` iterations of the paper's.

    `memory` is that of an earlier run on nearly the same objective, which ended at `start`; it is added to.
    `window` is the number of iterations over which the gain is held against `tol`.
    """
    basis, at = start, objective.evaluate(start)
    gradient = objective.tangent_gradient(at)
    history = [at.value]
    memory = Memory(objective.columns) if memory is None else memory
    since_refresh = 0
    fraction = 1.0  # of the paper's step
    while len(history) <= max_iter:
        if len(history) % REFRESH == 0:
            basis = corrected(basis)
        if len(history) <= warm_up:
            # To first order the paper's U + ∂J/∂U, orthogonalised, is a turn by half of L − Lᵀ.
            trial_basis = turn(basis, gradient * (fraction / 2))
            there = objective.evaluate(trial_basis)
            if there.value < at.value and fraction > SMALLEST_FRACTION:
                fraction /= 2  # a turn by the gradient overshoots where the gradient is large
                continue
            basis, at = trial_basis, there
            gradient = objective.tangent_gradient(at)
        else:
            if since_refresh % REFRESH == 0:
                preconditioner = Preconditioner(objective.curvature(at))
            since_refresh += 1
            step, slope = memory.direction(gradient, preconditioner)
            trial = line_search(objective, basis, at, step, slope)
            if trial is None and memory.pairs:
                memory.pairs.clear()  # the remembered curvature misled: try the preconditioned gradient
                continue
            if trial is None:
                return Result(orthogonalise(basis), history, True, "no step increases the objective further")
            length, basis, at = trial
            previous, gradient = gradient, objective.tangent_gradient(at)
            memory.add(length * step, previous - gradient)
        history.append(at.value)
        callback(at.value)
        # Only quasi-Newton iterations tell: the first ones may creep, or go to and fro.
        if stalled(history[warm_up:], tol, window):
            reason = f"the gain per iteration fell below tol = {tol:g}"
            return Result(orthogonalise(basis), history, True, reason)
    return Result(orthogonalise(basis), history, False, f"max_iter = {max_iter} was reached")


class Preconditioner:
    """Division by the curvature, made positive, in the frame in which it is diagonal."""

    def __init__(self, curvature: Curvature) -> None:
        self.rotations = curvature.rotations
        self.back = [rotation.T for rotation in curvature.rotations]
        largest = float(curvature.diagonal.abs().max())
        self.diagonal = curvature.diagonal.clamp(min=FLOOR * largest if largest > 0 else 1.0)

    def __call__(self, lower: Tensor) -> Tensor:
        """H⁻¹ L, shape (D, D)."""
        return rotate(rotate(lower, self.rotations) / self.diagonal, self.back)


class Memory:
    """The steps and gradient changes of L-BFGS, with the two-loop recursion over them.

    Parameters
    ----------
    columns : list of slice
        Blocks. Only the entries of L below them are kept, as vectors: three eighths of all for four blocks.
    """

    def __init__(self, columns: list[slice]) -> None:
        self.below = [(slice(here.stop, None), here) for here in columns[:-1]]
        #: (step, decrease of the gradient, 1 / their inner product), oldest first.
        self.pairs: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=MEMORY)

    def pack(self, lower: Tensor) -> Tensor:
        """The entries of L (D, D) below the blocks, as a vector."""
        parts = [lower[rows, columns].reshape(-1) for rows, columns in self.below]
        return torch.cat(parts) if parts else lower.new_zeros(0)

    def unpack(self, packed: Tensor, like: Tensor) -> Tensor:
        """L, of the shape of `like`, from its entries below the blocks."""
        lower, first = torch.zeros_like(like), 0
        for rows, columns in self.below:
            part = lower[rows, columns]
            part.copy_(packed[first : first + part.numel()].view(part.shape))
            first += part.numel()
        return lower

    def add(self, step: Tensor, decrease: Tensor) -> None:
        """Remember a step, unless the objective is not concave along it."""
        step, decrease = self.pack(step), self.pack(decrease)
        product = float(step @ decrease)
        if product > 1e-10 * float(decrease @ decrease):
            self.pairs.append((step, decrease, 1 / product))

    def direction(self, gradient: Tensor, preconditioner: Preconditioner) -> tuple[Tensor, float]:
        """Ascent direction L and the slope of J along it."""

        def preconditioned(packed: Tensor) -> Tensor:
            return self.pack(preconditioner(self.unpack(packed, gradient)))

        slopes = self.pack(gradient)
        direction, coefficients = slopes.clone(), []
        for step, decrease, inverse in reversed(self.pairs):
            coefficients.append(float(step @ direction) * inverse)
            direction.sub_(decrease, alpha=coefficients[-1])
        direction = preconditioned(direction)
        if self.pairs:
            _, decrease, inverse = self.pairs[-1]
            direction /= inverse * float(decrease @ preconditioned(decrease))
        for (step, decrease, inverse), coefficient in zip(self.pairs, reversed(coefficients), strict=True):
            direction.add_(step, alpha=coefficient - float(decrease @ direction) * inverse)
        slope = float(slopes @ direction)
        if slope <= 0 and self.pairs:
            self.pairs.clear()
            return self.direction(gradient, preconditioner)
        lower = self.unpack(direction, gradient)
        limit = MAX_ANGLE if self.pairs else FIRST_ANGLE
        shrink = min(1.0, limit / max(largest_angle(lower), 1e-30))
        return lower * shrink, slope * shrink


def line_search(
    objective: Problem[At], basis: Tensor, at: At, step: Tensor, slope: float
) -> tuple[float, Tensor, At] | None:
    """Backtrack from the full step until J gains enough (Armijo); None if no length does."""
    length = 1.0
    for _ in range(15):
        trial = turn(basis, length * step)
        there = objective.evaluate(trial)
        if there.value > at.value and there.value >= at.value + 1e-4 * length * slope:
            return length, trial, there
        # The maximum of the parabola through value, slope and trial value, kept within bounds.
        gained, hoped = there.value - at.value, length * slope
        length *= min(max(hoped / (2 * (hoped - gained)), 0.1), 0.5) if hoped > gained else 0.5
    return None


def rotate(lower: Tensor, rotations: list[Tensor]) -> Tensor:
    """Qᵀ L Q for a block-diagonal Q, given by its blocks, where L is zero on and above the block diagonal."""
    rotated, first = torch.zeros_like(lower), 0
    for rotation in rotations:
        here = slice(first, first + len(rotation))
        # L's columns to the left of this block are rotated already: its rows can follow.
        rotated[here, :first] = rotation.T @ rotated[here, :first]
        rotated[here.stop :, here] = lower[here.stop :, here] @ rotation
        first = here.stop
    return rotated


def turn(basis: Tensor, lower: Tensor) -> Tensor:
    """U·cayley(L − Lᵀ), where cayley(Ω) = (I − Ω/2)⁻¹(I + Ω/2) agrees with exp(Ω) to second order.

    Since I + Ω/2 = 2I − (I − Ω/2), this is 2U(I − Ω/2)⁻¹ − U: one solution and no product.
    """
    half = (lower - lower.T) / 2
    identity = torch.eye(len(half), dtype=half.dtype, device=half.device)
    return 2 * torch.linalg.solve(identity - half, basis, left=False) - basis


def corrected(basis: Tensor) -> Tensor:
    """A Newton step towards orthogonality, which keeps rounding errors of turns from piling up.

    Those of a few turns are of either sign, and change J by much less than the default `tol`.
    """
    return 1.5 * basis - 0.5 * basis @ (basis.T @ basis)


def largest_angle(lower: Tensor, iterations: int = 16) -> float:
    """Spectral norm of L − Lᵀ by power iteration: the largest angle of the turn, from below."""
    skew = lower - lower.T
    vector = skew[:, skew.square().sum(0).argmax()]
    for _ in range(iterations):
        vector = skew @ (vector / vector.norm().clamp(min=1e-30))
    return float(vector.norm())
