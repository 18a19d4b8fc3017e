"""One forward pass, differentiated down to the layer once and from there to the inputs block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ..subspaces import Subspaces
from .cut import Cut, gradients_at_cut, gradients_at_inputs
from .losses import TOLERANCE, lost_relevance, share_around, warn_of_bypass, warn_of_loss
from .request import Request
from .virtual_layer import context_from_relevance, filter_context


class BackwardPass:
    """A forward pass that was taken back to the layer; `below` takes it on to the inputs.

    Parameters
    ----------
    request : Request
    start : function, optional
        The output ↦ what the gradient slot holds there. Default: the gradient of the explained score.
    holds_relevance : bool
        Whether rules are in force that pass relevance in the gradient's place.
    create_graph : bool
        Whether the results are to be differentiated again.
    tolerance : float
        Share of lost relevance beyond which there is a warning.

    Attributes
    ----------
    output : tensor
        The model's output, with its graph.
    activation : tensor, shape (N, …, D, …)
        a, detached.
    gradient_slot : tensor, shape (N, …, D, …)
        What the gradient slot holds at the layer: relevance R, or the gradient ∂y/∂a.
    context : tensor, shape (N, …, D, …)
        c = R ⊘ a (0 where a = 0), or the gradient itself (section 3.2, Note B.2).
    lost : float
        Share of the relevance at the layer that sits on zero activations.
    share_around : float or None
        Share of what reaches the inputs by paths around the layer; None with `create_graph`, and where no
        input is floating point (token numbers).
    """

    def __init__(
        self,
        request: Request,
        *,
        start: Callable[[Tensor], Tensor] | None = None,
        holds_relevance: bool = False,
        create_graph: bool = False,
        tolerance: float = TOLERANCE,
    ) -> None:
        # Token numbers and masks among the inputs have no gradient: they are constants.
        inputs = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in request.inputs)
        self._inputs = tuple(x for x in inputs if x.is_floating_point())
        self._layer_name, self._create_graph = request.layer_name, create_graph
        self._cut = Cut(is_connected=create_graph)
        with torch.enable_grad():
            self.output: Tensor = replace(request, inputs=inputs).run(self._cut)
            explained = request.scores(self.output).sum() if start is None else self.output
            self.gradient_slot, around = gradients_at_cut(
                explained,
                self._cut.above,
                () if create_graph else self._inputs,
                request.layer_name,
                None if start is None else start(self.output),
                create_graph=create_graph,
                retain_graph=True,
            )
        self.activation = self._cut.below.detach()
        self._factor: Tensor | None = None
        self.context, self.lost = self.gradient_slot, 0.0
        if holds_relevance:
            self._factor = self._cut.below if create_graph else self.activation
            self.context = context_from_relevance(self._factor, self.gradient_slot)
            self.lost = lost_relevance(self.activation, self.gradient_slot.detach())
            warn_of_loss(self.lost, request.layer_name, tolerance)
        self.share_around = None if create_graph or not self._inputs else 0.0
        if any(part is not None for part in around):
            self.share_around = share_around(around, self.below(self.gradient_slot))
            warn_of_bypass(self.share_around, request.layer_name, tolerance)

    def below(self, cotangent: Tensor, retain_graph: bool = True) -> tuple[Tensor, ...]:
        """What reaches each input if `cotangent` is in the gradient slot at the layer, shapes (N, …)."""
        return gradients_at_inputs(
            self._cut.below,
            self._inputs,
            self._layer_name,
            # A strided one makes batch norms compute nonsense for one example, without an error.
            cotangent.contiguous(),
            create_graph=self._create_graph,
            retain_graph=retain_graph or self._create_graph,
        )

    def cotangents(self, subspaces: Subspaces, dim: int) -> Iterable[Tensor]:
        """What goes on from the layer for each block: R⁽ᵏ⁾ = a ⊙ U_kU_kᵀc, or U_kU_kᵀc for gradients."""
        for part in filter_context(self.context, subspaces, dim):
            yield part if self._factor is None else self._factor * part

    def through(
        self, subspaces: Subspaces, dim: int, before_each: Callable[[], None] | None = None
    ) -> tuple[Tensor, ...]:
        """What reaches each input through each block, shapes (N, K, …)."""
        by_concept = []
        for cotangent in self.cotangents(subspaces, dim):
            if before_each is not None:
                before_each()
            by_concept.append(self.below(cotangent))
        return tuple(torch.stack(parts, dim=1) for parts in zip(*by_concept, strict=True))
