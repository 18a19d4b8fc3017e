"""What concept maps cannot hold: relevance on zero activations, and relevance that goes around the layer."""

from __future__ import annotations

import warnings

from torch import Tensor, nn

# Standard rules leave nothing on zero activations, and most layers have nothing around them.
TOLERANCE = 1e-3
_UNSAFE_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)


class RelevanceLossWarning(UserWarning):
    """The concept maps miss a part of the relevance, so that they do not add up to the whole."""


def lost_relevance(a: Tensor, relevance: Tensor) -> float:
    """Share of Σ|R| that sits on zero activations, where the virtual layer cannot pass it on."""
    total = relevance.abs().sum()
    return float(relevance.abs()[a == 0].sum() / total) if total > 0 else 0.0


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
    missed = sum((float(part.detach().abs().sum()) for part in around if part is not None), 0.0)
    passed = sum(float(part.detach().abs().sum()) for part in through)
    return missed / (missed + passed) if missed > 0 else 0.0


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
    """Warn of layers that behave differently in training mode, in which explanations make no sense."""
    for name, module in model.named_modules():
        if module.training and isinstance(module, _UNSAFE_IN_TRAINING):
            where = f"{name!r} ({type(module).__name__})" if name else type(module).__name__
            warnings.warn(
                f"{where} is in training mode, so that explanations depend on the batch or on chance; call "
                "model.eval() first",
                stacklevel=3,
            )
            return
