"""The DRSA objective and its gradients (section 4.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Evaluation:
    """The objective at one U, with what its gradient needs.

    Attributes
    ----------
    value : float
        J(U).
    block_means : tensor, shape (K,)
        m_k = M²_n[R⁺_kn]; zero for a subspace with no positive relevance anywhere.
    rotated : tensor, shape (2N, D)
        aU above cU.
    weights : tensor, shape (N, K)
        ∂J/∂R_kn.
    """

    value: float
    block_means: Tensor
    rotated: Tensor
    weights: Tensor


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
        self.stacked = torch.cat([a, c])  # one matrix product rotates both
        self.dims = tuple(dims)
        self.q = q
        self.n_samples, self.n_features = a.shape
        residual = self.n_features - sum(self.dims)
        self.blocks = (*self.dims, residual) if residual else self.dims
        # (D, K): sums the columns of each block.
        self.membership = torch.block_diag(*[a.new_ones(d, 1) for d in self.dims])
        self.membership = torch.cat([self.membership, a.new_zeros(residual, len(self.dims))])

    def subsample(self, rows: Tensor) -> Objective:
        """The same objective on some of the samples."""
        a, c = self.stacked.split(self.n_samples)
        return Objective(a[rows], c[rows], self.dims, self.q)

    def evaluate(self, basis: Tensor) -> Evaluation:
        """The objective at U = `basis` (D, D): two products of N×D×D."""
        rotated = self.stacked @ basis
        activations, contexts = rotated.split(self.n_samples)
        relevance = ((activations * contexts) @ self.membership).clamp_(min=0)
        means = relevance.square().mean(0).sqrt()
        value, slope = generalised_mean(means, self.q)
        # dJ/dR_kn = dJ/dm_k · R⁺_kn / (N m_k); a subspace without positive relevance has no gradient.
        alive = means > 0
        factor = torch.where(alive, slope / torch.where(alive, means * self.n_samples, 1), 0)
        return Evaluation(value, means, rotated, relevance * factor)

    def gradient(self, at: Evaluation) -> Tensor:
        """Euclidean gradient ∂J/∂U, shape (D, D): two more products."""
        activations, contexts = at.rotated.split(self.n_samples)
        weights = at.weights @ self.membership.T
        weighted = torch.cat([weights * contexts, weights * activations])
        return self.stacked.T @ weighted

    def tangent_gradient(self, at: Evaluation) -> Tensor:
        """Gradient in left-trivialised coordinates, shape (D, D), zero outside the blocks below the diagonal.

        With L block-lower-triangular, it is the gradient of J(U exp(L − Lᵀ)) at L = 0. Rotations inside a
        block leave J as it is, so only pairs of blocks k < l count, and there

            ∂J/∂L_lk = A_lᵀ diag(W_k − W_l) C_k + C_lᵀ diag(W_k − W_l) A_k,     A = aU, C = cU,

        which costs (1 − 1/K)/2 of the Euclidean gradient's products.
        """
        gradient = at.rotated.new_zeros(self.n_features, self.n_features)
        n = self.n_samples
        start = 0
        for k, size in enumerate(self.blocks[:-1]):
            stop = start + size
            difference = at.weights[:, k : k + 1] - (at.weights @ self.membership[stop:].T)
            below = at.rotated[:, stop:].view(2, n, -1) * difference
            here = at.rotated[:, start:stop].view(2, n, -1).flip(0)
            torch.mm(below.view(2 * n, -1).T, here.view(2 * n, -1), out=gradient[stop:, start:stop])
            start = stop
        return gradient


def generalised_mean(values: Tensor, q: float) -> tuple[float, Tensor]:
    """M^q of non-negative values, and its derivative by each of them.

    For q ≤ 0 the mean is 0 as soon as one value is 0. Values of 0 get the derivative 0.
    """
    positive = values > 0
    if not positive.any() or (q <= 0 and not positive.all()):
        return 0.0, torch.zeros_like(values)
    # Relative to the largest value, so that large |q| neither overflows nor underflows.
    scale = values.max()
    ratio = torch.where(positive, values / scale, 1)
    if q == 0:
        mean = torch.exp(torch.log(ratio).mean())
        slope = mean / (len(values) * ratio)
    else:
        powers = torch.where(positive, ratio**q, 0)
        mean = powers.mean() ** (1 / q)
        slope = mean ** (1 - q) * ratio ** (q - 1) / len(values)
    value = float(scale * mean)
    if not math.isfinite(value):
        raise ValueError(f"the generalised mean with q = {q} is not finite; choose a q of smaller modulus")
    return value, torch.where(positive, slope, 0)
