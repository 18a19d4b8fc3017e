"""Sharing out directions among blocks: a quadratic problem on the orthogonal group, without samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .objective import Curvature, below_blocks, block_columns, rotate_columns
from .quasi_newton import quasi_newton

#: The result is only a start: a few iterations are enough.
MAX_ITER, TOL = 10, 1e-3


@dataclass(frozen=True)
class QuadraticPoint:
    """The quadratic objective at Q: its value, Q, and the columns S_k Q_k next to each other, (n, n)."""

    value: float
    basis: Tensor
    images: Tensor


class Quadratic:
    """½ Σ_k tr(Q_kᵀ S_k Q_k) over orthogonal Q (n, n), a `Problem` of the quasi-Newton solver.

    Parameters
    ----------
    matrices : tensor, shape (K, n, n)
        Symmetric S_k.
    dims : sequence of int
        Block sizes of at least 1 that add up to n.
    """

    def __init__(self, matrices: Tensor, dims: Sequence[int]) -> None:
        self.matrices, self.columns = matrices, block_columns(dims, matrices.shape[1])
        self.total = matrices.sum(0)

    def evaluate(self, basis: Tensor) -> QuadraticPoint:
        """The objective at Q."""
        images = torch.cat(
            [matrix @ basis[:, here] for matrix, here in zip(self.matrices, self.columns, strict=True)], dim=1
        )
        return QuadraticPoint(float((basis * images).sum()) / 2, basis, images)

    def tangent_gradient(self, at: QuadraticPoint) -> Tensor:
        """∂/∂L_lk = Q_lᵀ (S_k − S_l) Q_k."""
        product = at.basis.T @ at.images
        return below_blocks(product - product.T, self.columns)

    def curvature(self, at: QuadraticPoint) -> Curvature:
        """−∂²/∂L_ji² = s_ki + s_lj − s_kj − s_li with s_kj = Q_jᵀ S_k Q_j, as for the DRSA objective."""
        rotations = []
        for k, here in enumerate(self.columns):
            own = at.basis[:, here]
            others = (self.total - self.matrices[k]) / max(1, len(self.columns) - 1)
            contrast = own.T @ at.images[:, here] - own.T @ others @ own
            rotations.append(torch.linalg.eigh((contrast + contrast.T) / 2).eigenvectors)
        basis = rotate_columns(at.basis, rotations)
        scores = torch.stack([(basis * (matrix @ basis)).sum(0) for matrix in self.matrices])  # [k, j] = s_kj
        sizes = torch.tensor([here.stop - here.start for here in self.columns], device=scores.device)
        spread = scores.repeat_interleave(sizes, dim=0).T  # [j, i] = s_{block of i, j}
        own_scores = spread.diagonal()
        diagonal = own_scores[:, None] + own_scores[None, :] - spread - spread.T
        return Curvature(rotations, diagonal)


def share_out(matrices: Tensor, sizes: Sequence[int]) -> Tensor:
    """Orthogonal Q (n, n), in blocks of the given sizes, for which Σ_k tr(Q_kᵀ S_k Q_k) is large.

    Parameters
    ----------
    matrices : tensor, shape (K, n, n)
        Symmetric S_k, one for each size.
    sizes : sequence of int
        They add up to n; some may be zero.
    """
    used = [k for k, size in enumerate(sizes) if size]
    problem = Quadratic(matrices[used], [sizes[k] for k in used])
    start = torch.eye(matrices.shape[1], dtype=matrices.dtype, device=matrices.device)
    return quasi_newton(problem, start, MAX_ITER, TOL, lambda _: None, warm_up=0).basis
