"""The protocol of both wrappers: `collect`, `fit`, `context`, `concept_relevance`, `explain`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from .collection import collect_pairs
from .distributed import ALONE, Ranks
from .drsa import DRSA
from .explanation import Explanation
from .layer import Inputs, Request, check_fits, sum_over_positions
from .pair_store import PairStore
from .pairs import Pairs
from .prca import Solver, learn_subspaces
from .provenance import Provenance, TargetDescription, check_provenance, describe_target
from .subspaces import Subspaces
from .targets import Target
from .token_maps import find_layout

_T = TypeVar("_T")


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
    def explain(self, inputs: Inputs, target: Target) -> Explanation:
        """K maps (N, K, *input), with the whole map and what adds up to what."""

    @abstractmethod
    def _origin(self) -> dict[str, Any]:
        """`backend`, `method`, `layer` and `model` of a `Provenance`."""

    @abstractmethod
    def _request(self, inputs: Any, target: Target) -> Request:
        """One batch, for runs of the bare model."""

    @abstractmethod
    def _known_model(self) -> nn.Module:
        """The model, or the part of it that is known."""

    def _in_context(self, work: Callable[[], _T]) -> _T:
        """`work()` while the model is as this method explains it, e.g. with its batch norms merged."""
        return work()

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
        """Pairs (a, c) at random positions of every image of a loader, on the CPU (Note E).

        Parameters
        ----------
        loader : iterable
            Batches: a tensor, or a tuple or list whose first entry is the tensor, or the tuple of tensors.
            They are moved to the model's device.
        target : int, list or tensor of int, function of the output, or "label"
            One for all images, one for each image in the order of the loader, a function from the output to
            the scores, or "label" for the second entry of every batch.
        positions : int or None
            Random positions per image, without repetition; None for all.
        random_state : int, optional
            Seed of the positions.
        progress : bool, optional
            Show a progress bar. Default: on a terminal.
        store : PairStore, optional
            Where to keep each batch as it is done. Batches that it holds already are not computed again.
        skip_tokens : int
            How many tokens to leave out at the beginning of each example: 1 for a class token, more with
            registers (timm's `num_prefix_tokens`). They stand for no place of the input.
        ranks : Ranks
            From `joined_ranks`, where `torchrun` started several processes: each does and returns its part.
        """
        parameter = next(self._known_model().parameters(), None)
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
        loader, target, positions, random_state, progress, store, skip_tokens, ranks
            As in `collect`. All ranks end with the same subspaces, those of one process up to rounding.
        solver : PRCA, DRSA, …, optional
            Default `DRSA(n_subspaces=4)`.
        """
        solver = DRSA(n_subspaces=4, random_state=random_state) if solver is None else solver
        pairs = self.collect(loader, target, positions, random_state, progress, store, skip_tokens, ranks)
        self.subspaces = learn_subspaces(solver, pairs, ranks)
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

    def _check_use(
        self, target: Target | TargetDescription, stacklevel: int, n_outputs: Callable[[], int | None]
    ) -> None:
        """Compare where the subspaces were made with what they are used for.

        `n_outputs` gives the number of outputs, None if there is none; only for negative targets is it asked.
        """
        made = self._fitted().provenance
        if made is None:
            return
        described = target if isinstance(target, str) else describe_target(target, tuple_is_index=True)
        used = self._used_for(described)
        if made.target != used.target and (made.counts_from_the_end or used.counts_from_the_end):
            n = n_outputs()
            made, used = made.with_outputs(n), used.with_outputs(n)
        check_provenance(made, used, "subspaces", self.strict, stacklevel + 1)

    def _check_fits(self, activation: Tensor) -> None:
        check_fits(activation, self._fitted().n_features, self.layer_name, self.channel_dim)

    def _relevance(self, activation: Tensor, context: Tensor) -> Tensor:
        """R_k = (U_kᵀa)ᵀ(U_kᵀc), summed over positions, shape (N, K)."""
        return sum_over_positions(self._position_relevance(activation, context), 1)

    def _position_relevance(self, activation: Tensor, context: Tensor) -> Tensor:
        """R_k at each position, shape (N, K, *positions)."""
        self._check_fits(activation)
        per_position = self._fitted().relevance(activation, context, self.channel_dim)
        return per_position.movedim(self.channel_dim, 1)

    def _at_positions(self, inputs: Inputs, activation: Tensor, context: Tensor) -> dict[str, Any]:
        """What an `Explanation` says about positions: `position_relevance` and `token_layout`."""
        relevance = self._position_relevance(activation, context).detach()
        layout = None
        if relevance.ndim == 3:
            layout = find_layout(self._known_model(), inputs, int(relevance.shape[2]))
        return {"position_relevance": relevance, "token_layout": layout}


def check_subspaces(subspaces: object) -> Subspaces | None:
    """Subspaces as a user gives them to a wrapper, or None."""
    if subspaces is None or isinstance(subspaces, Subspaces):
        return subspaces
    raise TypeError(
        f"subspaces must be a drsa_core.Subspaces, got {type(subspaces).__name__}; use "
        "Subspaces(basis, dims), Subspaces.load(path), or the subspaces_ of a fitted solver"
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
            "this model knows padding by embeddings that are zero, and noise would make words of it, which "
            "changes the score; explain sentences of one length together, without padding, or use a method "
            "without noise"
        )
