"""Step 1 of the two-step attribution: what arrives at the layer in one backward pass (section 3, Eq. 1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from drsa_core import context_from_relevance
from torch import Tensor, nn

from .filter import VirtualLayer


@dataclass
class Arriving:
    """Activation a, context c, and the factor that makes contexts what the gradient slot holds again."""

    output: Tensor
    """Output of the model, with its graph."""
    graph: Tensor
    """The activation with its graph, from which the passes below the layer start."""
    gradient: Tensor
    """What the gradient slot held at the layer: relevance R or a gradient."""
    activation: Tensor
    """a, detached."""
    context: Tensor
    """c = R ⊘ a (0 where a = 0), or the gradient itself (section 3.2, Note B.2)."""
    factor: Tensor | float
    """a if relevance is passed, else 1: parts of c times it go back into the gradient slot."""


def arriving_at(
    layer: VirtualLayer,
    model: nn.Module,
    input: Tensor,
    attr_output_fn: Callable[[Tensor], Tensor],
    create_graph: bool = False,
) -> Arriving:
    """Run the model forward, and backward down to the virtual layer."""
    layer.recording = True
    try:
        with torch.enable_grad():
            output = model(input if input.requires_grad else input.detach().requires_grad_())
        graph, above = layer.activation, layer.output
    finally:
        layer.recording = False
        layer.activation = layer.output = None
    if graph is None or above is None:
        raise ValueError(f"layer {layer.name!r} was not run in the forward pass of {type(model).__name__}")
    if not graph.requires_grad:
        raise ValueError(f"layer {layer.name!r} does not depend on the input; choose a layer on its way")
    (gradient,) = torch.autograd.grad(
        output,
        above,
        attr_output_fn(output),
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
    )
    if gradient is None:
        raise ValueError(f"the output does not depend on layer {layer.name!r}; choose a layer on its way")
    activation = graph.detach()
    if not layer.passes_relevance:
        return Arriving(output, graph, gradient, activation, gradient, 1.0)
    layer.warn_of_loss(activation, gradient)
    return Arriving(
        output, graph, gradient, activation, context_from_relevance(activation, gradient), activation
    )
