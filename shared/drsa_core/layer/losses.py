"""What concept maps cannot hold: relevance on zero activations, and relevance that goes around the layer."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

# Standard rules leave nothing on zero activations, and most layers have nothing around them.
TOLERANCE = 1e-3
_UNSAFE_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm, nn.RReLU)
# Of torchvision and timm, by name: they leave out branches at random.
_RANDOM_IN_TRAINING = ("StochasticDepth", "DropPath", "DropBlock2d", "DropBlock3d", "PatchDropout")


class RelevanceLossWarning(UserWarning):
    """The concept maps miss a part of the relevance, so that they do not add up to the whole."""


def lost_relevance(a: Tensor, relevance: Tensor) -> float:
    """Share of Σ|R| that sits on zero activations, where the virtual layer cannot pass it on."""
    # In double precision: sums of half precision overflow.
    total = relevance.abs().sum(dtype=torch.float64)
    return float(relevance.abs()[a == 0].sum(dtype=torch.float64) / total) if total > 0 else 0.0


def warn_of_loss(lost: float, layer_name: str, tolerance: float = TOLERANCE) -> None:
    """Warn if more than `tolerance` of the relevance sits on zero activations."""
    if lost > tolerance:
        warnings.warn(
            f"{lost:.1%} of the relevance at layer {layer_name!r} sits on zero activations and is lost; the "
            "concept maps do not add up to the whole. Choose a layer whose zero activations carry no "
            "relevance (after the activation function, say), or rules that give them none",
            RelevanceLossWarning,
            stacklevel=3,
        )


def share_around(around: tuple[Tensor | None, ...], through: tuple[Tensor, ...]) -> float:
    """Share of what reaches the inputs, by absolute value, that went around the layer."""
    missed = sum((_size(part) for part in around if part is not None), 0.0)
    passed = sum(map(_size, through))
    return missed / (missed + passed) if missed > 0 else 0.0


def _size(part: Tensor) -> float:
    return float(part.detach().abs().sum(dtype=torch.float64))


def warn_of_bypass(share: float, layer_name: str, tolerance: float = TOLERANCE) -> None:
    """Warn if more than `tolerance` of the relevance at the inputs goes around the layer."""
    if share > tolerance:
        warnings.warn(
            f"{share:.1%} of what reaches the input goes around layer {layer_name!r} (a skip connection, "
            "say) and is in none of the concept maps, so that they do not add up to the whole. Choose the "
            "block around it, whose output is all that the layers above see",
            RelevanceLossWarning,
            stacklevel=3,
        )


def warn_of_training(model: nn.Module) -> None:
    """Warn of layers that behave differently in training mode, in which explanations make no sense.

    Batch norms without running statistics do so in evaluation mode too.
    """
    where, in_training = batch_dependence(model)
    if where is None:
        return
    if in_training:
        message = (
            f"{where} is in training mode, so that explanations depend on the batch or on chance; call "
            "model.eval() first"
        )
    else:
        message = (
            f"{where} normalises by the statistics of the batch, in evaluation mode too, so that "
            "explanations depend on which examples are in it; use norms with track_running_stats=True, "
            "or explain the same batch each time"
        )
    warnings.warn(message, stacklevel=3)


def batch_dependence(model: nn.Module) -> tuple[str | None, bool]:
    """The first module whose output depends on the batch or on chance, and if that is for training mode.

    None if there is no such module. A module that is in training mode, but does the same there, is none.
    """
    for name, module in model.named_modules():
        where = f"{name!r} ({type(module).__name__})" if name else type(module).__name__
        if module.training and _is_unsafe_in_training(module):
            return where, True
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if is_norm and not module.training and module.running_mean is None:
            return where, False
    return None, False


def _is_unsafe_in_training(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    return isinstance(module, _UNSAFE_IN_TRAINING) or type(module).__name__ in _RANDOM_IN_TRAINING
