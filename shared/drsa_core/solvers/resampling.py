"""Other data that might have been: images drawn again, and contexts that belong to other images.

The pairs of one image depend on each other, so that images are drawn, never single pairs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

Rows = dict[int, Tensor]


def rows_by_image(image: Tensor) -> Rows:
    """Rows of each image, by its number."""
    order = torch.argsort(image, stable=True)
    numbers, counts = torch.unique(image, return_counts=True)
    return dict(zip(numbers.tolist(), order.split(counts.tolist()), strict=True))


def bootstrap(rows: Rows, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Rows of as many images as there are, drawn with replacement, and rows of the images left out."""
    numbers = list(rows)
    drawn = generator.integers(len(numbers), size=len(numbers))
    left = set(range(len(numbers))) - set(drawn.tolist())
    inside = torch.cat([rows[numbers[i]] for i in drawn])
    outside = [rows[numbers[i]] for i in sorted(left)]
    return inside, torch.cat(outside) if outside else inside[:0]


def shuffled_contexts(rows: Rows, generator: np.random.Generator) -> Tensor:
    """For each row the row of another image whose context it gets, shape (N,).

    All contexts of an image go to one other image. Activations and contexts are as they were, each for
    itself, but what they have to do with each other is lost.
    """
    order = generator.permutation(list(rows)).tolist()
    source = torch.empty(sum(len(own) for own in rows.values()), dtype=torch.long)
    for number, giver in zip(order, [*order[1:], order[0]], strict=True):  # a circle: nobody keeps its own
        own, theirs = rows[number], rows[giver]
        source[own] = theirs[torch.arange(len(own)) % len(theirs)]
    return source
