"""Derivatives of maps: convolutions whose second derivative is as cheap as their first.

A map that is computed by a backward pass is itself a function of the input, and has a gradient by a second
backward pass. There torch also computes what the weights would get, group by group, wanted or not: for
depthwise convolutions this takes nearly all of the time. With weights held constant, the backward pass of a
convolution is a linear map, whose own backward pass is the convolution again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from drsa_core.lrp import ModuleEdits
from torch import Tensor, nn
from torch.nn.grad import conv2d_input


class Correlate(torch.autograd.Function):
    """x ↦ Wx for a convolution W without bias; backwards `Spread`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *geometry: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.geometry = x.shape, geometry
        return nn.functional.conv2d(x, weight, None, *geometry)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return Spread.apply(gradient[0], weight, ctx.shape, *ctx.geometry), *(None,) * 5


class Spread(torch.autograd.Function):
    """g ↦ Wᵀg for a convolution W; backwards `Correlate`."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, weight: Tensor, shape: Any, *geometry: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.geometry = geometry
        return conv2d_input(shape, weight, gradient, *geometry)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return Correlate.apply(gradient[0], weight, *ctx.geometry), *(None,) * 6


@contextmanager
def constant_weights(model: nn.Module) -> Iterator[None]:
    """While entered, 2-D convolutions of the model treat their weights as constants.

    Outputs and gradients for the input stay what they are. Parameters get no gradient from convolutions.
    Other layers, convolutions that pad by anything but zeros, and subclasses of `nn.Conv2d` other than timm's
    `Conv2dSame` are left as they are. Enter it before a composite is registered: rules that run a layer with
    modified weights then take part.
    """
    edits = ModuleEdits()
    try:
        for module in model.modules():
            if isinstance(module, nn.Conv2d) and module.padding_mode == "zeros" and _only_convolves(module):
                edits.attribute(module, "forward", _constant_forward(module))
        yield
    finally:
        edits.remove()


def _only_convolves(conv: nn.Conv2d) -> bool:
    """Whether a layer convolves with its weight as it is; a subclass may standardise it, as in NFNets."""
    return (type(conv) is nn.Conv2d or type(conv).__name__ == "Conv2dSame") and "forward" not in vars(conv)


def _constant_forward(conv: nn.Conv2d) -> Callable[[Tensor], Tensor]:
    # "same" of torch, and timm's convolutions that pad as TensorFlow does, by the size of the input.
    pads_by_input = isinstance(conv.padding, str) or type(conv).__name__ == "Conv2dSame"

    def forward(x: Tensor) -> Tensor:
        padding: Any = conv.padding
        if pads_by_input and padding != "valid":
            x, padding = nn.functional.pad(x, _same_padding(conv, x)), 0
        elif padding == "valid":
            padding = 0
        y = Correlate.apply(x, conv.weight.detach(), conv.stride, padding, conv.dilation, conv.groups)
        return y if conv.bias is None else y + conv.bias.detach().view(-1, 1, 1)

    return forward


def _same_padding(conv: nn.Conv2d, x: Tensor) -> list[int]:
    """(left, right, top, bottom) zeros, such that the output has ⌈size / stride⌉ positions."""
    result: list[int] = []
    for axis in (1, 0):
        size, stride = x.shape[2 + axis], conv.stride[axis]
        span = conv.dilation[axis] * (conv.kernel_size[axis] - 1) + 1
        total = max((-(-size // stride) - 1) * stride + span - size, 0)
        result += [total // 2, total - total // 2]
    return result
