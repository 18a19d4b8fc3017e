"""Scores of concept maps that need no network: total relevance, separability, peakness (Note F.1).

The features p = 1 … P of Note F are pixels here: relevance is summed over colour channels first.
"""

from __future__ import annotations

from torch import Tensor

from .patches import check_maps


def total_relevance(maps: Tensor) -> Tensor:
    """Σ_p R_pk, shape (N, K): for a single subspace U the total relevance that PRCA maximises (Note F.1).

    For Shapley values and Integrated Gradients it is known without maps (Note B.3):
    `DisentangledAttribution.exact_totals`.

    Parameters
    ----------
    maps : tensor, shape (N, K, C, H, W)
        `token_maps` (N, K, h, w) as `token_maps[:, :, None]`, one map (N, C, H, W) as `maps[:, None]`.
    """
    return _pixels(maps).sum(2)


def separability(maps: Tensor) -> Tensor:
    """Σ_p max_k R_pk − max_k Σ_p R_pk, shape (N,). 0 if one concept is the largest everywhere, e.g. K = 1.

    Parameters
    ----------
    maps : tensor, shape (N, K, C, H, W)
        `token_maps` (N, K, h, w) as `token_maps[:, :, None]`, one map (N, C, H, W) as `maps[:, None]`.
    """
    pixels = _pixels(maps)
    return pixels.amax(1).sum(1) - pixels.sum(2).amax(1)


def peakness(maps: Tensor) -> Tensor:
    """Σ_k max_p R_pk, shape (N,).

    Parameters
    ----------
    maps : tensor, shape (N, K, C, H, W)
        `token_maps` (N, K, h, w) as `token_maps[:, :, None]`, one map (N, C, H, W) as `maps[:, None]`.
    """
    return _pixels(maps).amax(2).sum(1)


def _pixels(maps: Tensor) -> Tensor:
    """Relevance (N, K, P) in float64: sums over 50 000 pixels need the digits."""
    return check_maps(maps).double().sum(2).flatten(2)
