"""The virtual layer a′ = Σ_k U_k U_kᵀ a: contexts, and relevance filtered by block (section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..subspaces import Subspaces


def context_from_relevance(a: Tensor, relevance: Tensor) -> Tensor:
    """Context c = R ⊘ a, and 0 on inactive neurons (section 3.2)."""
    active = a != 0
    return torch.where(active, relevance / torch.where(active, a, 1), 0)


def filter_context(c: Tensor, subspaces: Subspaces, dim: int = 1) -> Tensor:
    """Contexts that pass back through each block, U_k V_kᵀ c.

    Parameters
    ----------
    c : tensor, shape (N, …, D, …)
        Contexts (or plain gradients), features along `dim`.

    Returns
    -------
    tensor, shape (K, N, …, D, …)
        The K parts along a new first axis, each of them contiguous.
    """
    return torch.stack([subspaces.project_context(c, k, dim) for k in range(subspaces.n_subspaces)])


def filter_relevance(a: Tensor, relevance: Tensor, subspaces: Subspaces, dim: int = 1) -> Tensor:
    """Relevance that passes through each block, R⁽ᵏ⁾ = a ⊙ U_k V_kᵀ (R ⊘ a), shape (K, N, …, D, …).

    For complete subspaces the parts add up to R exactly where a ≠ 0.
    """
    return a * filter_context(context_from_relevance(a, relevance), subspaces, dim)
