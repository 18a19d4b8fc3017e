"""The default solver of DRSA: preconditioned L-BFGS on the orthogonal group.

The unknown at U is L, zero on and above the block diagonal, and the trial point is U·cayley(L − Lᵀ). In
these left-trivialised coordinates, steps and gradients of different iterations are compared as they are.
Three things make it faster than plain L-BFGS:

* The preconditioner is the diagonal of the Hessian in L, which is known in closed form.
* J does not change under rotations inside a block. They are chosen so that the Hessian is as diagonal as
  it can be: each block's own second-order matrix is.
* Only pairs of different blocks enter the gradient, three eighths of the products for four blocks.

The first iterations are the paper's own. They decide which of the many local maxima is reached, and long
first steps lead to worse ones; where the paper's step is itself too long to gain, it is halved.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch
from torch import Tensor

from .objective import Evaluation, Objective
from .paper_loop import Callback, Result, orthogonalise, stalled

#: Iterations with the paper's step before the quasi-Newton ones.
#: Chosen, with FLOOR and the default tol, on the reference data of the tests and one VGG16 start: other data
#: may be served better by more, and `n_init` guards against a bad basin.
WARM_UP = 40
#: Where the paper's step overshoots, it is halved down to this part of it.
SMALLEST_FRACTION = 2.0**-10
#: Pairs of steps and gradient changes that L-BFGS remembers.
MEMORY = 20
#: Iterations between updates of the preconditioner and of the bases inside the blocks.
REFRESH = 5
#: Samples from which the part of the preconditioner is estimated that takes products of N×D×D.
CURVATURE_SAMPLES = 2500
#: Smallest curvature, relative to the largest one: directions with less count as flat.
FLOOR = 1e-3
#: Largest angle, in radians, by which one step may turn the basis; the first quasi-Newton step is shorter.
MAX_ANGLE, FIRST_ANGLE = 1.0, 0.1


def quasi_newton(
    objective: Objective, start: Tensor, max_iter: int, tol: float, callback: Callback
) -> Result:
    """Maximise the objective from an orthogonal `start` (D, D)."""
    basis, at = start, objective.evaluate(start)
    gradient = objective.tangent_gradient(at)
    history = [at.value]
    memory = Memory()
    since_refresh = 0
    fraction = 1.0  # of the paper's step
    while len(history) <= max_iter:
        if len(history) <= WARM_UP:
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
                rotations = inner_rotations(objective, at)
                basis = rotate_columns(basis, rotations)
                at = replace(
                    at,
                    activations=rotate_columns(at.activations, rotations),
                    contexts=rotate_columns(at.contexts, rotations),
                )
                gradient = rotate(gradient, rotations)
                memory.rotate(rotations)
                preconditioner = curvature(objective, at)
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
        if stalled(history[WARM_UP:], tol):
            reason = f"the gain per iteration fell below tol = {tol:g}"
            return Result(orthogonalise(basis), history, True, reason)
    return Result(orthogonalise(basis), history, False, f"max_iter = {max_iter} was reached")


class Memory:
    """The steps and gradient changes of L-BFGS, with the two-loop recursion over them."""

    def __init__(self) -> None:
        #: (step, decrease of the gradient, 1 / their inner product), oldest first.
        self.pairs: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=MEMORY)

    def add(self, step: Tensor, decrease: Tensor) -> None:
        """Remember a step, unless the objective is not concave along it."""
        product = float((step * decrease).sum())
        if product > 1e-10 * float(decrease.square().sum()):
            self.pairs.append((step, decrease, 1 / product))

    def rotate(self, rotations: list[Tensor]) -> None:
        """Express everything in new bases inside the blocks."""
        for i, (step, decrease, inverse) in enumerate(self.pairs):
            self.pairs[i] = rotate(step, rotations), rotate(decrease, rotations), inverse

    def direction(self, gradient: Tensor, preconditioner: Tensor) -> tuple[Tensor, float]:
        """Ascent direction L and the slope of J along it."""
        direction, coefficients = gradient.clone(), []
        for step, decrease, inverse in reversed(self.pairs):
            coefficients.append(float((step * direction).sum()) * inverse)
            direction.sub_(decrease, alpha=coefficients[-1])
        direction /= preconditioner
        if self.pairs:
            _, decrease, inverse = self.pairs[-1]
            direction /= inverse * float((decrease.square() / preconditioner).sum())
        for (step, decrease, inverse), coefficient in zip(self.pairs, reversed(coefficients), strict=True):
            direction.add_(step, alpha=coefficient - float((decrease * direction).sum()) * inverse)
        slope = float((gradient * direction).sum())
        if slope <= 0 and self.pairs:
            self.pairs.clear()
            return self.direction(gradient, preconditioner)
        limit = MAX_ANGLE if self.pairs else FIRST_ANGLE
        shrink = min(1.0, limit / max(largest_angle(direction), 1e-30))
        return direction * shrink, slope * shrink


def line_search(
    objective: Objective, basis: Tensor, at: Evaluation, step: Tensor, slope: float
) -> tuple[float, Tensor, Evaluation] | None:
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


def curvature(objective: Objective, at: Evaluation) -> Tensor:
    """Diagonal of the negative Hessian of J in L, made positive, shape (D, D).

    Turning column i of block k towards column j of block l by an angle θ changes R_k by
    θ (A_iC_j + A_jC_i) + θ² (A_jC_j − A_iC_i) and R_l by the negative of that. Hence, with
    T_kj = Σ_n W_kn A_nj C_nj and g_kn = ∂²J/∂R_kn² at fixed m,

        −∂²J/∂L_ji² = 2 (T_ki + T_lj − T_kj − T_li) − Σ_n (g_kn + g_ln) (A_niC_nj + A_njC_ni)².

    What the change of m_k adds, products of its first derivatives, is left out.
    """
    n, membership = objective.n_samples, objective.membership
    activations, contexts = at.activations, at.contexts
    spread = (at.weights.T @ (activations * contexts)).T @ membership.T  # [j, i] = T_{block of i, j}
    own = spread.diagonal()
    result = 2 * (own[:, None] + own[None, :] - spread - spread.T)

    # The second term takes products of N×D×D: a part of the samples, evenly spread, is enough.
    stride = max(1, n // CURVATURE_SAMPLES)
    activations, contexts = activations[::stride], contexts[::stride]
    second = ((at.relevance[::stride] > 0) * (at.factors * n / len(activations))) @ membership.T
    a_squared, c_squared, product = activations.square(), contexts.square(), activations * contexts
    turned = (second * a_squared).T @ c_squared + (second * c_squared).T @ a_squared
    turned += 2 * (second * product).T @ product
    result -= turned + turned.T
    largest = float(result.abs().max())
    return result.clamp_(min=FLOOR * largest if largest > 0 else 1.0)


def inner_rotations(objective: Objective, at: Evaluation) -> list[Tensor]:
    """Rotation inside each block that diagonalises A_kᵀ diag(W_k − mean of the other W) C_k + transpose."""
    weights = at.weights
    others = (weights.sum(1, keepdim=True) - weights) / max(1, objective.n_subspaces - 1)
    contrast = torch.nn.functional.pad(weights - others, (0, len(objective.columns) - objective.n_subspaces))
    rotations = []
    for k, here in enumerate(objective.columns):
        matrix = at.activations[:, here].T @ (contrast[:, k : k + 1] * at.contexts[:, here])
        rotations.append(torch.linalg.eigh(matrix + matrix.T).eigenvectors)
    return rotations


def rotate_columns(matrix: Tensor, rotations: list[Tensor]) -> Tensor:
    """`matrix` @ Q for a block-diagonal Q, given by its blocks."""
    parts = matrix.split([len(rotation) for rotation in rotations], dim=1)
    return torch.cat([part @ rotation for part, rotation in zip(parts, rotations, strict=True)], dim=1)


def rotate(lower: Tensor, rotations: list[Tensor]) -> Tensor:
    """Qᵀ L Q for a block-diagonal Q, given by its blocks."""
    return rotate_columns(rotate_columns(lower, rotations).T, rotations).T


def turn(basis: Tensor, lower: Tensor) -> Tensor:
    """U·cayley(L − Lᵀ), where cayley(Ω) = (I − Ω/2)⁻¹(I + Ω/2) agrees with exp(Ω) to second order.

    One Newton step towards orthogonality keeps rounding errors from piling up.
    """
    half = (lower - lower.T) / 2
    identity = torch.eye(len(half), dtype=half.dtype, device=half.device)
    turned = basis @ torch.linalg.solve(identity - half, identity + half)
    return 1.5 * turned - 0.5 * turned @ (turned.T @ turned)


def largest_angle(lower: Tensor, iterations: int = 8) -> float:
    """Spectral norm of L − Lᵀ by power iteration: the largest angle of the turn, from below."""
    skew = lower - lower.T
    vector = skew[:, skew.square().sum(0).argmax()]
    for _ in range(iterations):
        vector = skew @ (vector / vector.norm().clamp(min=1e-30))
    return float(vector.norm())
