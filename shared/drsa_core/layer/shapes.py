"""What a layer's output must look like, so that its features can be split."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

_FEATURES_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.GroupNorm)


def as_activation(
    output: object, layer: nn.Module, name: str, channel_dim: int, n_examples: int | None = None
) -> Tensor:
    """A layer's output, if it is one floating-point tensor (N, …) with features along `channel_dim`.

    `n_examples` is the number of examples N; None if that is not known.
    """
    if not isinstance(output, Tensor) or output.ndim < 2:
        got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(
            f"layer {name!r} must return one tensor of shape (N, D, …) or (N, …, D), got {got}; choose a "
            "layer inside or around it that does"
        )
    if not torch.is_floating_point(output):
        raise TypeError(f"layer {name!r} must return floating-point activations, got {output.dtype}")
    shape = tuple(output.shape)
    if n_examples is not None and shape[0] != n_examples:
        hint = ""
        if shape[1] == n_examples:
            hint = "; if its second axis runs over them, build its attention or RNN with batch_first=True"
        raise ValueError(
            f"the first axis of a layer's output must run over the examples, {n_examples} here, but layer "
            f"{name!r} gives shape {shape}: it has other things there, such as tokens or windows. Choose "
            f"another layer, e.g. the block around it{hint}. A single example is a batch too, x[None]"
        )
    if not -len(shape) <= channel_dim < len(shape):
        raise ValueError(
            f"channel_dim={channel_dim} is not an axis of the activation of layer {name!r}, which has shape "
            f"{shape}; use 1 for (N, D, …), -1 for tokens (N, T, D)"
        )
    if channel_dim % len(shape) == 0:
        raise ValueError(
            f"channel_dim={channel_dim} is the axis of the examples in the activation of layer {name!r}, "
            f"{shape}, and would mix them; use 1 for (N, D, …), -1 for tokens (N, T, D)"
        )
    if channel_dim == 1 and len(shape) > 2 and _has_features_last(layer, shape):
        what = "tokens" if len(shape) == 3 else "rows"
        warnings.warn(
            f"the activation of layer {name!r} has shape {shape}, which looks like {shape[1]} {what} of "
            f"{shape[-1]} features, but channel_dim=1 splits the {what}; set channel_dim=-1 to split "
            "features",
            stacklevel=2,
        )
    return output


def check_fits(activation: Tensor, n_features: int, name: str, channel_dim: int) -> None:
    """Raise if subspaces of `n_features` dimensions do not fit an activation."""
    if activation.shape[channel_dim] != n_features:
        raise ValueError(
            f"the subspaces have D = {n_features} features, but layer {name!r} has "
            f"{activation.shape[channel_dim]} along channel_dim={channel_dim} of its output "
            f"{tuple(activation.shape)}; use subspaces that were fitted at this layer, or give its "
            "channel_dim (-1 for tokens)"
        )


def sum_over_positions(values: Tensor, dim: int) -> Tensor:
    """Sum (N, …, K, …) over all axes but the first and `dim`, shape (N, K)."""
    moved = values.movedim(dim, 1)
    return moved.reshape(*moved.shape[:2], -1).sum(2)


def _has_features_last(layer: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether the last module in the layer that has a width of its own has that of the last axis."""
    for module in reversed(list(layer.modules())):
        if isinstance(module, _FEATURES_FIRST):
            return False
        width = getattr(module, "out_features", None) or getattr(module, "normalized_shape", (None,))[-1]
        if width == shape[-1]:
            return width != shape[1]
    return False
