"""A test bed with known concepts: scenes with planted patterns, and how well maps find them.

The paper has no ground truth for its concepts. Here it is planted: an image shows `n_shown` of M patterns at
random places, its class is the set of patterns shown, and the mask of each pattern is kept. Classes overlap
(with the default, 15 classes are the 4-subsets of 6 patterns), so that a network has to tell the patterns
apart, and the concepts of a class are its patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from drsa_core.checks import as_float, as_float_tensor, as_int, check_finite
from scipy.optimize import linear_sum_assignment
from torch import Tensor

#: Eight shapes of 9 × 9 pixels: bright is 1, dark is −1, background is 0. All have both signs, so that none
#: can be told by its mean brightness alone. Scenes use the first six unless they are asked for more.
PATTERN_SIZE = 9
PATTERN_NAMES = ("ring", "cross", "checks", "rows", "columns", "corner", "frame", "stripes")


def patterns() -> Tensor:
    """The patterns of `PATTERN_NAMES`, values in [−1, 1], shape (8, 9, 9)."""
    centre = (PATTERN_SIZE - 1) / 2
    y, x = torch.meshgrid(torch.arange(PATTERN_SIZE), torch.arange(PATTERN_SIZE), indexing="ij")
    radius = ((y - centre) ** 2 + (x - centre) ** 2).sqrt()
    ring = torch.where((radius > 2.3) & (radius < 4.3), 1.0, -1.0)
    cross = torch.where(((y - x).abs() <= 1) | ((y + x - 2 * centre).abs() <= 1), 1.0, -1.0)
    checks = torch.where(((y + 1) // 2 + (x + 1) // 2) % 2 == 0, 1.0, -1.0)
    rows = torch.where(y % 4 < 2, 1.0, -1.0)
    columns = torch.where(x % 4 < 2, 1.0, -1.0)
    corner = torch.where(x + y < PATTERN_SIZE - 1, 1.0, -1.0)
    frame = torch.where(torch.maximum((y - centre).abs(), (x - centre).abs()) >= 3, 1.0, -1.0)
    stripes = torch.where((x - y) % 6 < 3, 1.0, -1.0)
    return torch.stack([ring, cross, checks, rows, columns, corner, frame, stripes])


@dataclass(frozen=True)
class Scenes:
    """Images with their ground truth.

    Attributes
    ----------
    images : tensor, shape (N, 1, H, W)
        Values in [−1, 1].
    labels : tensor of int, shape (N,)
        Index of the class.
    masks : tensor of bool, shape (N, M, H, W)
        Where each pattern lies: the square of its 9 × 9 pixels; all False if it is not shown.
    """

    images: Tensor
    labels: Tensor
    masks: Tensor


class PlantedConcepts:
    """A generator of scenes: noise with `n_shown` of M patterns, at random places that do not overlap.

    Parameters
    ----------
    strengths : sequence of M floats
        Contrast of each pattern, for the first M of `PATTERN_NAMES`. Unequal ones make for concepts of
        unequal evidence.
    n_shown : int
        Patterns per image; the classes are all subsets of so many.
    size : int
        Height and width of the images, a multiple of 12.
    noise : float
        Standard deviation of the background.

    Attributes
    ----------
    classes : tuple of tuples of int
        The patterns of each class, in lexicographic order.

    Examples
    --------
    >>> task = PlantedConcepts()
    >>> len(task.classes), task.classes[0]
    (15, (0, 1, 2, 3))
    >>> scenes = task.sample(2, torch.Generator().manual_seed(0), label=0)
    >>> scenes.masks.flatten(2).sum(2)
    tensor([[81, 81, 81, 81,  0,  0],
            [81, 81, 81, 81,  0,  0]])
    """

    cell = PATTERN_SIZE + 3  # a pattern has 3 pixels of play in its cell of the grid

    def __init__(
        self,
        strengths: Sequence[float] = (1.0,) * 6,
        n_shown: int = 4,
        size: int = 36,
        noise: float = 0.2,
    ) -> None:
        strengths = [as_float(strength, "every entry of strengths") for strength in strengths]
        if not 2 <= len(strengths) <= len(PATTERN_NAMES) or not all(0 < s <= 1 for s in strengths):
            raise ValueError(
                f"strengths must be 2 to {len(PATTERN_NAMES)} numbers above 0 and up to 1, got {strengths!r}"
            )
        n_shown, size, noise = (
            as_int(n_shown, "n_shown", 1),
            as_int(size, "size", 1),
            as_float(noise, "noise", 0),
        )
        if n_shown >= len(strengths):
            raise ValueError(f"n_shown must be below {len(strengths)}, or all images are of one class")
        if size % self.cell or (size // self.cell) ** 2 < n_shown:
            raise ValueError(f"size must be a multiple of {self.cell} with room for {n_shown} patterns")
        self.strengths = tuple(strengths)
        self.n_shown, self.size, self.noise = n_shown, size, noise
        self.classes = tuple(combinations(range(len(strengths)), n_shown))

    def sample(self, n: int, generator: torch.Generator, label: int | None = None) -> Scenes:
        """Draw n scenes of all classes, or of the class `label` alone."""
        n = as_int(n, "n", 1)
        label = None if label is None else as_int(label, "label", 0, len(self.classes) - 1)
        labels = (
            torch.randint(len(self.classes), (n,), generator=generator)
            if label is None
            else torch.full((n,), label)
        )
        shown = torch.tensor(self.classes)[labels]  # (N, n_shown)
        # Different cells of the grid for the patterns of an image, and a random shift inside each.
        per_side = self.size // self.cell
        cells = torch.rand(n, per_side**2, generator=generator).argsort(1)[:, : self.n_shown]
        play = self.cell - PATTERN_SIZE + 1
        shift = torch.randint(play, (2, n, self.n_shown), generator=generator)
        top, left = cells // per_side * self.cell + shift[0], cells % per_side * self.cell + shift[1]
        contrast = 0.7 + 0.3 * torch.rand(n, self.n_shown, generator=generator)
        contrast = contrast * torch.tensor(self.strengths)[shown]

        offsets = torch.arange(PATTERN_SIZE)
        rows = (top[..., None] + offsets)[..., :, None]
        columns = (left[..., None] + offsets)[..., None, :]
        image = torch.arange(n)[:, None, None, None]
        images = self.noise * torch.randn(n, self.size, self.size, generator=generator)
        images[image, rows, columns] += contrast[..., None, None] * patterns()[shown]
        masks = torch.zeros(n, len(self.strengths), self.size, self.size, dtype=torch.bool)
        masks[image, shown[..., None, None], rows, columns] = True
        return Scenes(images.clamp(-1, 1)[:, None], labels, masks)


@dataclass(frozen=True)
class Matching:
    """Which map belongs to which concept, and how well.

    Attributes
    ----------
    inside : tensor, shape (K, M)
        Mean over images of the share of positive relevance of map k inside the mask of concept m.
    subspace_of : tuple of int
        For each concept the map that is assigned to it, −1 if there are fewer maps than concepts.
    score : float
        Mean of `inside` over the concepts with their assigned maps; a concept without a map counts 0.
    covered : int
        Number of different concepts that are the strongest one of some map. Fewer than M with K ≥ M: maps
        share a concept.
    """

    inside: Tensor
    subspace_of: tuple[int, ...]
    score: float
    covered: int


def match_masks(maps: Tensor, masks: Tensor) -> Matching:
    """Match K maps to M masks one to one, so that the share of positive relevance inside is largest.

    Parameters
    ----------
    maps : tensor, shape (N, K, H, W) or (N, K, C, H, W)
        Maps of N images; channels are added up.
    masks : tensor of bool, shape (N, M, H, W)
        Masks of M concepts, each shown in every image.

    Returns
    -------
    Matching
        A map without any positive relevance has the share 0.
    """
    maps = as_float_tensor(maps, "maps")
    if maps.ndim == 5:
        maps = maps.sum(2)
    if maps.ndim != 4 or masks.ndim != 4 or (len(maps), *maps.shape[2:]) != (len(masks), *masks.shape[2:]):
        raise ValueError(
            "maps must have shape (N, K, H, W) or (N, K, C, H, W), and masks (N, M, H, W), of the same "
            f"images; got {tuple(maps.shape)} and {tuple(masks.shape)}"
        )
    if masks.dtype != torch.bool or not masks.flatten(2).any(2).all():
        raise ValueError(
            "masks must be boolean, and no mask of an image may be empty: select the shown concepts"
        )
    check_finite(maps, "maps")
    positive = maps.detach().clamp(min=0).flatten(2).double()
    within = torch.einsum("nkp,nmp->nkm", positive, masks.to(positive).flatten(2))
    total = positive.sum(2, keepdim=True)
    inside = torch.where(total > 0, within / torch.where(total > 0, total, 1), 0).mean(0)
    assigned = linear_sum_assignment(inside.T.cpu().numpy(), maximize=True)
    subspace_of = dict(zip(*(part.tolist() for part in assigned), strict=True))
    n_concepts = masks.shape[1]
    score = sum(float(inside[k, m]) for m, k in subspace_of.items()) / n_concepts
    # A map without positive relevance has no strongest concept.
    covered = len(set(inside[inside.any(1)].argmax(1).tolist()))
    return Matching(inside, tuple(subspace_of.get(m, -1) for m in range(n_concepts)), score, covered)
