"""A convolution and the activation behind it as one operation of oneDNN, torch's library for CPUs.

The two names that torch calls private stand here. Its own compiler (inductor) makes use of them for CPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: Name of an activation for oneDNN, and its numbers.
Activation = tuple[str, tuple[float, ...]]
NOTHING: Activation = ("none", ())


def available() -> bool:
    """Whether this torch has the operations, and the user has not switched oneDNN off."""
    names = ("_convolution_pointwise", "_reorder_convolution_weight")
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    return all(hasattr(torch.ops.mkldnn, name) for name in names)


class Packed(nn.Module):
    """A convolution whose weight lies in memory as oneDNN wants it, with an activation at its end.

    Parameters
    ----------
    convolution : nn.Conv2d
        Its stride, dilation, groups and bias are taken. It is not changed.
    weight : tensor, shape (n_out, n_in / groups, h, w)
        Taken instead of the convolution's own.
    padding : list of int
        Zeros on both sides, for each of the two axes.
    size : torch.Size
        Shape (N, C, H, W) of the inputs to come. Others work too, but may be slower.
    """

    def __init__(self, convolution: nn.Conv2d, weight: Tensor, padding: list[int], size: torch.Size) -> None:
        super().__init__()
        self.bias = None if convolution.bias is None else convolution.bias.detach()
        self.shape = padding, list(convolution.stride), list(convolution.dilation), convolution.groups
        self.weight = torch.ops.mkldnn._reorder_convolution_weight(weight.detach(), *self.shape, list(size))
        self.activation = NOTHING

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (N, n_out, H', W'), in channels-last."""
        name, numbers = self.activation
        output: Tensor = torch.ops.mkldnn._convolution_pointwise(
            x, self.weight, self.bias, *self.shape, name, list(numbers), ""
        )
        return output
