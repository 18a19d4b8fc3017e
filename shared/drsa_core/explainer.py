"""The protocol of both wrappers, and what they give: `Explanation` and its `Certificate`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from .collection import collect_pairs
from .distributed import ALONE, Ranks
from .drsa import DRSA
from .layer import Inputs, Request, check_fits, copies, sum_over_positions
from .model_state import restored
from .pair_store import PairStore
from .pairs import Pairs
from .prca import Solver, learn_subspaces
from .provenance import Provenance, TargetDescription, check_provenance, describe_target
from .subspaces import Subspaces
from .targets import Target
from .token_maps import TokenLayout, TokenMaps, arrange, find_layout


class Explainer(ABC):
    """What `zennit_drsa.DisentangledAttributor` and `captum_drsa.DisentangledAttribution` have in common.

    `target` is an int, one int for each example (a list, a tensor or an array), or a function from the
    model's output (N, …) to the scores (N,).

    Attributes
    ----------
    layer_name, layer : str, module
        Where concepts are found.
    subspaces : Subspaces or None
        The concepts; None before `fit`.
    channel_dim : int
        Axis of the features in the layer's output.
    strict : bool
        Whether subspaces that were learned for something else are an error instead of a warning.
    """

    layer_name: str
    layer: nn.Module
    subspaces: Subspaces | None
    channel_dim: int
    strict: bool

    @abstractmethod
    def context(self, inputs: Inputs, target: Target) -> tuple[Tensor, Tensor]:
        """Activations a and contexts c at the layer, shapes (N, …, D, …)."""

    @abstractmethod
    def concept_relevance(self, inputs: Inputs, target: Target) -> Tensor:
        """Relevance R_k = (U_kᵀa)ᵀ(U_kᵀc) of each concept, summed over positions, shape (N, K)."""

    @abstractmethod
    def explain(self, inputs: Inputs, target: Target) -> Explanation:
        """K maps (N, K, *input), with the whole map and what adds up to what."""

    @abstractmethod
    def _origin(self) -> dict[str, Any]:
        """`backend`, `method`, `layer` and `model` of a `Provenance`; called inside `_session`."""

    @abstractmethod
    def _request(self, inputs: Any, target: Target) -> Request:
        """One batch, for runs of the bare model."""

    @abstractmethod
    def _known_model(self) -> nn.Module:
        """The model, or the part of it that is known."""

    def _session(self) -> AbstractContextManager[Any]:
        """Context in which several calls share what is put on the model."""
        return nullcontext()

    def scores_with(self, inputs: Inputs, target: Target, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Scores y (N,) of the model with `change(a)` in place of the layer's activation a (N, …, D, …)."""
        with self._session(), restored(self._known_model()), torch.no_grad():
            request = self._request(inputs, target)
            with request.running(change) as output:
                return request.scores(output)

    def _n_outputs(self, inputs: Inputs, args: tuple[Any, ...] = ()) -> int | None:
        """Number of the model's outputs; None if its output is not (n, n_outputs)."""
        with self._session(), restored(self._known_model()), torch.no_grad():
            request = self._request(inputs, None)
            output = request.forward(*copies((*request.inputs, *request.args, *args)))
        return output.shape[1] if isinstance(output, Tensor) and output.ndim == 2 else None

    # ------------------------------------------------------------------ learning the concepts

    def collect(
        self,
        loader: Iterable[Any],
        target: Target | str,
        positions: int | None = 20,
        random_state: int | None = None,
        progress: bool | None = None,
        store: PairStore | None = None,
        skip_tokens: int = 0,
        ranks: Ranks = ALONE,
    ) -> Pairs:
        """Pairs (a, c) at random positions of every example of a loader, on the CPU (Note E).

        Parameters
        ----------
        loader : iterable
            Batches: a tensor, or a tuple or list whose first entry is the tensor, or the tuple of tensors.
            They are moved to the model's device.
        target : int, list or tensor of int, function of the output, or "label"
            One for all examples, one for each in the order of the loader, a function from the output to the
            scores, or "label" for the second entry of every batch.
        positions : int or None
            Random positions per example, without repetition; None for all.
        random_state : int, optional
            Seed of the positions.
        progress : bool, optional
            Show a progress bar. Default: on a terminal.
        store : PairStore, optional
            Where to save each batch as it is done. Batches that it holds already are not computed again.
        skip_tokens : int
            How many tokens to leave out at the beginning of each example: 1 for a class token, more with
            registers (timm's `num_prefix_tokens`). They stand for no place of the input.
        ranks : Ranks
            From `joined_ranks`, where `torchrun` started several processes: each does and returns its part.
        """
        parameter = next(self._known_model().parameters(), None)
        with self._session():
            return collect_pairs(
                self.context,
                loader,
                target,
                positions=positions,
                random_state=random_state,
                store=store,
                progress=progress,
                device=None if parameter is None else parameter.device,
                channel_dim=self.channel_dim,
                skip_tokens=skip_tokens,
                ranks=ranks,
                **self._origin(),
            )

    def fit(
        self,
        loader: Iterable[Any],
        target: Target | str,
        solver: Solver | None = None,
        positions: int | None = 20,
        random_state: int | None = None,
        progress: bool | None = None,
        store: PairStore | None = None,
        skip_tokens: int = 0,
        ranks: Ranks = ALONE,
    ) -> Self:
        """Collect pairs from a loader and learn `subspaces` from them.

        Parameters
        ----------
        solver : PRCA, DRSA, …, optional
            Default `DRSA(n_subspaces=4)`.
        random_state : int, optional
            Seed of the positions, and of the solver unless it has one.
        loader, target, positions, progress, store, skip_tokens, ranks
            As in `collect`. All ranks end with the same subspaces, those of one process up to rounding.
        """
        solver = DRSA(n_subspaces=4) if solver is None else solver
        pairs = self.collect(loader, target, positions, random_state, progress, store, skip_tokens, ranks)
        takes_seed = getattr(solver, "random_state", random_state) is None
        if takes_seed:
            vars(solver)["random_state"] = random_state
        try:
            self.subspaces = learn_subspaces(solver, pairs, ranks)
        finally:
            if takes_seed:
                vars(solver)["random_state"] = None
        return self

    # ------------------------------------------------------------------ using them

    def _fitted(self) -> Subspaces:
        if self.subspaces is None:
            raise ValueError(
                "there are no subspaces yet: call fit(loader, target), or pass subspaces=Subspaces.load(path)"
            )
        return self.subspaces

    def _used_for(self, target: TargetDescription) -> Provenance:
        return Provenance(**self._origin(), channel_dim=self.channel_dim, target=target)

    def _check_use(self, target: Target, inputs: Inputs, args: tuple[Any, ...] = ()) -> None:
        """Compare what the subspaces were learned for with what they are used for."""
        made = self._fitted().provenance
        if made is None:
            return
        used = self._used_for(describe_target(target, tuple_is_index=True))
        if made.target != used.target and (made.counts_from_the_end or used.counts_from_the_end):
            n = self._n_outputs(inputs, args)  # negative targets count from the end
            made, used = made.with_outputs(n), used.with_outputs(n)
        check_provenance(made, used, "subspaces", self.strict)

    def _position_relevance(self, activation: Tensor, context: Tensor) -> Tensor:
        """R_k at each position, shape (N, K, *positions)."""
        check_fits(activation, self._fitted().n_features, self.layer_name, self.channel_dim)
        per_position = self._fitted().relevance(activation, context, self.channel_dim)
        return per_position.movedim(self.channel_dim, 1)

    def _relevance(self, activation: Tensor, context: Tensor) -> Tensor:
        """R_k = (U_kᵀa)ᵀ(U_kᵀc), summed over positions, shape (N, K)."""
        return sum_over_positions(self._position_relevance(activation, context), 1)

    def _explanation(self, inputs: Inputs, a: Tensor, c: Tensor, target: Target, **parts: Any) -> Explanation:
        """An `Explanation` from activations and contexts at the layer and its other parts."""
        relevance = self._position_relevance(a, c).detach()
        return Explanation(
            concept_relevance=sum_over_positions(relevance, 1),
            position_relevance=relevance,
            token_layout=find_layout(self._known_model(), inputs, int(relevance.shape[2]))
            if relevance.ndim == 3
            else None,
            subspaces=self._fitted(),
            provenance=self._used_for(describe_target(target, tuple_is_index=True)),
            **parts,
        )


def as_subspaces(subspaces: object) -> Subspaces | None:
    """Subspaces as a user gives them to a wrapper, or None."""
    if subspaces is None or isinstance(subspaces, Subspaces):
        return subspaces
    raise TypeError(
        f"subspaces must be a drsa_core.Subspaces, got {type(subspaces).__name__}; use Subspaces(basis, "
        "dims), Subspaces.load(path), or the subspaces_ of a fitted solver"
    )


def single_input(inputs: Inputs) -> Tensor:
    """The one input of a method that takes no tuple of them."""
    if isinstance(inputs, Tensor):
        return inputs
    if isinstance(inputs, tuple) and len(inputs) == 1:
        return inputs[0]
    raise TypeError(
        f"this takes one input tensor (N, …), got {type(inputs).__name__}; captum_drsa's `attribute` takes "
        "several"
    )


def refuse_noise_on_padding(model: nn.Module, x: Tensor) -> None:
    """Refuse noise where zeros say what is padding: with it nothing is, and all tokens would be seen."""
    zeros_count = any(getattr(module, "zero_is_padding", False) for module in model.modules())
    if zeros_count and bool((x == 0).all(-1).any()):
        raise ValueError(
            "this model knows padding by embeddings that are zero, and noise would make words of it; explain "
            "sentences of one length together, without padding, or use a method without noise"
        )


# ---------------------------------------------------------------------- what an explanation holds


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
        The map of the wrapped method.
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
        Whether maps of complete subspaces add up to `whole` in each pixel (LRP, gradients), or in total only
        (Integrated Gradients, Shapley values; Note B).
    is_relevance : bool
        Whether the maps hold relevance, whose sum is a part of the score, rather than gradients.
    absorbed : mapping of str to tensor of shape (N,), or None
        Relevance that does not reach the input, by what absorbs it: position embeddings, class and register
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
    absorbed: Mapping[str, Tensor] | None = None
    position_relevance: Tensor | None = None
    token_layout: TokenLayout | None = None
    entries_per_feature: Tensor | None = None

    def __repr__(self) -> str:
        n_examples, n_concepts, *shape = self.maps.shape
        return (
            f"Explanation({n_examples} examples, {n_concepts} concepts {self.subspaces.names}, maps "
            f"{tuple(shape)}, layer {self.provenance.layer!r})"
        )

    def __len__(self) -> int:
        return len(self.maps)

    @property
    def token_maps(self) -> Tensor:
        """R_k at the positions of the layer as pictures (N, K, h, w), without class and register tokens."""
        return self.tokens().maps

    def tokens(self, n_prefix: int | None = None, grid: tuple[int, int] | None = None) -> TokenMaps:
        """`token_maps`, with what was dropped: how many tokens, and their share of the relevance.

        Parameters
        ----------
        n_prefix, grid : int, pair of int, optional
            Tokens before those of the image, and rows and columns of the rest. Default: as the model says, or
            the largest grid of the image's shape.
        """
        if self.position_relevance is None:
            raise ValueError("this explanation was made without the relevance of positions")
        return arrange(self.position_relevance, self.token_layout, n_prefix, grid)

    def certificate(self) -> Certificate:
        """What adds up to what, in numbers; each is that of the worst example."""
        score, at_layer, maps = self.score.double(), self.concept_relevance.double(), self.maps.double()
        by_feature = maps if self.entries_per_feature is None else maps / self.entries_per_feature[:, None]
        of_maps = by_feature.flatten(2).sum(2)
        # Where evidence for and against cancels in the score, a share of it says nothing.
        defined = torch.nonzero(score.abs() > 1e-3 * at_layer.abs().sum(1)).flatten()
        share = of_maps.sum(1) / score
        worst = int(defined[(share[defined] - 1).abs().argmax()]) if len(defined) else None
        missed = ((score - at_layer.sum(1)) / score).abs()[defined]
        maps_to_whole = absorbed = unaccounted = None
        if self.whole is not None and self.adds_up_by_pixel:
            whole = self.whole.double()
            maps_to_whole = _worst((maps.sum(1) - whole).flatten(1), whole.flatten(1))
        if self.absorbed is not None and worst is not None:
            parts = {name: part.double() for name, part in self.absorbed.items()}
            absorbed = {name: float(part[worst] / score[worst]) for name, part in parts.items()}
            if self.whole is not None:
                rest = score - self.whole.double().flatten(1).sum(1) - sum(parts.values())
                unaccounted = float((rest / score).abs()[defined].max())
        return Certificate(
            is_complete=self.subspaces.is_complete,
            maps_to_whole=maps_to_whole,
            maps_to_layer=_worst(of_maps - at_layer, at_layer) if self.is_relevance else None,
            layer_to_score=float(missed.max()) if self.subspaces.is_complete and len(defined) else None,
            share_of_score=float(share[worst]) if self.is_relevance and worst is not None else None,
            on_zero_activations=self.losses.on_zero_activations,
            around_the_layer=self.losses.around_the_layer,
            absorbed=absorbed,
            unaccounted=unaccounted,
        )


@dataclass(frozen=True)
class Certificate:
    """What adds up to what, for the worst example; None: not defined here.

    Attributes
    ----------
    is_complete : bool
        Whether the subspaces span the whole space. If not, the maps miss what lies outside of them.
    maps_to_whole : float or None
        Largest difference between Σ_k maps and the whole map in a pixel, over the largest value of the whole.
    maps_to_layer : float or None
        Largest difference between Σ_p R_pk and R_k at the layer, over the largest R_k: what is absorbed by
        biases, stabilisers, position embeddings and learned tokens below the layer, or missed by a path
        integral.
    layer_to_score : float or None
        Difference between Σ_k R_k and the score, over the score: what is absorbed by biases and stabilisers
        above the layer, and what goes around it.
    share_of_score : float or None
        Sum of all maps over the score, the one farthest from 1. None where the evidence cancels in all
        scores.
    on_zero_activations, around_the_layer : float or None
        As in `Losses`.
    absorbed : dict or None
        Share of the score that does not reach the input, by what absorbs it, in the example of
        `share_of_score`.
    unaccounted : float or None
        What is left of the score without the sum of the whole map and what is absorbed, over the score:
        relevance that got lost where no rule explains it.
    """

    is_complete: bool
    maps_to_whole: float | None
    maps_to_layer: float | None
    layer_to_score: float | None
    share_of_score: float | None
    on_zero_activations: float
    around_the_layer: float | None
    absorbed: dict[str, float] | None = None
    unaccounted: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The numbers by name."""
        return asdict(self)

    def __str__(self) -> str:
        complete = "complete" if self.is_complete else "not complete: maps miss what lies outside"
        lines = [
            f"subspaces: {complete}",
            f"Σ_k maps against the whole map: {_off(self.maps_to_whole)}",
            f"Σ_pixels of each map against R_k at the layer: {_off(self.maps_to_layer)}",
            f"Σ_k R_k at the layer against the score: {_off(self.layer_to_score)}",
            f"sum of all maps: {_shown(self.share_of_score)} of the score",
            f"lost on zero activations: {_shown(self.on_zero_activations)}",
            f"goes around the layer: {_shown(self.around_the_layer)}",
        ]
        for name, share in (self.absorbed or {}).items():
            lines.append(f"absorbed by {name}: {_shown(share)} of the score")
        if self.unaccounted is not None:
            lines.append(f"not accounted for: {_shown(self.unaccounted)} of the score")
        return "\n".join(lines)


def _worst(difference: Tensor, reference: Tensor) -> float:
    """Largest |difference| of an example over its largest |reference|, both (N, n), for the worst example."""
    tiny = torch.finfo(torch.float64).tiny
    return float((difference.abs().amax(1) / reference.abs().amax(1).clamp(min=tiny)).max())


def _off(value: float | None) -> str:
    return _shown(value) if value is None else f"off by {_shown(value)}"


def _shown(value: float | None) -> str:
    if value is None:
        return "not defined here"
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.1%}"
