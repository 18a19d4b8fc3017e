"""Few pairs in many dimensions: the problem in fewer, with nothing lost.

J depends on U only by P_k = VᵀU_kU_kᵀV, where the s columns of V span the pairs. These are positive matrices
of rank at most min(d_k, s) with sum I, and all such matrices are reached in Σ_k min(d_k, s) dimensions
(Naimark's dilation). The span itself, s dimensions, is *not* enough for three blocks or more: there the P_k
would have to be projections, and others may be better.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .objective import Objective, missing_columns
from .paper_loop import Result


@dataclass(frozen=True)
class Span:
    """The same problem in fewer dimensions.

    Attributes
    ----------
    objective : Objective
        With Σ_k min(d_k, s) features, the residual's included.
    directions : tensor, shape (D, D)
        Orthonormal columns; the first are the features of `objective`, all others see no pair.
    columns : list of slice
        Blocks in D dimensions.
    """

    objective: Objective
    directions: Tensor
    columns: list[slice]

    def expand(self, basis: Tensor) -> Tensor:
        """Basis (D, D) with the same relevances as one of the small problem."""
        size = self.objective.n_features
        inside = [(self.directions[:, :size] @ basis)[:, here] for here in self.objective.columns]
        outside = self.directions[:, size:].split(missing_columns(self.columns, inside), dim=1)
        return torch.cat([part for pair in zip(inside, outside, strict=True) for part in pair], dim=1)

    def expand_result(self, result: Result) -> Result:
        """A result of the small problem as one of the full problem."""
        return replace(result, basis=self.expand(result.basis))


def reduce_to_span(objective: Objective) -> Span | None:
    """The problem in Σ_k min(d_k, s) dimensions for s = 2N, or None if these are not fewer than D."""
    span = 2 * objective.n_samples
    sizes = [min(here.stop - here.start, span) for here in objective.columns]
    size = sum(sizes)
    if size >= objective.n_features:
        return None
    # In float64: a direction that is not quite orthogonal would change the relevances.
    pairs = torch.cat([objective.a, objective.c]).double()
    directions = torch.linalg.qr(pairs.T, mode="complete").Q
    inside = directions[:, :span]

    def coordinates(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x.double() @ inside, (0, size - span)).to(x)

    dims = sizes[: objective.n_subspaces]
    a, c = coordinates(objective.a), coordinates(objective.c)
    small = Objective(a, c, dims, objective.q, objective.n_total)
    return Span(small, directions.to(objective.a), objective.columns)
