"""Feature masks that group the pixels of an image into patches (Note D)."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor


@overload
def patch_mask(inputs: Tensor, size: int | tuple[int, int] = 16) -> Tensor: ...
@overload
def patch_mask(inputs: tuple[Tensor, ...], size: int | tuple[int, int] = 16) -> tuple[Tensor, ...]: ...
def patch_mask(
    inputs: Tensor | tuple[Tensor, ...], size: int | tuple[int, int] = 16
) -> Tensor | tuple[Tensor, ...]:
    """Numbers of the patches of images, for the `feature_mask` of Captum's perturbation methods.

    Parameters
    ----------
    inputs : tensor, shape (N, C, H, W), or tuple of such tensors
        In a tuple the numbers go on counting, so that patches of different images are different features.
    size : int or pair of int
        Height and width of a patch. Patches at the right and lower edge are smaller if need be.

    Returns
    -------
    tensor of int, shape (1, 1, H, W), or tuple of such tensors
        16 × 16 patches of a 224 × 224 image are numbered 0 … 195, row by row.
    """
    height, width = (size, size) if isinstance(size, int) else size
    if height < 1 or width < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if isinstance(inputs, Tensor):
        return _mask(inputs, height, width, 0)
    masks: list[Tensor] = []
    for image in inputs:
        masks.append(_mask(image, height, width, int(masks[-1].max()) + 1 if masks else 0))
    return tuple(masks)


def _mask(image: Tensor, height: int, width: int, first: int) -> Tensor:
    if image.ndim != 4:
        raise ValueError(f"inputs must be images of shape (N, C, H, W), got {tuple(image.shape)}")
    rows = torch.arange(image.shape[2], device=image.device) // height
    columns = torch.arange(image.shape[3], device=image.device) // width
    return (first + rows[:, None] * (columns[-1] + 1) + columns)[None, None]
