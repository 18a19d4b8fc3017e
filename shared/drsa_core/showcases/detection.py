"""Detecting Clever Hans strategies: rectified relevance, ROC curves, and the baseline SpRAy (Note J.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from scipy.cluster.vq import ClusterError, kmeans2, vq
from torch import Tensor

from ..checks import ArrayLike, Seed, as_float_tensor, as_int, as_seed, check_finite, unit_rows
from ..solvers.estimator import NotFittedError


def rectified_relevance(relevance: Tensor) -> Tensor:
    """How much each concept counts for the class, shape (N, K): the paper's detection score (Note J.1).

    Parameters
    ----------
    relevance : tensor, shape (N, K), (N, K, H, W) or (N, K, C, H, W)
        Relevance of the concepts, as totals R_k or as maps. Colour channels are summed first, so that what
        is rectified is the relevance of a pixel: Σ_p max(0, R_pk).
    """
    relevance = as_float_tensor(relevance, "relevance")
    if relevance.ndim not in {2, 4, 5} or 0 in relevance.shape:
        raise ValueError(
            f"relevance must have shape (N, K), (N, K, H, W) or (N, K, C, H, W), got {tuple(relevance.shape)}"
        )
    check_finite(relevance, "relevance")
    if relevance.ndim == 5:
        relevance = relevance.sum(2)
    return relevance.clamp(min=0).flatten(2).sum(2) if relevance.ndim > 2 else relevance.clamp(min=0)


@dataclass(frozen=True)
class RocCurve:
    """A receiver operating characteristic, from "nothing is flagged" (0, 0) to "all is" (1, 1)."""

    false_positive_rate: Tensor
    """Share of the negatives with a score of at least the threshold, shape (T,)."""
    true_positive_rate: Tensor
    """Share of the positives with a score of at least the threshold, shape (T,)."""
    thresholds: Tensor
    """Infinity, then the different scores from high to low, shape (T,)."""

    @property
    def auroc(self) -> float:
        """Area under the curve: the chance that a positive outscores a negative, ties counting half."""
        return float(torch.trapezoid(self.true_positive_rate, self.false_positive_rate))


def roc_curve(scores: ArrayLike, labels: ArrayLike) -> RocCurve:
    """The ROC curve of a score.

    Parameters
    ----------
    scores : array or tensor, shape (N,)
        High for what is to be detected.
    labels : array or tensor of bool or 0 and 1, shape (N,)
        What is there.
    """
    scores = as_float_tensor(scores, "scores").double().cpu()
    if isinstance(labels, np.ma.MaskedArray):
        raise TypeError("labels must not be a masked array; drop the masked entries, or fill them")
    positive = torch.as_tensor(labels).cpu()
    if scores.ndim != 1 or positive.shape != scores.shape:
        raise ValueError(
            f"scores and labels must have one shape (N,), got {tuple(scores.shape)} and "
            f"{tuple(positive.shape)}; take one column of the scores at a time"
        )
    check_finite(scores, "scores")
    if not ((positive == 0) | (positive == 1)).all():
        raise ValueError(f"labels must be bool, or 0 and 1, got {positive.unique().tolist()[:5]}")
    positive = positive.bool()
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if not n_positive or not n_negative:
        raise ValueError(
            f"labels must hold both kinds, got {n_positive} positives and {n_negative} negatives"
        )
    order = scores.argsort(descending=True)
    scores, positive = scores[order], positive[order]
    # Equal scores pass a threshold together: only the last of each run is a point of the curve.
    last = torch.cat([scores[1:] != scores[:-1], torch.tensor([True])])
    zero = torch.zeros(1, dtype=torch.float64)
    return RocCurve(
        torch.cat([zero, (~positive).double().cumsum(0)[last] / n_negative]),
        torch.cat([zero, positive.double().cumsum(0)[last] / n_positive]),
        torch.cat([zero + torch.inf, scores[last]]),
    )


def auroc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Area under the ROC curve of a score; arguments as in `roc_curve`."""
    return roc_curve(scores, labels).auroc


class SpRAy:
    """Clusters of standard heatmaps, with k-means as in Note J.1.

    Parameters
    ----------
    n_clusters : int
        Number of clusters; the paper takes as many as DRSA has subspaces.
    pool : int
        Side of the squares over which maps are summed; those at the right and lower edge may be smaller.
    n_init : int
        Random starts of k-means; the one with the smallest sum of squared distances is kept.
    max_iter : int
        Iterations of each start.
    random_state : int, optional
        Seed of the starts.

    Attributes
    ----------
    centres_ : tensor, shape (n_clusters, n_squares)
    labels_ : tensor of int, shape (N,)
        Cluster of each map.
    inertia_ : float
        Sum of squared distances of the maps to their centres.
    """

    def __init__(
        self,
        n_clusters: int = 4,
        pool: int = 8,
        n_init: int = 10,
        max_iter: int = 100,
        random_state: Seed = None,
    ) -> None:
        self.n_clusters = as_int(n_clusters, "n_clusters", 1)
        self.pool = as_int(pool, "pool", 1)
        self.n_init = as_int(n_init, "n_init", 1)
        self.max_iter = as_int(max_iter, "max_iter", 1)
        self.random_state = as_seed(random_state)

    def fit(self, maps: Tensor) -> Self:
        """Find the clusters of maps (N, H, W) or (N, C, H, W)."""
        features = self.features(maps).numpy()
        if len(features) < self.n_clusters:
            raise ValueError(
                f"{self.n_clusters} clusters need at least as many maps, got {len(features)}; give more maps "
                "or ask for fewer clusters"
            )
        generator = np.random.default_rng(self.random_state)
        self.inertia_ = np.inf
        for _ in range(self.n_init):
            start = features[generator.choice(len(features), self.n_clusters, replace=False)]
            try:
                centres, _ = kmeans2(features, start, self.max_iter, minit="matrix", missing="raise")
            except ClusterError:  # a cluster lost its last map: this start leads nowhere
                continue
            labels = vq(features, centres)[0]  # those of kmeans2 are of the centres before its last step
            inertia = float(np.square(features - centres[labels]).sum())
            if inertia < self.inertia_:
                self.inertia_ = inertia
                self.centres_, self.labels_ = torch.as_tensor(centres), torch.as_tensor(labels).long()
        if not np.isfinite(self.inertia_):
            raise ValueError(
                f"none of {self.n_init} starts kept {self.n_clusters} clusters filled: the maps are too much "
                "alike; ask for fewer clusters"
            )
        return self

    def distances(self, maps: Tensor) -> Tensor:
        """Distance of each map to each centre, shape (N, n_clusters): the test statistics of Note J.1."""
        if not hasattr(self, "centres_"):
            raise NotFittedError("SpRAy is not fitted; call fit(maps) first")
        features = self.features(maps)
        if features.shape[1] != self.centres_.shape[1]:
            raise ValueError(
                f"maps must have the size of those in fit, {self.centres_.shape[1]} squares of {self.pool} × "
                f"{self.pool} pixels, got {features.shape[1]}"
            )
        return torch.cdist(features, self.centres_, compute_mode="donot_use_mm_for_euclid_dist")

    def features(self, maps: Tensor) -> Tensor:
        """Maps after sum-pooling, rectification and ℓ2 normalisation, shape (N, n_squares), on the CPU.

        A map without a positive square stays zero.
        """
        maps = as_float_tensor(maps, "maps").double().cpu()
        if maps.ndim not in {3, 4} or 0 in maps.shape:
            raise ValueError(f"maps must have shape (N, H, W) or (N, C, H, W), got {tuple(maps.shape)}")
        if min(maps.shape[-2:]) < self.pool:
            raise ValueError(
                f"maps must be at least pool = {self.pool} pixels high and wide, got {tuple(maps.shape[-2:])}"
            )
        check_finite(maps, "maps")
        if maps.ndim == 4:
            maps = maps.sum(1)
        # Up to the edge, also where the squares do not divide the map: sums of what is there.
        pooled = torch.nn.functional.avg_pool2d(maps[:, None], self.pool, ceil_mode=True, divisor_override=1)
        rectified = pooled.clamp(min=0).flatten(1)
        return unit_rows(rectified)
