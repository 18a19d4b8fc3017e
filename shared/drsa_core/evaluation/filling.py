"""Images with what is gone filled in, as the network takes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..checks import check_finite
from .fills import Array, Fill

#: Numbers of the image and of the step.
Jobs: TypeAlias = list[tuple[int, int]]
#: Filled pixels (C, H, W), and the mask (H, W) of what was removed.
Filled: TypeAlias = tuple[Array, Array]


@dataclass(frozen=True)
class Preprocessing:
    """How the network's inputs and pixels in [0, 1] become one another; patches are filled in pixel space.

    Attributes
    ----------
    to_pixels, to_inputs : callable
        Batches (N, C, H, W) to batches of that shape, inverse to one another. They may be called from several
        threads at once.
    """

    to_pixels: Callable[[Tensor], Tensor]
    to_inputs: Callable[[Tensor], Tensor]

    @classmethod
    def from_mean_std(
        cls, mean: Sequence[float] | float, std: Sequence[float] | float, channel_order: str = "RGB"
    ) -> Preprocessing:
        """For inputs (pixels − mean) / std, both of length C or one number.

        Parameters
        ----------
        mean, std : float or sequence of float
            In the order of the network's channels.
        channel_order : {"RGB", "BGR"}
            Order of the network's channels. Pixels are RGB; networks that come from Caffe, such as those of
            Keras, take BGR.
        """
        shift = torch.as_tensor(mean, dtype=torch.float64).reshape(-1, 1, 1)
        scale = torch.as_tensor(std, dtype=torch.float64).reshape(-1, 1, 1)
        if (
            not bool((scale > 0).all())
            or not bool(shift.isfinite().all())
            or not bool(scale.isfinite().all())
        ):
            raise ValueError(f"mean must be finite and std positive, got mean {mean} and std {std}")
        if channel_order not in ("RGB", "BGR"):
            raise ValueError(f"channel_order must be 'RGB' or 'BGR', got {channel_order!r}")

        def ordered(x: Tensor) -> Tensor:
            return x if channel_order == "RGB" else x.flip(1)

        return cls(
            lambda x: ordered(x * scale.to(x) + shift.to(x)),
            lambda x: (ordered(x) - shift.to(x)) / scale.to(x),
        )


class Filler:
    """Images with what is gone after a step filled in; its methods may be called from several threads.

    Parameters
    ----------
    inputs : tensor, shape (N, C, H, W)
    preprocessing : Preprocessing
    fill : callable
        As in `fills`.
    gone : tensor of bool, shape (N, T + 1, P)
        Which patches are gone after each step.
    grid : tensor of int, shape (H, W)
        The patch of each pixel.
    """

    def __init__(
        self, inputs: Tensor, preprocessing: Preprocessing, fill: Fill, gone: Tensor, grid: Tensor
    ) -> None:
        self.inputs, self.preprocessing, self.fill = inputs, preprocessing, fill
        # In NumPy, as what the workers do must not compete for the threads of the network.
        self.gone, self.grid = gone.numpy(), grid.numpy()
        with torch.no_grad():
            pixels = preprocessing.to_pixels(inputs.clone())  # which it may write into
            neutral = preprocessing.to_pixels(torch.zeros_like(inputs[:1]))
        if pixels.shape != inputs.shape:
            raise ValueError(
                f"to_pixels must keep the inputs' shape {tuple(inputs.shape)}, got {tuple(pixels.shape)}"
            )
        check_finite(pixels, "the pixels from to_pixels")
        low, high = float(pixels.min()), float(pixels.max())
        if low < -0.01 or high > 1.01:
            raise ValueError(
                f"pixels must lie in [0, 1], but those of the inputs go from {low:.3g} to {high:.3g}: mean "
                "and std (or to_pixels) do not fit the inputs"
            )
        self.pixels: Array = pixels.float().cpu().numpy()
        self.neutral: Array = neutral.float().mean((0, 2, 3)).clamp(0, 1).cpu().numpy()
        self.seconds: list[float] = []  # appending is safe from several threads

    def pixels_after(self, n: int, step: int) -> Filled:
        """Filled pixels (C, H, W) of image n after a step, and the mask (H, W) of what was removed."""
        begin = time.perf_counter()
        mask = self.gone[n, step][self.grid]
        filled = self.pixels[n]
        if mask.any():
            # Copies, as a fill may write into what it is given, and other steps begin with the same pixels.
            filled = self.fill(filled.copy(), mask.copy(), self.neutral.copy())
        if filled.shape != self.pixels[n].shape:
            raise ValueError(f"fill must return an image of shape {self.pixels[n].shape}, got {filled.shape}")
        if not np.isfinite(filled).all():
            raise ValueError(f"fill returned NaN or Inf for image {n}; it must return finite pixels")
        self.seconds.append(time.perf_counter() - begin)
        return filled, mask

    def images(
        self, batch: Jobs, filled: Sequence[Filled], memory_format: torch.memory_format | None
    ) -> Tensor:
        """Network inputs; pixels that are still there keep the very values of the inputs.

        With None the memory format is as it comes.
        """
        originals = self.inputs[[n for n, _ in batch]]
        pixels = torch.from_numpy(np.stack([image for image, _ in filled])).to(originals)
        masks = torch.from_numpy(np.stack([mask for _, mask in filled])).to(originals.device)
        images = torch.where(masks[:, None], self.preprocessing.to_inputs(pixels), originals)
        return images if memory_format is None else images.contiguous(memory_format=memory_format)
