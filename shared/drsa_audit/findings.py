"""What the numbers of an audit say: shares of the concepts, two groups of images, unusual images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

#: A split into two groups that explains more of the variance than `two_groups_from` is none that a smooth
#: spread would have. These numbers were not chosen on images. Of the smooth distributions that were tried
#: (uniform and its square, normal, half-normal, exponential, rectified normal) the last one is split best:
#: with n = 24, 40 and 100 values, one draw of it in a hundred exceeds 0.925, 0.894 and 0.841, which is near
#: 0.76 + 0.8 / √n.
SMOOTH, SMOOTH_OF_FEW, MOST_NEEDED = 0.76, 0.8, 0.95
#: How far apart the groups' mean shares must be, how many times as large the larger one must be ("there or
#: not there"), and how much of the images the smaller group must hold.
FAR_APART, TIMES, SMALLEST_GROUP = 0.15, 4.0, 0.1
#: Two concepts that are strong in the same images, but for so many, belong together.
SAME_IMAGES = 0.7
#: Median absolute deviations beyond which a mixture of concepts is unusual.
UNUSUAL = 4.0


@dataclass(frozen=True)
class TwoGroups:
    """Concepts that are strong in some images and nearly absent in the others."""

    concepts: tuple[int, ...]  # the clearest first
    images: list[int]  # where it is strong
    share_there: float  # mean share in the two groups, as `steady_shares` counts it
    share_elsewhere: float
    explained: float  # part of the variance that the split explains


@dataclass(frozen=True)
class Outlier:
    """An image whose mixture of concepts is unusual: its distance in deviations, and what is unusual."""

    image: int
    distance: float
    concept: int
    share: float
    usual_share: float


def mixtures(relevance: Tensor) -> Tensor:
    """Share of each concept in the positive relevance of each image, shape (N, K).

    Rows add up to 1, or to 0 where no concept counts for the class.
    """
    positive = relevance.double().clamp(min=0)
    return positive / positive.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)


def shares(relevance: Tensor) -> Tensor:
    """Share of each concept in the positive relevance of all images together, shape (K,)."""
    positive = relevance.double().clamp(min=0).sum(0)
    return positive / positive.sum() if positive.sum() > 0 else torch.zeros_like(positive)


def share_against(relevance: Tensor) -> float:
    """Σ |negative R_k| over Σ |R_k|: how much of what concepts hold counts against the class."""
    total = relevance.double().abs().sum()
    return float(relevance.double().clamp(max=0).abs().sum() / total) if total > 0 else 0.0


def steady_shares(relevance: Tensor) -> Tensor:
    """Share of each concept in the positive relevance of each image, or of the mean image if that has more.

    Where an image has little evidence, a concept does not become strong because others are missing.
    """
    positive = relevance.double().clamp(min=0)
    total = positive.sum(1, keepdim=True)
    return positive / total.maximum(total.mean()).clamp(min=torch.finfo(torch.float64).tiny)


def two_groups_from(n_images: int) -> float:
    """How much of the variance a split of so many images must explain."""
    return min(MOST_NEEDED, SMOOTH + SMOOTH_OF_FEW / n_images**0.5)


def two_groups(relevance: Tensor) -> list[TwoGroups]:
    """Concepts whose share splits the images into two groups with little between them, clearest first.

    The split is the one that explains most of the variance of the shares (Otsu's). A concept that is there
    or not there, regardless of the object, is what a watermark looks like. Concepts with nearly the same
    images are one finding.

    Natural attributes may come in two kinds as well, and a watermark on half of the training images may be
    missed: the network then leans on it a little everywhere. `tests/benchmarks/bench_shortcut.py` counts how
    often a planted watermark is found, and how often there is a finding without one.
    """
    found: list[TwoGroups] = []
    shares_of_images = steady_shares(relevance)
    splits = filter(None, map(_split, range(relevance.shape[1]), shares_of_images.T))
    for explained, k, images in sorted(splits, reverse=True):
        for i, other in enumerate(found):
            same = set(other.images)
            if len(images & same) >= SAME_IMAGES * len(images | same):
                found[i] = _group((*other.concepts, k), same, other.explained, shares_of_images)
                break
        else:
            found.append(_group((k,), images, explained, shares_of_images))
    return found


def _split(k: int, column: Tensor) -> tuple[float, int, set[int]] | None:
    """Explained variance, concept and images of the best split of one concept's shares, if it is one."""
    n_images = len(column)
    ordered, order = column.sort(descending=True)
    total = float((ordered - ordered.mean()).square().sum())
    if n_images < 6 or total == 0:
        return None
    best, cut = max((_between(ordered, n) / total, n) for n in range(1, n_images))
    there, elsewhere = float(ordered[:cut].mean()), float(ordered[cut:].mean())
    is_large = min(cut, n_images - cut) >= max(3, SMALLEST_GROUP * n_images)
    is_far = there - elsewhere >= FAR_APART and there >= TIMES * elsewhere
    is_clear = best >= two_groups_from(n_images) and is_far and is_large
    return (best, k, set(order[:cut].tolist())) if is_clear else None


def _group(
    concepts: tuple[int, ...], images: set[int], explained: float, shares_of_images: Tensor
) -> TwoGroups:
    together = shares_of_images[:, list(concepts)].sum(1)
    is_there = torch.zeros(len(together), dtype=torch.bool)
    is_there[list(images)] = True
    there, elsewhere = float(together[is_there].mean()), float(together[~is_there].mean())
    return TwoGroups(concepts, sorted(images), there, elsewhere, explained)


def outliers(relevance: Tensor, reference: Tensor) -> list[Outlier]:
    """Images whose mixture of concepts is far from that of the reference (M, K), farthest first."""
    # Medians as quantiles: of an even number, `Tensor.median` takes the lower one.
    usual = mixtures(reference).quantile(0.5, dim=0)
    typical = 0.5 * (mixtures(reference) - usual).abs().sum(1)
    centre = typical.quantile(0.5)
    spread = 1.4826 * (typical - centre).abs().quantile(0.5).clamp(min=0.01)
    found = []
    for n, mixture in enumerate(mixtures(relevance)):
        distance = float((0.5 * (mixture - usual).abs().sum() - centre) / spread)
        if distance > UNUSUAL:
            k = int((mixture - usual).abs().argmax())
            found.append(Outlier(n, distance, k, float(mixture[k]), float(usual[k])))
    return sorted(found, key=lambda outlier: -outlier.distance)


def is_known(number: float | None) -> TypeGuard[float]:
    """Whether a number is there: not None, nor NaN as in files of earlier releases."""
    return number is not None and not math.isnan(number)


def correlation_text(value: float | None) -> str:
    """A correlation for people."""
    return f"{value:.2f}" if is_known(value) else "not defined"


def half_area(maps: Tensor) -> Tensor:
    """Smallest part of the picture that holds half of the positive relevance of maps (…, H, W)."""
    flat = maps.double().clamp(min=0).flatten(-2).sort(-1, descending=True).values
    total = flat.sum(-1, keepdim=True)
    below = (flat.cumsum(-1) < 0.5 * total).sum(-1)
    return torch.where(total[..., 0] > 0, (below + 1) / flat.shape[-1], torch.nan)


def _between(ordered: Tensor, cut: int) -> float:
    """Sum of squares between the first `cut` values and the others."""
    first, second, n = ordered[:cut].mean(), ordered[cut:].mean(), len(ordered)
    return float(cut * (n - cut) / n * (first - second).square())
