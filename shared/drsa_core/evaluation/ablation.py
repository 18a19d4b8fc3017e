"""Do the concepts matter? Take each out of the activation, and compare the drop of the output with R_k."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import ArrayLike, as_float_tensor, as_int, check_finite
from ..contexts import UpperNetwork
from ..explainer import Explainer, single_input
from ..layer import Inputs, check_fits, sum_over_positions
from ..model_state import restored
from ..subspaces import Subspaces
from ..targets import Target, check_length, targets_of_batch


@dataclass(frozen=True)
class ConceptAblation:
    """What happens to the score when one concept after the other is taken out of the activation.

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
        """Pearson correlation of R_k and the drop over all images and concepts; NaN if one is constant."""
        return _correlation(self.relevance, self.drop)

    @property
    def correlation_within_images(self) -> float:
        """The same after each image's mean is taken off both: are the concepts of an image ranked right?"""
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
    """Take each concept out of the layer's activation, run the network above, and record the drop.

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
        Images per forward pass.
    """
    x, batch_size = single_input(inputs), as_int(batch_size, "batch_size", 1)
    if subspaces is None:
        subspaces = explainer._fitted()
        explainer._check_use(target, x[:1])
    concepts = subspaces
    usual = None if reference is None else as_float_tensor(reference, "reference")
    if usual is not None:
        if usual.shape != (subspaces.n_features,):
            raise ValueError(
                f"reference must be a mean activation of shape ({subspaces.n_features},), got "
                f"{tuple(usual.shape)}; e.g. pairs.a.mean(0)"
            )
        check_finite(usual, "reference")
    check_length(target, len(x))

    def ablated() -> list[tuple[Tensor, Tensor, Tensor]]:
        parts = []
        for first in range(0, len(x), batch_size):
            batch = x[first : first + batch_size]
            of_batch = targets_of_batch(target, first, len(batch))
            parts.append(_ablate(explainer, batch, of_batch, concepts, usual))
        return parts

    # In the explainer's context, so that concepts are taken out of the activation that they were learned on.
    with explainer._session():
        parts = ablated()
    relevance, drop, score = (torch.cat(part) for part in zip(*parts, strict=True))
    for value, name in (
        (relevance, "the relevance of the concepts"),
        (score, "the score"),
        (drop, "the drop"),
    ):
        check_finite(value, name)
    return ConceptAblation(relevance, drop, score, subspaces.names)


def compare_ablations(
    explainer: Explainer, inputs: Inputs, target: int, subspaces: Sequence[Subspaces]
) -> list[ConceptAblation]:
    """`concept_ablation` of many subspaces in one go, image by image.

    An image costs one context, two forward passes, and a pass through the network above the layer for each
    concept, whereas `concept_ablation` runs the whole network for each. Only a model that does not take other
    batch sizes above the layer than below is run as a whole (see `UpperNetwork`).

    Parameters
    ----------
    explainer : Explainer
    inputs : tensor, shape (N, …)
    target : int
        The same output for all images.
    subspaces : sequence of Subspaces
        E.g. those of several methods.

    Returns
    -------
    list of ConceptAblation
        In the order of the subspaces.
    """
    x, dim = single_input(inputs), explainer.channel_dim
    relevances: list[list[Tensor]] = [[] for _ in subspaces]
    scores: list[Tensor] = []

    def ablate() -> None:
        for image in x.split(1):
            activation, context = explainer.context(image, target)
            for of_method, method in zip(relevances, subspaces, strict=True):
                check_fits(activation, method.n_features, explainer.layer_name, dim)
                of_method.append(sum_over_positions(method.relevance(activation, context, dim), dim).detach())
            scores.append(_scores_without(explainer, image, target, activation, subspaces))

    with explainer._session():
        ablate()
    check_finite(torch.stack(scores), "the scores without a concept")
    y = torch.stack([rows[0] for rows in scores])
    results, first = [], 1
    for of_method, method in zip(relevances, subspaces, strict=True):
        without = torch.stack([rows[first : first + method.n_subspaces] for rows in scores])
        results.append(ConceptAblation(torch.cat(of_method), y[:, None] - without, y, method.names))
        first += method.n_subspaces
    return results


def _scores_without(
    explainer: Explainer, image: Tensor, target: int, activation: Tensor, subspaces: Sequence[Subspaces]
) -> Tensor:
    """Scores of one image: as it is, then without each block of each of the subspaces."""
    request, a, dim = explainer._request(image, target), activation.detach(), explainer.channel_dim
    cut = [a - method.project(a, k, dim) for method in subspaces for k in range(method.n_subspaces)]

    with restored(explainer._known_model()), torch.no_grad():
        upper = UpperNetwork(request, a, explainer.scores_with(image, target, lambda a: a))
        return upper(torch.cat([a, *cut]))


def _ablate(
    explainer: Explainer, x: Tensor, target: Target, subspaces: Subspaces, reference: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Relevance and drop (N, K), and score (N,), of one batch: step 1 and K + 1 forward passes."""
    activation, context = explainer.context(x, target)
    dim = explainer.channel_dim
    check_fits(activation, subspaces.n_features, explainer.layer_name, dim)
    relevance = sum_over_positions(subspaces.relevance(activation, context, dim), dim)

    def without(k: int) -> Callable[[Tensor], Tensor]:
        def cut(a: Tensor) -> Tensor:
            from_reference = a
            if reference is not None:
                shape = [1] * a.ndim
                shape[dim] = -1
                from_reference = a - reference.to(a).reshape(shape)
            return a - subspaces.project(from_reference, k, dim)

        return cut

    score = explainer.scores_with(x, target, lambda a: a)
    drops = [score - explainer.scores_with(x, target, without(k)) for k in range(subspaces.n_subspaces)]
    return relevance.detach(), torch.stack(drops, dim=1), score


def _correlation(first: Tensor, second: Tensor) -> float:
    x, y = (values.double().flatten() - values.double().mean() for values in (first, second))
    lengths = float(x.norm() * y.norm())
    return float(x @ y) / lengths if lengths > 0 else float("nan")
