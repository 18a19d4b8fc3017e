"""Other data that might have been: images drawn again, and contexts that belong to other images.

The pairs of one image depend on each other, so that images are drawn, never single pairs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..pairs import Pairs

Rows = dict[int, Tensor]


def rows_by_image(image: Tensor) -> Rows:
    """Rows of each image, by its number."""
    order = torch.argsort(image, stable=True)
    numbers, counts = torch.unique(image, return_counts=True)
    return dict(zip(numbers.tolist(), order.split(counts.tolist()), strict=True))


def bootstrap(rows: Rows, generator: np.random.Generator) -> Tensor:
    """How many times each row occurs, (N,), if as many images as there are get drawn with replacement.

    Of two images or more, at least one is left out: the rare draw of all of them is made again.
    """
    drawn = generator.integers(len(rows), size=len(rows))
    while len(rows) > 1 and len(np.unique(drawn)) == len(rows):
        drawn = generator.integers(len(rows), size=len(rows))
    counts = np.bincount(drawn, minlength=len(rows))
    times = torch.zeros(sum(len(own) for own in rows.values()))
    for own, count in zip(rows.values(), counts.tolist(), strict=True):
        times[own] = count
    return times


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


def with_shuffled_contexts(pairs: Pairs, generator: np.random.Generator) -> Pairs:
    """Pairs in which the contexts of each image are those of another one."""
    source = shuffled_contexts(rows_by_image(pairs.image), generator)
    return Pairs(pairs.a, pairs.c[source.to(pairs.c.device)], pairs.image)
