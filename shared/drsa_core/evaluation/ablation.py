"""Do the concepts matter? Ablate each in the activation, and compare the drop of the output with R_k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import ArrayLike, as_float_tensor, as_int, check_finite
from ..explainer import Explainer, single_input
from ..layer import Inputs, check_fits, sum_over_positions
from ..subspaces import Subspaces
from ..targets import Target, check_length, targets_of_batch


@dataclass(frozen=True)
class ConceptAblation:
    """What happens to the score when one concept after the other is ablated.

    Attributes
    ----------
    relevance : tensor, shape (N, K)
        R_k = (U_kᵀa)ᵀ(U_kᵀc), summed over positions: what the explanation says.
    drop : tensor, shape (N, K)
        y(a) − y(a − U_kU_kᵀa): what the network does.
    score : tensor, shape (N,)
        y(a).
    names : tuple of str, length K
    """

    relevance: Tensor
    drop: Tensor
    score: Tensor
    names: tuple[str, ...]

    @property
    def correlation(self) -> float:
        """Pearson correlation of R_k and the drop over all examples and concepts; NaN if one is constant."""
        return _correlation(self.relevance, self.drop)

    @property
    def correlation_within_images(self) -> float:
        """The same after each example's mean is taken off both: are its concepts ranked right?"""
        relevance, drop = self.relevance.double(), self.drop.double()
        return _correlation(relevance - relevance.mean(1, keepdim=True), drop - drop.mean(1, keepdim=True))


def concept_ablation(
    explainer: Explainer,
    inputs: Inputs,
    target: Target,
    subspaces: Subspaces | None = None,
    *,
    reference: ArrayLike | None = None,
    batch_size: int = 32,
) -> ConceptAblation:
    """Ablate each concept in the layer's activation, run the network above, and record the drop.

    Parameters
    ----------
    explainer : Explainer
        `zennit_drsa.DisentangledAttributor` or `captum_drsa.DisentangledAttribution`.
    inputs : tensor, shape (N, …)
    target
        As in `explainer.context`.
    subspaces : Subspaces, optional
        The concepts, e.g. those of another method. Default: the explainer's own, which are then compared with
        what they were learned for, as in `concept_relevance`.
    reference : array or tensor, shape (D,), optional
        Mean activation over a reference set, e.g. `pairs.a.mean(0)`. The block is replaced by that of the
        reference, a − U_kU_kᵀ(a − ā), instead of zero.
    batch_size : int
        Examples per forward pass.
    """
    x = single_input(inputs)
    if subspaces is None:
        subspaces = explainer._fitted()
        explainer._check_use(target, x[:1])
    if reference is not None:
        reference = as_float_tensor(reference, "reference")
        if reference.shape != (subspaces.n_features,):
            raise ValueError(
                f"reference must be a mean activation of shape ({subspaces.n_features},), got "
                f"{tuple(reference.shape)}; e.g. pairs.a.mean(0)"
            )
    return _ablations(explainer, x, target, [subspaces], reference, batch_size)[0]


def compare_ablations(
    explainer: Explainer, inputs: Inputs, target: Target, subspaces: Sequence[Subspaces], batch_size: int = 32
) -> list[ConceptAblation]:
    """`concept_ablation` of the subspaces of several methods, in their order, with one context for all."""
    return _ablations(explainer, single_input(inputs), target, subspaces, None, batch_size)


def _ablations(
    explainer: Explainer,
    x: Tensor,
    target: Target,
    subspaces: Sequence[Subspaces],
    reference: Tensor | None,
    batch_size: int,
) -> list[ConceptAblation]:
    check_length(target, len(x))
    batches = []
    # In one session of the explainer, so that the activation is the one that the concepts were learned on.
    with explainer._session():
        for first in range(0, len(x), as_int(batch_size, "batch_size", 1)):
            part = x[first : first + batch_size]
            of_part = targets_of_batch(target, first, len(part))
            batches.append(_ablate(explainer, part, of_part, subspaces, reference))
    score, *rest = (torch.cat(parts) for parts in zip(*batches, strict=True))
    for value in rest:
        check_finite(value, "the relevance of the concepts, or the drop of the score,")
    return [
        ConceptAblation(relevance, drop, score, method.names)
        for relevance, drop, method in zip(rest[::2], rest[1::2], subspaces, strict=True)
    ]


def _ablate(
    explainer: Explainer, x: Tensor, target: Target, subspaces: Sequence[Subspaces], reference: Tensor | None
) -> list[Tensor]:
    """Score (n,) of one batch, then relevance and drop (n, K) for each of the subspaces."""
    activation, context = explainer.context(x, target)
    dim = explainer.channel_dim

    def score_without(method: Subspaces, k: int) -> Tensor:
        def ablated(a: Tensor) -> Tensor:
            excess = a if reference is None else (a.movedim(dim, -1) - reference.to(a)).movedim(-1, dim)
            return a - method.project(excess, k, dim)

        return explainer.scores_with(x, target, ablated)

    found = [explainer.scores_with(x, target, lambda a: a)]
    for method in subspaces:
        check_fits(activation, method.n_features, explainer.layer_name, dim)
        relevance = sum_over_positions(method.relevance(activation, context, dim), dim).detach()
        drops = [found[0] - score_without(method, k) for k in range(method.n_subspaces)]
        found += [relevance, torch.stack(drops, dim=1)]
    return found


def _correlation(first: Tensor, second: Tensor) -> float:
    x, y = (values.double().flatten() - values.double().mean() for values in (first, second))
    lengths = float(x.norm() * y.norm())
    return float(x @ y) / lengths if lengths > 0 else float("nan")
