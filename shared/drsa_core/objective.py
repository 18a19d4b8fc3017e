"""The DRSA objective and its derivatives (section 4.2): all that touches samples is here.

Samples may be spread over ranks. Then every sum over samples is one over all ranks, so that each of them
computes the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .distributed import ALONE, Ranks
from .pairs import balanced


@dataclass(frozen=True)
class Evaluation:
    """The objective at one U, with what its derivatives need."""

    #: J(U).
    value: float
    #: m_k = M²_n[R⁺_kn], (K,); zero for a subspace with no positive relevance anywhere.
    block_means: Tensor
    #: aU and cU, (N, D).
    activations: Tensor
    contexts: Tensor
    #: R⁺_kn, (N, K).
    relevance: Tensor
    #: ∂J/∂m_k / (N m_k), (K,), so that ∂J/∂R_kn = factors_k · R⁺_kn.
    factors: Tensor

    @property
    def weights(self) -> Tensor:
        """∂J/∂R_kn, shape (N, K)."""
        return self.relevance * self.factors


#: Samples from which the diagonal of the Hessian is estimated: it takes products of N×D×D.
CURVATURE_SAMPLES = 2500
#: Smallest curvature, relative to the largest one: directions with less count as flat.
FLOOR = 1e-3
#: From so many blocks on, or in so few dimensions, whole products are faster than those of pairs of blocks.
WHOLE_BLOCKS, WHOLE_DIMENSIONS = 8, 64


@dataclass(frozen=True)
class Curvature:
    """Second derivatives of an objective in a frame UQ, Q block diagonal, where they are nearly diagonal."""

    #: The blocks of Q, that of the residual included.
    rotations: list[Tensor]
    #: −∂²J/∂L_ji² in that frame, below the block diagonal, shape (D, D); of any sign.
    diagonal: Tensor

    def divide(self, lower: Tensor) -> Tensor:
        """H⁻¹ L, shape (D, D), with the diagonal made positive."""
        largest = float(self.diagonal.abs().max())
        positive = self.diagonal.clamp(min=FLOOR * largest if largest > 0 else 1.0)
        back = [rotation.T for rotation in self.rotations]
        return rotate(rotate(lower, self.rotations) / positive, back)


class Objective:
    """J(U) = M^q_k [ M²_n [ max(0, (U_kᵀa_n)ᵀ(U_kᵀc_n)) ] ] over orthogonal U (D, D).

    M^p is the generalised mean (E[t^p])^(1/p); q = 0 is its limit, the geometric mean. Blocks may leave
    columns of U over: these are the residual, which the objective does not score.

    Parameters
    ----------
    a, c : tensor, shape (N, D)
        Activations and contexts of this rank, normalised by the caller.
    dims : sequence of int
        Block sizes, adding up to at most D.
    q : float
        Exponent of the mean over subspaces.
    ranks : Ranks
        Those that hold the other samples.
    n_total : int, optional
        What sums over samples are divided by. More than N where others are left out as if they were zero.
    """

    def __init__(
        self,
        a: Tensor,
        c: Tensor,
        dims: Sequence[int],
        q: float,
        ranks: Ranks = ALONE,
        n_total: int | None = None,
    ) -> None:
        self.a, self.c, self.dims, self.q, self.ranks = a, c, tuple(dims), float(q), ranks
        counts = ranks.all_gather(len(a))
        #: Samples of all ranks, and the number of this rank's first one among them.
        self.n_samples, self.first = sum(counts), sum(counts[: ranks.rank])
        self.n_total = self.n_samples if n_total is None else n_total
        self.n_features, self.n_subspaces = a.shape[1], len(self.dims)
        #: Columns of U that belong to each block, the residual last if there is one.
        self.columns = block_columns(self.dims, self.n_features)
        #: (D, D), true below the block diagonal, where L is not zero.
        self.below = torch.zeros(self.n_features, self.n_features, dtype=torch.bool, device=a.device)
        for here in self.columns:
            self.below[here.stop :, here] = True
        # (D, K), one where column j belongs to block k: sums over blocks, and spreads over columns.
        self.membership = a.new_zeros(self.n_features, self.n_subspaces)
        for k in range(self.n_subspaces):
            self.membership[self.columns[k], k] = 1

    def of_samples(self, rows: Tensor) -> Objective:
        """The objective if all samples but these rows of this rank were zero."""
        return Objective(self.a[rows], self.c[rows], self.dims, self.q, self.ranks, self.n_total)

    def in_directions(self, directions: Tensor, dims: Sequence[int]) -> Objective:
        """The objective in coordinates along orthonormal directions (D, r), with other blocks."""
        return Objective(
            self.a @ directions, self.c @ directions, dims, self.q, self.ranks, n_total=self.n_total
        )

    def evaluate(self, basis: Tensor) -> Evaluation:
        """The objective at U = `basis` (D, D): two products of N×D×D."""
        activations, contexts = self.a @ basis, self.c @ basis
        relevance = ((activations * contexts) @ self.membership).clamp_(min=0)
        means = (self.ranks.sum(relevance.square().sum(0)) / self.n_total).sqrt()
        value, slopes = generalised_mean(means, self.q)
        # A subspace without positive relevance has no gradient.
        alive = means > 0
        factors = torch.where(alive, slopes / torch.where(alive, means * self.n_total, 1), 0)
        return Evaluation(value, means, activations, contexts, relevance, factors)

    def gradient(self, at: Evaluation) -> Tensor:
        """Euclidean gradient ∂J/∂U, shape (D, D): two more products of N×D×D."""
        weights = at.weights @ self.membership.T
        own = torch.addmm(self.a.T @ (weights * at.contexts), self.c.T, weights * at.activations)
        return self.ranks.sum(own)

    def tangent_gradient(self, at: Evaluation) -> Tensor:
        """Gradient of J(U exp(L − Lᵀ)) at L = 0, for L (D, D) that is zero on and above the block diagonal.

        Rotations inside a block leave J unchanged, so only pairs of blocks k < l count, and there

            ∂J/∂L_lk = A_lᵀ diag(W_k − W_l) C_k + C_lᵀ diag(W_k − W_l) A_k,

        with A = aU, C = cU and W = ∂J/∂R. It costs (1 − 1/K)/2 of the products of `gradient`. Where these
        are too small to be fast, UᵀG is computed, and L is the lower half of UᵀG − GᵀU.
        """
        a, c = at.activations, at.contexts
        if len(self.columns) >= WHOLE_BLOCKS or self.n_features <= WHOLE_DIMENSIONS:
            weights = at.weights @ self.membership.T
            whole = torch.addmm(a.T @ (weights * c), c.T, weights * a)
            return self.ranks.sum((whole - whole.T) * self.below)
        gradient = a.new_zeros(self.n_features, self.n_features)
        weights = self._padded(at.weights)
        for k, here in enumerate(self.columns):
            for l, there in enumerate(self.columns[k + 1 :], start=k + 1):  # noqa: E741 (the paper's letter)
                difference = weights[:, k : k + 1] - weights[:, l : l + 1]
                gradient[there, here] = torch.addmm(
                    a[:, there].T @ (difference * c[:, here]), c[:, there].T, difference * a[:, here]
                )
        return self.ranks.sum(gradient)

    def curvature(self, at: Evaluation) -> Curvature:
        """Diagonal of the negative Hessian of J in L, in a frame in which the Hessian is nearly diagonal.

        J does not change under rotations inside a block, so these are free: the frame diagonalises
        A_kᵀ diag(W_k − mean of the other W) C_k + its transpose. Turning column i of block k towards column
        j of block l by an angle θ changes R_k by θ (A_iC_j + A_jC_i) + θ² (A_jC_j − A_iC_i) and R_l by the
        negative of that. Hence, with T_kj = Σ_n W_kn A_nj C_nj and g_kn = ∂²J/∂R_kn² at fixed m,

            −∂²J/∂L_ji² = 2 (T_ki + T_lj − T_kj − T_li) − Σ_n (g_kn + g_ln) (A_niC_nj + A_njC_ni)².

        What the change of m_k adds, products of its first derivatives, is left out. A part of the samples,
        evenly spread, is enough.
        """
        weights = at.weights
        others = (weights.sum(1, keepdim=True) - weights) / max(1, self.n_subspaces - 1)
        contrast = self._padded(weights - others)
        rotations = []
        for k, here in enumerate(self.columns):
            own = at.activations[:, here].T @ (contrast[:, k : k + 1] * at.contexts[:, here])
            rotations.append(torch.linalg.eigh(self.ranks.sum(own + own.T)).eigenvectors)

        stride = max(1, self.n_samples // CURVATURE_SAMPLES)
        some = slice(-self.first % stride, None, stride)  # those whose number over all ranks it divides
        relevance = at.relevance[some]
        factors = at.factors * (self.n_samples / len(range(0, self.n_samples, stride)))
        activations = rotate_columns(at.activations[some], rotations)
        contexts = rotate_columns(at.contexts[some], rotations)
        product = activations * contexts
        spread = ((relevance * factors).T @ product).T @ self.membership.T  # [j, i] = T_{block of i, j}
        on_diagonal = spread.diagonal()
        result = 2 * (on_diagonal[:, None] + on_diagonal[None, :] - spread - spread.T)

        second = ((relevance > 0) * factors) @ self.membership.T
        a_squared, c_squared = activations.square(), contexts.square()
        turned = (second * a_squared).T @ c_squared + (second * c_squared).T @ a_squared
        turned += 2 * (second * product).T @ product
        return Curvature(rotations, self.ranks.sum(result - turned - turned.T))

    def shares(self, at: Evaluation) -> Tensor:
        """What each sample of this rank adds to J = Σ_n Σ_k W_kn R⁺_kn, homogeneous in R; shape (N,)."""
        return (at.weights * at.relevance).sum(1)

    def gains(self, at: Evaluation, directions: Tensor) -> Tensor:
        """What blocks gain from directions v_j (D, r) to first order: Σ_n W_kn (v_jᵀa_n)(v_jᵀc_n), (K, r)."""
        return self.ranks.sum(at.weights.T @ ((self.a @ directions) * (self.c @ directions)))

    def leading_samples(self, weights: Tensor, part: float, fewest: int) -> Tensor:
        """This rank's rows among the largest weights (N,) of all ranks that hold `part` of their sum."""
        ordered, order = self.ranks.rows(weights.double()).sort(descending=True, stable=True)
        count = int((ordered.cumsum(0) < part * ordered.sum()).sum()) + 1
        chosen = order[: max(count, fewest)] - self.first
        return chosen[(chosen >= 0) & (chosen < len(weights))].sort().values

    def leading_directions(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Weights (N,) of this rank's samples, energies (D,), descending, and directions (D, D), if any.

        Samples are weighted by the square of their positive relevance max(0, a·c), which is what each adds to
        J² for a single subspace. Directions are the eigenvectors of E[w aaᵀ]/E[w ‖a‖²] + the same for c.
        """
        weights = (self.a * self.c).sum(1).clamp_(min=0).double().square()
        total = self.ranks.sum(weights.sum())
        if not total:
            return None
        weights = (weights / total).to(self.a)
        moments = [self.ranks.sum(((x * weights[:, None]).T @ x).double()) for x in (self.a, self.c)]
        values, vectors = torch.linalg.eigh(moments[0] / moments[0].trace() + moments[1] / moments[1].trace())
        return weights, values.flip(0).clamp_(min=0), vectors.flip(1).to(self.a)

    def _padded(self, weights: Tensor) -> Tensor:
        """Weights (N, K) with a column of zeros for the residual, if there is one."""
        return torch.nn.functional.pad(weights, (0, len(self.columns) - self.n_subspaces))


def prepared(a: Tensor, c: Tensor, balance: float, ranks: Ranks = ALONE) -> tuple[Tensor, Tensor]:
    """Pairs of this rank as the objective takes them: balanced, and normalised over all ranks (Note E)."""
    a, c = normalised(a, ranks), normalised(c, ranks)
    if not balance:
        return a, c
    a, c = balanced(a, c, balance)
    return normalised(a, ranks), normalised(c, ranks)


def normalised(x: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """x / (D^¼ · sqrt(E_ij[x_ij²])) for this rank's rows (N, D) and the mean over all ranks (Note E)."""
    largest = max(ranks.all_gather(float(x.abs().amax()) if x.numel() else 0.0))
    if not largest:
        raise ValueError("cannot normalise vectors that are all zero")
    n_numbers = sum(ranks.all_gather(x.numel()))
    # Squares relative to the largest number stay in range.
    square = ranks.sum((x / largest).double().square().sum())
    return x / largest / float((square / n_numbers).sqrt() * x.shape[1] ** 0.25)


def block_columns(dims: Sequence[int], n_features: int) -> list[slice]:
    """Columns of each block, and of the residual, if there is one, as the last."""
    residual = n_features - sum(dims)
    columns, first = [], 0
    for size in (*dims, residual) if residual else dims:
        columns.append(slice(first, first + size))
        first += size
    return columns


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


def rotate_columns(matrix: Tensor, rotations: list[Tensor]) -> Tensor:
    """`matrix` @ Q for a block-diagonal Q, given by its blocks."""
    parts = matrix.split([len(rotation) for rotation in rotations], dim=1)
    return torch.cat([part @ rotation for part, rotation in zip(parts, rotations, strict=True)], dim=1)


def generalised_mean(values: Tensor, q: float) -> tuple[float, Tensor]:
    """M^q of non-negative values, and its derivative by each of them.

    For q ≤ 0 the mean is 0 as soon as one value is 0. Values of 0 get the derivative 0.
    """
    positive = values > 0
    if not positive.any() or (q <= 0 and not positive.all()):
        return 0.0, torch.zeros_like(values)
    # In logarithms relative to the value that counts most, so that neither large |q| overflows nor small |q|
    # loses its digits; in float64, which costs nothing for K numbers.
    scale = values.max() if q >= 0 else values.min()
    logs = torch.where(positive, values.double() / scale.double(), 1).log()
    if q == 0:
        log_mean = logs.mean()
    else:
        log_mean = torch.log1p(torch.where(positive, torch.expm1(q * logs), -1).mean()) / q
    slopes = torch.exp((1 - q) * (log_mean - logs)) / len(values)
    value = float(scale.double() * log_mean.exp())
    return value, torch.where(positive, slopes, 0).to(values.dtype)
