"""`Explanation`: K maps with what they belong to, and a certificate of what adds up to what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .provenance import Provenance
from .subspaces import Subspaces
from .token_maps import TokenLayout, TokenMaps, arrange


@dataclass(frozen=True)
class Losses:
    """What concept maps cannot hold, as shares of the absolute relevance.

    Attributes
    ----------
    on_zero_activations : float
        Share of the relevance at the layer that sits on zero activations.
    around_the_layer : float or None
        Share of what reaches the input without crossing the layer; None if it was not measured.
    """

    on_zero_activations: float = 0.0
    around_the_layer: float | None = None


@dataclass(frozen=True, repr=False)
class Explanation:
    """K concept maps of N examples.

    Attributes
    ----------
    maps : tensor, shape (N, K, *input)
        One map for each concept.
    whole : tensor, shape (N, *input), or None
        The map of the wrapped method by itself.
    concept_relevance : tensor, shape (N, K)
        R_k = (U_kᵀa)ᵀ(U_kᵀc) at the layer, summed over positions.
    score : tensor, shape (N,)
        The explained output y.
    subspaces : Subspaces
    provenance : Provenance
        How the maps were made.
    losses : Losses
        What the maps cannot hold.
    adds_up_by_pixel : bool
        Whether maps of complete subspaces are meant to add up to `whole` in each pixel (LRP, gradients), or
        in total only (Integrated Gradients, Shapley values; Note B).
    is_relevance : bool
        Whether the maps hold relevance, whose sum is a part of the score, rather than gradients.
    kept : mapping of str to tensor of shape (N,), or None
        Relevance that does not reach the input, by what keeps it: position embeddings, class and register
        tokens, biases. With the sum of `whole` it is the score. None if it was not measured.
    position_relevance : tensor, shape (N, K, *positions), or None
        R_k at each position of the layer: (N, K, T) of tokens, (N, K, h, w) of convolutions.
    token_layout : TokenLayout or None
        Where the tokens of the layer lie in the image, if that is known.
    entries_per_feature : tensor, shape (1, *input) or (N, *input), or None
        How many entries of a map hold the relevance of one feature, which counts once in sums; None if each
        entry is a feature. Captum gives all pixels of a patch the relevance of the patch.
    """

    maps: Tensor
    whole: Tensor | None
    concept_relevance: Tensor
    score: Tensor
    subspaces: Subspaces
    provenance: Provenance
    losses: Losses
    adds_up_by_pixel: bool
    is_relevance: bool
    kept: Mapping[str, Tensor] | None = None
    position_relevance: Tensor | None = None
    token_layout: TokenLayout | None = None
    entries_per_feature: Tensor | None = None

    def __repr__(self) -> str:
        """One line: tensors of whole images would fill the screen."""
        n_examples, n_concepts, *shape = self.maps.shape
        return (
            f"Explanation({n_examples} examples, {n_concepts} concepts {self.subspaces.names}, maps "
            f"{tuple(shape)}, layer {self.provenance.layer!r})"
        )

    @property
    def token_maps(self) -> Tensor:
        """R_k at the positions of the layer as pictures (N, K, h, w), without class and register tokens."""
        return self.tokens().maps

    def tokens(self, n_prefix: int | None = None, grid: tuple[int, int] | None = None) -> TokenMaps:
        """`token_maps`, with what was dropped: how many tokens, and their share of the relevance.

        Parameters
        ----------
        n_prefix, grid : int, pair of int, optional
            Tokens before those of the image, and rows and columns of the rest. Default: as the model says,
            or the largest grid of the image's shape.
        """
        if self.position_relevance is None:
            raise ValueError("this explanation was made without the relevance of positions")
        return arrange(self.position_relevance, self.token_layout, n_prefix, grid)

    def __len__(self) -> int:
        return len(self.maps)

    def certificate(self) -> Certificate:
        """What adds up to what, in numbers."""
        total = self.score.double().abs().sum().clamp(min=_TINY)
        at_layer = self.concept_relevance.double()
        by_entry = self.maps.double()
        if self.entries_per_feature is not None:
            by_entry = by_entry / self.entries_per_feature[:, None]
        of_maps = by_entry.reshape(*self.maps.shape[:2], -1).sum(2)
        whole = None if self.whole is None else self.whole.double()
        relevance = self.is_relevance
        above = (self.score.double() - at_layer.sum(1)).abs().sum() / total
        return Certificate(
            is_complete=self.subspaces.is_complete,
            maps_to_whole=None
            if whole is None or not self.adds_up_by_pixel
            else _relative(self.maps.double().sum(1) - whole, whole),
            maps_to_layer=_relative(of_maps - at_layer, at_layer) if relevance else None,
            layer_to_score=float(above) if self.subspaces.is_complete else None,
            share_of_score=float(of_maps.sum() / self.score.double().sum())
            if relevance and not self._scores_cancel
            else None,
            on_zero_activations=self.losses.on_zero_activations,
            around_the_layer=self.losses.around_the_layer,
            kept=None if self.kept is None or self._scores_cancel else self._shares(self.kept),
            unaccounted=self._unaccounted(),
        )

    @property
    def _scores_cancel(self) -> bool:
        """Whether the scores of the examples sum to nothing but rounding, of which a share says nothing."""
        score = self.score.double()
        return bool(score.sum().abs() <= 1e-6 * score.abs().sum())

    def _shares(self, parts: Mapping[str, Tensor]) -> dict[str, float]:
        """The sums of parts over that of the scores."""
        total = self.score.double().sum()
        return {name: float(part.double().sum() / total) for name, part in parts.items()}

    def _unaccounted(self) -> float | None:
        """What is left of the score without the input's relevance and what is kept, over the score."""
        if self.kept is None or self.whole is None:
            return None
        rest = self.score.double() - self.whole.double().flatten(1).sum(1)
        for part in self.kept.values():
            rest = rest - part.double()
        return float(rest.abs().sum() / self.score.double().abs().sum().clamp(min=_TINY))


@dataclass(frozen=True)
class Certificate:
    """What adds up to what; every number is a relative difference or a share. None: not defined here.

    Attributes
    ----------
    is_complete : bool
        Whether the subspaces span the whole space. If not, the maps miss what lies outside of them.
    maps_to_whole : float or None
        Largest difference between Σ_k maps and the whole map in a pixel, over the largest value of the whole.
    maps_to_layer : float or None
        Largest difference between Σ_p R_pk and R_k at the layer, over the largest R_k: what biases,
        stabilisers, position embeddings and learned tokens below the layer keep, or a path integral misses.
    layer_to_score : float or None
        Difference between Σ_k R_k and the score, over the score: what biases and stabilisers above the layer
        keep, and what goes around it.
    share_of_score : float or None
        Sum of all maps over the score; None also where the scores of the examples cancel.
    on_zero_activations, around_the_layer : float or None
        As in `Losses`.
    kept : dict or None
        Share of the score that does not reach the input, by what keeps it; None where the scores cancel.
    unaccounted : float or None
        What is left of the score without the sum of the whole map and what is kept, over the score: relevance
        that got lost where no rule explains it.
    """

    is_complete: bool
    maps_to_whole: float | None
    maps_to_layer: float | None
    layer_to_score: float | None
    share_of_score: float | None
    on_zero_activations: float
    around_the_layer: float | None
    kept: dict[str, float] | None = None
    unaccounted: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The numbers by name."""
        return asdict(self)

    def __str__(self) -> str:
        complete = "complete" if self.is_complete else "not complete: maps miss what lies outside"
        kept = [f"kept by {name}: {_shown(share)} of the score" for name, share in (self.kept or {}).items()]
        if self.unaccounted is not None:
            kept.append(
                f"score without the whole map and what is kept: {_shown(self.unaccounted)} of the score"
            )
        return "\n".join(
            [
                f"subspaces: {complete}",
                f"Σ_k maps against the whole map: {_off(self.maps_to_whole)}",
                f"Σ_pixels of each map against R_k at the layer: {_off(self.maps_to_layer)}",
                f"Σ_k R_k at the layer against the score: {_off(self.layer_to_score)}",
                f"sum of all maps: {_shown(self.share_of_score)} of the score",
                f"lost on zero activations: {_shown(self.on_zero_activations)}",
                f"goes around the layer: {_shown(self.around_the_layer)}",
                *kept,
            ]
        )


_TINY = torch.finfo(torch.float64).tiny


def _relative(difference: Tensor, reference: Tensor) -> float:
    return float(difference.abs().max() / reference.abs().max().clamp(min=_TINY))


def _off(value: float | None) -> str:
    return _shown(value) if value is None else f"off by {_shown(value)}"


def _shown(value: float | None) -> str:
    if value is None:
        return "not defined here"
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.1%}"
