"""Showcase 1, Clever Hans: detect a spurious strategy and measure what it does (section 6.1, Note J.1).

    scores = rectified_relevance(maps)                              # detect: one score for each concept
    auroc(scores[:, k], has_watermark)                              # against SpRAy(...).distances(heatmaps)
    images, poisoned = poison(images, labels, [watermark], 0.25, spare=target)              # measure
    confusion_matrix(labels, refined(images).argmax(1), n_classes)

`drsa_core.refine` takes the strategy out of the model. `deep_feature_reweighting` is the method to compare
with: it trains the last layer anew on poisoned images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from drsa_core import NotFittedError
from drsa_core.checks import (
    ArrayLike,
    Seed,
    as_float,
    as_float_tensor,
    as_int,
    as_int_labels,
    as_seed,
    check_finite,
    check_matrix,
    unit_rows,
)
from scipy.cluster.vq import ClusterError, kmeans2, vq
from scipy.optimize import minimize
from torch import Tensor, nn


def poison(
    images: Tensor,
    labels: Tensor,
    watermarks: Sequence[Callable[[Tensor], Tensor]],
    rate: float,
    spare: int,
    random_state: Seed = None,
) -> tuple[Tensor, Tensor]:
    """Put a random watermark on a share of the images of all classes but one (Note J.1).

    Parameters
    ----------
    images : tensor, shape (N, C, H, W)
    labels : tensor of int, shape (N,)
    watermarks : sequence of callables
        Functions from an image (C, H, W) to the image with a watermark; one is drawn for each image.
    rate : float
        Share of the images outside the class `spare` that get one, between 0 and 1.
    spare : int
        The class that uses the watermark: none of its images is touched.
    random_state : int, optional
        Seed of the choice of images and watermarks.

    Returns
    -------
    images : tensor, shape (N, C, H, W)
        A copy.
    poisoned : tensor of bool, shape (N,)
    """
    if images.ndim != 4:
        raise ValueError(f"images must have shape (N, C, H, W), got {tuple(images.shape)}")
    check_finite(images, "images")
    labels = as_int_labels(labels, len(images), "image")
    spare, rate = as_int(spare, "spare"), as_float(rate, "rate (25 % is 0.25)", 0, 1)
    if not watermarks:
        raise ValueError("watermarks must hold at least one function from image to image")
    generator = torch.Generator()
    generator.manual_seed(
        generator.seed() if random_state is None else as_int(random_state, "random_state", 0)
    )
    candidates = (labels != spare).nonzero()[:, 0]
    chosen = candidates[torch.randperm(len(candidates), generator=generator)[: round(rate * len(candidates))]]
    images, poisoned = images.clone(), torch.zeros(len(images), dtype=torch.bool)
    for n in chosen.tolist():
        watermark = watermarks[int(torch.randint(len(watermarks), (), generator=generator))]
        images[n] = watermark(images[n])
    poisoned[chosen] = True
    return images, poisoned


def confusion_matrix(labels: Tensor, predicted: Tensor, n_classes: int) -> Tensor:
    """Number of images of class i (row) predicted as class j (column), shape (n_classes, n_classes)."""
    n_classes = as_int(n_classes, "n_classes", 1)
    for name, value in (("labels", labels), ("predicted", predicted)):
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"{name} must not be a masked array; drop the masked entries, or fill them")
    labels, predicted = torch.as_tensor(labels).cpu(), torch.as_tensor(predicted).cpu()
    if labels.ndim != 1 or labels.shape != predicted.shape:
        raise ValueError(
            f"labels and predicted must have one shape (N,), got {tuple(labels.shape)} and "
            f"{tuple(predicted.shape)}"
        )
    for name, value in (("labels", labels), ("predicted", predicted)):
        # As signed numbers: torch does not compare unsigned ones.
        if value.is_floating_point() or not ((value.long() >= 0) & (value.long() < n_classes)).all():
            raise ValueError(f"{name} must be integers between 0 and n_classes − 1 = {n_classes - 1}")
    return torch.bincount(labels.long() * n_classes + predicted.long(), minlength=n_classes**2).view(
        n_classes, n_classes
    )


def ranks(outputs: Tensor, target: int) -> Tensor:
    """Rank of a class among the outputs (N, n_outputs) of each image, shape (N,); 1 is the prediction."""
    target, outputs = as_int(target, "target"), as_float_tensor(outputs, "outputs")
    if outputs.ndim != 2 or not 0 <= target < outputs.shape[1]:
        raise ValueError(
            f"outputs must have shape (N, n_outputs) with more than target = {target} of them, got "
            f"{tuple(outputs.shape)}"
        )
    check_finite(outputs, "outputs")
    return 1 + (outputs > outputs[:, target, None]).sum(1)


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


#: Weight decays to choose from, as in Note J.1.
WEIGHT_DECAYS = tuple(10.0**exponent for exponent in range(-3, 5))


def train_last_layer(
    features: Tensor, labels: Tensor, n_classes: int, weight_decay: float = 1.0, max_iter: int = 1000
) -> nn.Linear:
    """The linear layer that minimises Σ_n cross-entropy + weight_decay/2 · ‖W‖², biases without decay.

    The problem is convex and solved from W = 0 by L-BFGS in float64, so that no seed matters.

    Parameters
    ----------
    features : tensor, shape (N, D)
        What the last layer of the model sees.
    labels : tensor of int, shape (N,)
        Classes from 0 to n_classes − 1.
    """
    n_classes, max_iter = as_int(n_classes, "n_classes", 1), as_int(max_iter, "max_iter", 1)
    data, labels = _checked_features(features, labels, n_classes)
    weight_decay = as_float(weight_decay, "weight_decay", 0)
    double = data.double().cpu()
    shape = (n_classes, double.shape[1] + 1)

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = torch.as_tensor(flat).view(shape)
        log_probability = (double @ weights[:, :-1].T + weights[:, -1]).log_softmax(1)
        value = -log_probability[torch.arange(len(labels)), labels].sum()
        error = log_probability.exp()
        error[torch.arange(len(labels)), labels] -= 1
        gradient = torch.cat([error.T @ double + weight_decay * weights[:, :-1], error.sum(0)[:, None]], 1)
        value = value + weight_decay / 2 * weights[:, :-1].square().sum()
        return float(value), gradient.flatten().numpy()

    options = {"maxiter": max_iter, "maxfun": 2 * max_iter, "ftol": 1e-12, "gtol": 1e-6}
    found = torch.as_tensor(
        minimize(loss, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options=options).x
    )
    layer = nn.utils.skip_init(nn.Linear, shape[1] - 1, n_classes)  # without a draw from the global generator
    with torch.no_grad():
        layer.weight.copy_(found.view(shape)[:, :-1])
        layer.bias.copy_(found.view(shape)[:, -1])
    return layer.to(data)


def deep_feature_reweighting(
    features: Tensor,
    labels: Tensor,
    held_out_features: Tensor,
    held_out_labels: Tensor,
    n_classes: int,
    weight_decays: Sequence[float] = WEIGHT_DECAYS,
) -> tuple[nn.Linear, float]:
    """A last layer trained where the spurious feature is spread over the classes, and its weight decay.

    Parameters
    ----------
    features, labels : tensors, shapes (N, D) and (N,)
        Of poisoned training images (see `poison`), as the last layer sees them.
    held_out_features, held_out_labels
        Of other images, on which the weight decay is chosen by accuracy; the larger decay wins a tie.
    """
    n_classes = as_int(n_classes, "n_classes", 1)
    weight_decays = [as_float(decay, "every entry of weight_decays", 0) for decay in weight_decays]
    if not weight_decays:
        raise ValueError("weight_decays must hold at least one number")
    held_out, truth = _checked_features(held_out_features, held_out_labels, n_classes)
    layers = [train_last_layer(features, labels, n_classes, decay) for decay in sorted(weight_decays)]

    def accuracy(layer: nn.Linear) -> float:
        with torch.no_grad():
            return float((layer(held_out.to(layer.weight)).argmax(1).cpu() == truth).float().mean())

    best = max(reversed(range(len(layers))), key=lambda i: accuracy(layers[i]))
    return layers[best], sorted(weight_decays)[best]


def _checked_features(features: Tensor, labels: Tensor, n_classes: int) -> tuple[Tensor, Tensor]:
    data = check_matrix(as_float_tensor(features, "features"), "features")
    labels = as_int_labels(labels, len(data), "row of features")
    if not ((labels >= 0) & (labels < n_classes)).all():
        raise ValueError(
            f"labels must lie between 0 and n_classes − 1 = {n_classes - 1}, got {int(labels.min())} … "
            f"{int(labels.max())}"
        )
    return data, labels
