"""The DRSA objective and its derivatives (section 4.2): all that touches samples is here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Evaluation:
    """The objective at one U, with what its derivatives need.

    Attributes
    ----------
    value : float
        J(U).
    block_means : tensor, shape (K,)
        m_k = M²_n[R⁺_kn]; zero for a subspace with no positive relevance anywhere.
    activations, contexts : tensor, shape (N, D)
        aU and cU.
    relevance : tensor, shape (N, K)
        R⁺_kn.
    factors : tensor, shape (K,)
        ∂J/∂m_k / (N m_k), so that ∂J/∂R_kn = factors_k · R⁺_kn.
    """

    value: float
    block_means: Tensor
    activations: Tensor
    contexts: Tensor
    relevance: Tensor
    factors: Tensor

    @property
    def weights(self) -> Tensor:
        """∂J/∂R_kn, shape (N, K)."""
        return self.relevance * self.factors


#: Samples from which the diagonal of the Hessian is estimated: it takes products of N×D×D.
CURVATURE_SAMPLES = 2500
#: From so many blocks on, whole products are faster than those of pairs of blocks.
WHOLE_PRODUCTS = 8


@dataclass(frozen=True)
class Curvature:
    """Second derivatives of an objective in a frame where they are nearly diagonal.

    Attributes
    ----------
    rotations : list of tensor
        One orthogonal matrix for each block, the residual included: the frame is UQ, Q their block diagonal.
    diagonal : tensor, shape (D, D)
        −∂²J/∂L_ji² in that frame, below the block diagonal; of any sign.
    """

    rotations: list[Tensor]
    diagonal: Tensor


class Objective:
    """J(U) = M^q_k [ M²_n [ max(0, (U_kᵀa_n)ᵀ(U_kᵀc_n)) ] ] over orthogonal U (D, D).

    M^p is the generalised mean (E[t^p])^(1/p); q = 0 is its limit, the geometric mean. Blocks may leave
    columns of U over: these are the residual, which the objective does not score.

    Parameters
    ----------
    a, c : tensor, shape (N, D)
        Activations and contexts, normalised by the caller.
    dims : sequence of int
        Block sizes, adding up to at most D.
    q : float
        Exponent of the mean over subspaces.
    n_total : int, optional
        What sums over samples are divided by. More than N where others are left out as if they were zero.
    """

    def __init__(
        self, a: Tensor, c: Tensor, dims: Sequence[int], q: float, n_total: int | None = None
    ) -> None:
        self.a, self.c = a, c
        self.q = float(q)
        self.n_samples, self.n_features = a.shape
        self.n_total = self.n_samples if n_total is None else n_total
        self.dims = tuple(dims)
        self.n_subspaces = len(self.dims)
        #: Columns of U that belong to each block, the residual last if there is one.
        self.columns = block_columns(self.dims, self.n_features)
        # (D, K), one where column j belongs to block k: sums over blocks, and spreads over columns.
        self.membership = a.new_zeros(self.n_features, self.n_subspaces)
        for k in range(self.n_subspaces):
            self.membership[self.columns[k], k] = 1

    def of_samples(self, rows: Tensor) -> Objective:
        """The objective if all other samples were zero."""
        return Objective(self.a[rows], self.c[rows], self.dims, self.q, self.n_total)

    def in_directions(self, directions: Tensor, dims: Sequence[int]) -> Objective:
        """The objective in coordinates `directions`ᵀ a, for orthonormal columns (D, r), with other blocks."""
        return Objective(self.a @ directions, self.c @ directions, dims, self.q, self.n_total)

    def evaluate(self, basis: Tensor) -> Evaluation:
        """The objective at U = `basis` (D, D): two products of N×D×D."""
        activations, contexts = self.a @ basis, self.c @ basis
        relevance = ((activations * contexts) @ self.membership).clamp_(min=0)
        value, means, factors = self._from_squares(relevance.square().sum(0))
        return Evaluation(value, means, activations, contexts, relevance, factors)

    def _from_squares(self, squares: Tensor) -> tuple[float, Tensor, Tensor]:
        """J, m_k and the factors of an `Evaluation` from Σ_n (R⁺_kn)², shape (K,)."""
        means = (squares / self.n_total).sqrt()
        value, slopes = generalised_mean(means, self.q)
        # A subspace without positive relevance has no gradient.
        alive = means > 0
        return value, means, torch.where(alive, slopes / torch.where(alive, means * self.n_total, 1), 0)

    def gradient(self, at: Evaluation) -> Tensor:
        """Euclidean gradient ∂J/∂U, shape (D, D): two more products of N×D×D."""
        weights = at.weights @ self.membership.T
        return torch.addmm(self.a.T @ (weights * at.contexts), self.c.T, weights * at.activations)

    def tangent_gradient(self, at: Evaluation) -> Tensor:
        """Gradient of J(U exp(L − Lᵀ)) at L = 0, for L (D, D) that is zero on and above the block diagonal.

        Rotations inside a block leave J as it is, so only pairs of blocks k < l count, and there

            ∂J/∂L_lk = A_lᵀ diag(W_k − W_l) C_k + C_lᵀ diag(W_k − W_l) A_k,

        with A = aU, C = cU and W = ∂J/∂R. It costs (1 − 1/K)/2 of the products of `gradient`. With many
        blocks the products are too small to be fast: then UᵀG is computed, and L is the lower half of
        UᵀG − GᵀU.
        """
        if len(self.columns) >= WHOLE_PRODUCTS:
            weights = at.weights @ self.membership.T
            whole = torch.addmm(
                at.activations.T @ (weights * at.contexts), at.contexts.T, weights * at.activations
            )
            return below_blocks(whole - whole.T, self.columns)
        gradient = self.a.new_zeros(self.n_features, self.n_features)
        weights = self._padded(at.weights)
        for k, here in enumerate(self.columns):
            for l, there in enumerate(self.columns[k + 1 :], start=k + 1):  # noqa: E741 (the paper's letter)
                difference = weights[:, k : k + 1] - weights[:, l : l + 1]
                gradient[there, here] = torch.addmm(
                    at.activations[:, there].T @ (difference * at.contexts[:, here]),
                    at.contexts[:, there].T,
                    difference * at.activations[:, here],
                )
        return gradient

    def curvature(self, at: Evaluation) -> Curvature:
        """Diagonal of the negative Hessian of J in L, in the frame of `inner_rotations`.

        Turning column i of block k towards column j of block l by an angle θ changes R_k by
        θ (A_iC_j + A_jC_i) + θ² (A_jC_j − A_iC_i) and R_l by the negative of that. Hence, with
        T_kj = Σ_n W_kn A_nj C_nj and g_kn = ∂²J/∂R_kn² at fixed m,

            −∂²J/∂L_ji² = 2 (T_ki + T_lj − T_kj − T_li) − Σ_n (g_kn + g_ln) (A_niC_nj + A_njC_ni)².

        What the change of m_k adds, products of its first derivatives, is left out. A part of the samples,
        evenly spread, is enough.
        """
        rotations = self.inner_rotations(at)
        some = slice(None, None, max(1, self.n_samples // CURVATURE_SAMPLES))
        relevance = at.relevance[some]
        factors = at.factors * (self.n_samples / len(relevance))
        activations, contexts = at.activations[some], at.contexts[some]
        return Curvature(rotations, self._diagonal(rotations, activations, contexts, relevance, factors))

    def _diagonal(
        self,
        rotations: list[Tensor],
        activations: Tensor,
        contexts: Tensor,
        relevance: Tensor,
        factors: Tensor,
    ) -> Tensor:
        """The diagonal of `curvature` from some samples, a sum over them."""
        activations = rotate_columns(activations, rotations)
        contexts = rotate_columns(contexts, rotations)
        product = activations * contexts
        spread = ((relevance * factors).T @ product).T @ self.membership.T  # [j, i] = T_{block of i, j}
        own = spread.diagonal()
        result = 2 * (own[:, None] + own[None, :] - spread - spread.T)

        second = ((relevance > 0) * factors) @ self.membership.T
        a_squared, c_squared = activations.square(), contexts.square()
        turned = (second * a_squared).T @ c_squared + (second * c_squared).T @ a_squared
        turned += 2 * (second * product).T @ product
        result -= turned + turned.T
        return result

    def inner_rotations(self, at: Evaluation) -> list[Tensor]:
        """Rotation inside each block that diagonalises A_kᵀ diag(W_k − mean of the other W) C_k + transpose.

        J does not change under rotations inside a block; these make its Hessian as diagonal as it can be.
        """
        return [torch.linalg.eigh(matrix + matrix.T).eigenvectors for matrix in self._contrasts(at)]

    def _contrasts(self, at: Evaluation) -> list[Tensor]:
        """A_kᵀ diag(W_k − mean of the other W) C_k of each block, sums over samples."""
        weights = at.weights
        others = (weights.sum(1, keepdim=True) - weights) / max(1, self.n_subspaces - 1)
        contrast = self._padded(weights - others)
        return [
            at.activations[:, here].T @ (contrast[:, k : k + 1] * at.contexts[:, here])
            for k, here in enumerate(self.columns)
        ]

    def pair_relevance(self) -> Tensor:
        """Relevance a_n·c_n of each pair in the whole space, shape (N,)."""
        return (self.a * self.c).sum(1)

    def moments(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_n w_n a_n a_nᵀ and the same for c in float64, shapes (D, D), for weights (N,)."""
        a, c = (((x * weights[:, None]).T @ x).double() for x in (self.a, self.c))
        return a, c

    def shares(self, at: Evaluation) -> Tensor:
        """What each sample adds to J, shape (N,): J = Σ_n Σ_k W_kn R⁺_kn, since it is homogeneous in R."""
        return (at.weights * at.relevance).sum(1)

    def linearised(self, at: Evaluation, directions: Tensor) -> Tensor:
        """S_k = Σ_n W_kn (x_n y_nᵀ + y_n x_nᵀ) in coordinates x = Vᵀa, y = Vᵀc, shape (blocks, r, r).

        With W held constant, J changes by Σ_k tr(Q_kᵀ S_k Q_k) / 2 if V Q_k is added to block k.
        """
        x, y = self.a @ directions, self.c @ directions
        weights = self._padded(at.weights)
        result = x.new_zeros(len(self.columns), x.shape[1], x.shape[1])
        for k in range(self.n_subspaces):
            rows = weights[:, k].nonzero().flatten()
            matrix = (x[rows] * weights[rows, k : k + 1]).T @ y[rows]
            result[k] = matrix + matrix.T
        return result

    def _padded(self, weights: Tensor) -> Tensor:
        """Weights (N, K) with a column of zeros for the residual, if there is one."""
        return torch.nn.functional.pad(weights, (0, len(self.columns) - self.n_subspaces))


def block_columns(dims: Sequence[int], n_features: int) -> list[slice]:
    """Columns of each block, and of the residual, if there is one, as the last."""
    residual = n_features - sum(dims)
    sizes = (*dims, residual) if residual else tuple(dims)
    stops = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def missing_columns(columns: list[slice], parts: list[Tensor]) -> list[int]:
    """How many columns each part (D, ·) lacks to fill its block."""
    return [here.stop - here.start - part.shape[1] for here, part in zip(columns, parts, strict=True)]


def below_blocks(matrix: Tensor, columns: list[slice]) -> Tensor:
    """A matrix (D, D), in place, with zeros on and above the block diagonal."""
    for here in columns:
        matrix[: here.stop, here] = 0
    return matrix


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
