"""The DRSA objective and its derivatives (section 4.2)."""

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
    """

    def __init__(self, a: Tensor, c: Tensor, dims: Sequence[int], q: float) -> None:
        self.a, self.c = a, c
        self.q = float(q)
        self.n_samples, self.n_features = a.shape
        self.dims = tuple(dims)
        residual = self.n_features - sum(self.dims)
        self.n_subspaces = len(self.dims)
        sizes = (*self.dims, residual) if residual else self.dims
        stops = torch.tensor(sizes).cumsum(0).tolist()
        #: Columns of U that belong to each block, the residual last if there is one.
        self.columns = [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
        # (D, K), one where column j belongs to block k: sums over blocks, and spreads over columns.
        self.membership = a.new_zeros(self.n_features, self.n_subspaces)
        for k in range(self.n_subspaces):
            self.membership[self.columns[k], k] = 1

    def evaluate(self, basis: Tensor) -> Evaluation:
        """The objective at U = `basis` (D, D): two products of N×D×D."""
        activations, contexts = self.a @ basis, self.c @ basis
        relevance = ((activations * contexts) @ self.membership).clamp_(min=0)
        means = relevance.square().mean(0).sqrt()
        value, slopes = generalised_mean(means, self.q)
        # A subspace without positive relevance has no gradient.
        alive = means > 0
        factors = torch.where(alive, slopes / torch.where(alive, means * self.n_samples, 1), 0)
        return Evaluation(value, means, activations, contexts, relevance, factors)

    def gradient(self, at: Evaluation) -> Tensor:
        """Euclidean gradient ∂J/∂U, shape (D, D): two more products of N×D×D."""
        weights = at.weights @ self.membership.T
        return torch.addmm(self.a.T @ (weights * at.contexts), self.c.T, weights * at.activations)

    def tangent_gradient(self, at: Evaluation) -> Tensor:
        """Gradient of J(U exp(L − Lᵀ)) at L = 0, for L (D, D) that is zero on and above the block diagonal.

        Rotations inside a block leave J as it is, so only pairs of blocks k < l count, and there

            ∂J/∂L_lk = A_lᵀ diag(W_k − W_l) C_k + C_lᵀ diag(W_k − W_l) A_k,

        with A = aU, C = cU and W = ∂J/∂R. It costs (1 − 1/K)/2 of the products of `gradient`.
        """
        gradient = self.a.new_zeros(self.n_features, self.n_features)
        # The residual, if there is one, is a block of weight zero.
        weights = torch.nn.functional.pad(at.weights, (0, len(self.columns) - self.n_subspaces))
        for k, here in enumerate(self.columns):
            for l, there in enumerate(self.columns[k + 1 :], start=k + 1):  # noqa: E741 (the paper's letter)
                difference = weights[:, k : k + 1] - weights[:, l : l + 1]
                gradient[there, here] = torch.addmm(
                    at.activations[:, there].T @ (difference * at.contexts[:, here]),
                    at.contexts[:, there].T,
                    difference * at.activations[:, here],
                )
        return gradient


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
