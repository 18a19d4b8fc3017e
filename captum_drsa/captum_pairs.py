"""`collect`: activation and context pairs for the solvers, without an attributor to keep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from captum.attr import Attribution
from drsa_core import Pairs, PairStore
from drsa_core.layer import ContextMethod
from drsa_core.targets import Target
from torch import nn

from .attribution import DisentangledAttribution


def collect(
    attribution_method: Attribution,
    layer: str | nn.Module,
    loader: Iterable[Any],
    target: Target | str,
    positions: int | None = 20,
    *,
    context_method: str | ContextMethod | Attribution | None = None,
    channel_dim: int = 1,
    random_state: int | None = None,
    progress: bool | None = None,
    store: PairStore | None = None,
    skip_tokens: int = 0,
) -> Pairs:
    """Activation and context pairs at random positions of every image of a loader (Note E).

    Parameters
    ----------
    attribution_method, layer, context_method, channel_dim
        As in `DisentangledAttribution`.
    loader : iterable
        Batches: a tensor, or a tuple or list whose first entry is the tensor, or the tuple of tensors.
    target : int, tuple, list or tensor of int, function of the output, or "label"
        The explained output: one for all images, one for each image in the order of the loader, a function
        from the output (N, …) to the scores (N,), or "label" for the second entry of every batch.
    positions : int or None
        Positions per image; None for all.
    random_state : int, optional
        Seed of the positions.
    progress : bool, optional
        Show a progress bar. Default: on a terminal.
    store : PairStore, optional
        Keeps the pairs of each batch on disk; batches that it holds already are not computed again.
    skip_tokens : int
        How many tokens to leave out at the beginning of each example: class and register tokens.
    """
    wrapped = DisentangledAttribution(
        attribution_method, layer, context_method=context_method, channel_dim=channel_dim
    )
    return wrapped.collect(loader, target, positions, random_state, progress, store, skip_tokens)
