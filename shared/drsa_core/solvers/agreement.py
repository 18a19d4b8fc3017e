"""Do two fits find the same concepts? Concepts matched one to one by the relevance that they hold.

Blocks of D/K dimensions hold many directions in which nothing happens, and two fits share them out at random.
Overlap of the subspaces therefore understates how far two fits agree. What a concept says about the data is
its relevance R_k at each pair, and this is what is compared here.
"""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def correlations(first: Tensor, second: Tensor) -> Tensor:
    """Pearson correlation over pairs of the positive relevance of all concepts of two fits, shape (K, L).

    Parameters
    ----------
    first, second : tensor, shapes (N, K) and (N, L)
        R_k and R_l at the same N pairs. A concept that is the same everywhere has the correlation 0.
    """
    x, y = (_standardised(relevance) for relevance in (first, second))
    return (x.T @ y).clamp(-1, 1)


def match(first: Tensor, second: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """For each concept of the first fit its partner in the second, one to one, and their correlation.

    The sum of the correlations is the largest that there is. Both fits have the same number of concepts.

    Returns
    -------
    tuple of K int, tensor of float64, shape (K,)
    """
    return match_by(correlations(first, second))


def match_by(similarity: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """As `match`, from the matrix (K, K) of correlations."""
    rows, columns = linear_sum_assignment(similarity.cpu().numpy(), maximize=True)
    return tuple(columns.tolist()), similarity.cpu()[rows, columns]


def _standardised(relevance: Tensor) -> Tensor:
    positive = relevance.double().clamp(min=0)
    centred = positive - positive.mean(0)
    length = centred.norm(dim=0)
    # What is the same everywhere differs from its mean by rounding, which correlates with itself.
    varies = length > 1e-12 * positive.norm(dim=0)
    return torch.where(varies, centred / torch.where(varies, length, 1), 0)
