"""What replaces removed patches, and how the network's inputs become pixels (section 5.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Array: TypeAlias = "np.ndarray[Any, Any]"
#: Image (C, H, W) with values in [0, 1], mask (H, W) that is True where pixels are removed, neutral colour
#: (C,) ↦ an image whose removed pixels are filled. What it says of the other pixels is ignored.
Fill: TypeAlias = Callable[[Array, Array, Array], Array]

#: Radius in pixels of the neighbourhood that TELEA averages; the paper does not name one, 3 is usual.
TELEA_RADIUS = 3
#: Standard deviation of the Gaussian, in pixels.
BLUR_SIGMA = 12.0


def telea(image: Array, mask: Array, neutral: Array) -> Array:
    """Inpainting from the border inwards by Telea's fast marching method, in OpenCV (the paper's fill).

    OpenCV returns an image that is masked everywhere as it came, which would bring back all that was removed;
    such an image becomes neutral instead. Filled values are multiples of 1/255.
    """
    import cv2

    if mask.all():
        return constant(image, mask, neutral)
    bytes_ = np.rint(image.clip(0, 1) * 255).astype(np.uint8)
    holes = mask.astype(np.uint8)
    if len(image) == 3:  # OpenCV takes images of 3 channels or 1
        channels_last = np.ascontiguousarray(bytes_.transpose(1, 2, 0))
        filled = cv2.inpaint(channels_last, holes, TELEA_RADIUS, cv2.INPAINT_TELEA).transpose(2, 0, 1)
    else:
        filled = np.stack([cv2.inpaint(one, holes, TELEA_RADIUS, cv2.INPAINT_TELEA) for one in bytes_])
    return filled.astype(image.dtype) / 255


def mean(image: Array, mask: Array, neutral: Array) -> Array:
    """Mean colour of the pixels that are left; neutral if none is."""
    if mask.all():
        return constant(image, mask, neutral)
    # A sum with weights is much faster than picking out what is left. First by rows: einsum adds up number
    # after number, and a sum of a million of them in float32 is off by a grey level.
    left = (~mask).astype(image.dtype)
    rows = np.einsum("chw,hw->ch", image, left)
    return constant(image, mask, rows.sum(1, dtype=np.float64) / np.count_nonzero(~mask))


def blur(image: Array, mask: Array, neutral: Array) -> Array:
    """A blurred copy of the image: unlike with the other fills, coarse colours of what is removed remain."""
    from scipy.ndimage import gaussian_filter

    return gaussian_filter(image, sigma=(0, BLUR_SIGMA, BLUR_SIGMA), mode="nearest")


def constant(image: Array, mask: Array, neutral: Array) -> Array:
    """The neutral colour: what the network sees as 0."""
    return np.broadcast_to(neutral[:, None, None], image.shape).astype(image.dtype)


FILLS: dict[str, Fill] = {"telea": telea, "mean": mean, "blur": blur, "constant": constant}


def find_fill(fill: str | Fill) -> Fill:
    """The fill of that name, or the function itself."""
    if callable(fill):
        return fill
    if fill not in FILLS:
        raise ValueError(f"fill must be a function or one of {', '.join(FILLS)}, got {fill!r}")
    if fill == "telea":
        try:
            import cv2  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "fill='telea' needs OpenCV: pip install 'captum-zennit-drsa[evaluation]', or choose "
                "another fill (mean, blur, constant)"
            ) from error
    return FILLS[fill]


@dataclass(frozen=True)
class Preprocessing:
    """How the network's inputs and pixels in [0, 1] become one another; patches are filled in pixel space.

    Attributes
    ----------
    to_pixels, to_inputs : callable
        Batches (N, C, H, W) to batches of that shape, inverse to one another.
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
        shift, scale = (torch.as_tensor(v, dtype=torch.float64).reshape(-1, 1, 1) for v in (mean, std))
        if not bool((scale > 0).all() & shift.isfinite().all() & scale.isfinite().all()):
            raise ValueError(f"mean must be finite and std positive, got mean {mean} and std {std}")
        if channel_order not in ("RGB", "BGR"):
            raise ValueError(f"channel_order must be 'RGB' or 'BGR', got {channel_order!r}")

        def ordered(x: Tensor) -> Tensor:
            return x if channel_order == "RGB" else x.flip(1)

        return cls(
            lambda x: ordered(x * scale.to(x) + shift.to(x)),
            lambda x: (ordered(x) - shift.to(x)) / scale.to(x),
        )
