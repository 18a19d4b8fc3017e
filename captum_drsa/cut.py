"""The graph of a forward pass, split at the layer: differentiated above it once, below it K times."""

from __future__ import annotations

import torch
from torch import Tensor


class Cut:
    """The two ends of the graph at the layer. To be called with the layer's activation in the forward pass.

    Attributes
    ----------
    below : tensor, shape (N, …, D, …)
        The activation, with its graph down to the inputs.
    above : tensor, shape (N, …, D, …)
        The same values as a leaf: what the part above the layer depends on.
    """

    below: Tensor
    above: Tensor

    def __call__(self, activation: Tensor) -> Tensor:
        """What the next layer gets in the place of the activation."""
        self.below = activation
        self.above = activation.detach().clone().requires_grad_(torch.is_grad_enabled())
        return self.above.clone()  # the next layer may work in place, which a leaf does not allow

    def gradients_below(
        self, inputs: tuple[Tensor, ...], cotangents: Tensor, layer_name: str
    ) -> tuple[Tensor, ...]:
        """Gradients at the inputs of ⟨φ(x), cotangent⟩ for each of K cotangents, shapes (N, K, …).

        Parameters
        ----------
        inputs : tuple of tensor
            The leaves that the forward pass began with.
        cotangents : tensor, shape (K, N, …, D, …)
        layer_name : str
            For the error if there is no path.
        """
        last = len(cotangents) - 1
        by_concept = [
            gradients_at_inputs(self.below, inputs, k < last, layer_name, cotangent)
            for k, cotangent in enumerate(cotangents)
        ]
        return tuple(torch.stack(parts, dim=1) for parts in zip(*by_concept, strict=True))


def gradient_at_layer(
    outputs: Tensor, activation: Tensor, layer_name: str, grad_outputs: Tensor | None = None
) -> Tensor:
    """Gradient at the layer, or an error that says why there is none."""
    gradient = None
    if outputs.requires_grad:
        (gradient,) = torch.autograd.grad(outputs, activation, grad_outputs, allow_unused=True)
    if gradient is None:
        raise ValueError(
            f"no gradient flows from the explained score to layer {layer_name!r}: the score does not depend "
            "on that layer, or the model detaches it (torch.no_grad, .detach(), argmax). Choose another "
            "layer or target"
        )
    return gradient


def gradients_at_inputs(
    outputs: Tensor,
    inputs: tuple[Tensor, ...],
    retain_graph: bool,
    layer_name: str,
    grad_outputs: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients at the inputs, or an error that says why there are none."""
    gradients: tuple[Tensor | None, ...] = (None,)
    if outputs.requires_grad:
        gradients = torch.autograd.grad(
            outputs, inputs, grad_outputs, retain_graph=retain_graph, allow_unused=True
        )
    found = tuple(gradient for gradient in gradients if gradient is not None)
    if len(found) != len(inputs):
        raise ValueError(
            f"no gradient flows from layer {layer_name!r} to every input: choose a layer above all inputs, "
            "pass the others as additional_forward_args, or wrap a perturbation method, which needs none"
        )
    return found
