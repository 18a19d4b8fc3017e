"""What replaces removed patches: inpainting and simpler fills, by name (section 5.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

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
        filled = cv2.inpaint(
            np.ascontiguousarray(bytes_.transpose(1, 2, 0)), holes, TELEA_RADIUS, cv2.INPAINT_TELEA
        )
        return filled.transpose(2, 0, 1).astype(image.dtype) / 255
    channels = [cv2.inpaint(channel, holes, TELEA_RADIUS, cv2.INPAINT_TELEA) for channel in bytes_]
    return np.stack(channels).astype(image.dtype) / 255


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
    if isinstance(fill, str):
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
    if not callable(fill):
        raise TypeError(f"fill must be a function or one of {', '.join(FILLS)}, got {type(fill).__name__}")
    return fill
