"""Showcase 1, Clever Hans: detect a spurious strategy, take it out of the model, measure both (section 6.1).

    scores = rectified_relevance(maps)                              # detect: one score for each concept
    auroc(scores[:, k], has_watermark)                              # against SpRAy(...).distances(heatmaps)
    refined = RefinedModel(model, concept_relevance, target, [k], mean_relevance(...))      # mitigate
    ProjectedModel(model, layer, subspaces, [k], context, reference)           # or, where that takes too much
    images, poisoned = poison(images, labels, [watermark], 0.25, spare=target)              # measure
    confusion_matrix(labels, refined(images).argmax(1), n_classes)

`deep_feature_reweighting` is the method to compare with: it trains the last layer anew on poisoned images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..checks import Seed, as_float, as_float_tensor, as_int, as_int_labels, check_finite, torch_generator
from .detection import RocCurve, SpRAy, auroc, rectified_relevance, roc_curve
from .projection import ProjectedModel
from .refinement import ConceptRelevance, RefinedModel, excess_relevance, mean_relevance
from .reweighting import deep_feature_reweighting, train_last_layer

__all__ = [
    "ConceptRelevance",
    "ProjectedModel",
    "RefinedModel",
    "RocCurve",
    "SpRAy",
    "auroc",
    "confusion_matrix",
    "deep_feature_reweighting",
    "excess_relevance",
    "mean_relevance",
    "poison",
    "ranks",
    "rectified_relevance",
    "roc_curve",
    "train_last_layer",
]


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
    generator = torch_generator(random_state)
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
