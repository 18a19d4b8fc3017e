"""The graph of a forward pass, split at the layer: differentiated above it once, below it K times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Cut:
    """The two ends of the graph at the layer. To be called with the layer's activation in the forward pass.

    Parameters
    ----------
    is_connected : bool
        Whether the part above stays connected to the part below, for second derivatives. Only without it can
        what goes around the layer be told from what goes through it.

    Attributes
    ----------
    below : tensor, shape (N, …, D, …)
        The activation, with its graph down to the inputs.
    above : tensor, shape (N, …, D, …)
        The same values: what the part above the layer depends on.
    """

    below: Tensor
    above: Tensor

    def __init__(self, is_connected: bool = False) -> None:
        self._is_connected = is_connected

    def __call__(self, activation: Tensor) -> Tensor:
        """What the next layer gets in the place of the activation."""
        # Copies: the next layer may work in place, and neither a leaf nor what is kept here may change.
        if self._is_connected:
            self.below = activation.clone()
            self.above = self.below.clone()
        else:
            self.below = activation.clone() if activation.requires_grad else activation
            self.above = activation.detach().clone().requires_grad_(torch.is_grad_enabled())
        return self.above.clone()


def gradients_at_cut(
    outputs: Tensor,
    activation: Tensor,
    inputs: tuple[Tensor, ...],
    layer_name: str,
    grad_outputs: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Gradient at the layer, and those at the inputs by paths around the layer, None where there are none."""
    gradient: Tensor | None = None
    around: tuple[Tensor | None, ...] = ()
    if outputs.requires_grad:
        found = _gradients(outputs, (activation, *inputs), grad_outputs, **options)
        gradient, around = found[0], tuple(found[1:])
    if gradient is None:
        raise ValueError(
            f"no gradient flows from the explained score to layer {layer_name!r}: the score does not depend "
            "on that layer, or the model detaches it (torch.no_grad, .detach(), argmax). Choose another "
            "layer or target"
        )
    return gradient, around


def gradients_at_inputs(
    outputs: Tensor,
    inputs: tuple[Tensor, ...],
    layer_name: str,
    grad_outputs: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Gradients at the inputs, or an error that says why there are none."""
    gradients: Sequence[Tensor | None] = (None,)
    if outputs.requires_grad:
        gradients = _gradients(outputs, inputs, grad_outputs, **options)
    found = tuple(gradient for gradient in gradients if gradient is not None)
    if len(found) != len(inputs):
        raise ValueError(
            f"no gradient flows from layer {layer_name!r} to every input: choose a layer above all inputs, "
            "pass the others as additional_forward_args, or wrap a perturbation method, which needs none"
        )
    return found


def _gradients(
    outputs: Tensor, inputs: tuple[Tensor, ...], grad_outputs: Tensor | None, **options: Any
) -> Sequence[Tensor | None]:
    try:
        return torch.autograd.grad(outputs, inputs, grad_outputs, allow_unused=True, **options)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise ValueError(
            "the model is checkpointed in a way through which gradients at a layer cannot be had: switch "
            "checkpointing off, or set use_reentrant=False in it"
        ) from error
