"""Gradient × Input and Saliency: both steps of Note B from one forward pass."""

from __future__ import annotations

from dataclasses import replace

import torch
from drsa_core import Subspaces, filter_context
from torch import Tensor

from .cut import Cut, gradient_at_layer
from .request import Request


class GradientPass:
    """One forward pass, differentiated down to the layer; `through` takes it on to the input by block.

    Attributes
    ----------
    activation, context : tensor, shape (N, …, D, …)
        a and c = ∂y/∂a at the layer.
    """

    def __init__(self, request: Request) -> None:
        self._inputs = tuple(x.detach().clone().requires_grad_() for x in request.inputs)
        self._cut, self._name = Cut(), request.layer_name
        with torch.enable_grad():
            score = request.select(replace(request, inputs=self._inputs).run(self._cut))
            self.context = gradient_at_layer(score.sum(), self._cut.above, self._name)
        self.activation = self._cut.above.detach()

    def through(self, subspaces: Subspaces, dim: int) -> tuple[Tensor, ...]:
        """Gradients of R̂_k(x) = (U_kᵀφ(x))ᵀ(U_kᵀ[c]) at each input, shapes (N, K, …)."""
        filtered = filter_context(self.context, subspaces, dim)
        return self._cut.gradients_below(self._inputs, filtered, self._name)
