"""`collect`: activations and contexts for the solvers, without an attributor to keep (Note E)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from drsa_core import Pairs, PairStore
from drsa_core.targets import Target
from torch import nn
from zennit.attribution import Attributor, Gradient
from zennit.core import Composite

from .attributor import DisentangledAttributor


def collect(
    model: nn.Module,
    composite: Composite | Attributor | None,
    layer: str | nn.Module,
    loader: Iterable[Any],
    target: Target | str,
    positions: int | None = 20,
    *,
    channel_dim: int = 1,
    slot: str | None = None,
    random_state: int | None = None,
    store: PairStore | None = None,
    progress: bool | None = None,
    skip_tokens: int = 0,
) -> Pairs:
    """Collect (a, c) pairs at a layer, with one forward and one backward pass for each batch.

    Parameters
    ----------
    model : module
        The model to explain, in eval mode. Batches are moved to its device.
    composite : Composite, Attributor or None
        Zennit's rules; None gives the contexts of Gradient × Input, c = ∂y/∂a (Note B.2). An attributor gives
        the contexts that go with it: `IntegratedGradients` those of a path.
    layer : str or module
        The layer, or its dotted name.
    loader : iterable
        Batches: input tensors, or tuples that start with one.
    target : int, list or tensor of int, function of the output, or "label"
        Output to explain: one for all images, one for each image in the order of the loader, a function from
        the output (N, …) to the scores (N,), or "label" for the second entry of every batch.
    positions : int or None
        Random positions per image, without repetition; None for all.
    channel_dim, slot
        As in `SubspaceFilter`.
    random_state : int, optional
        Seed of the positions.
    store : PairStore, optional
        Where to keep each batch as it is done. Batches that it holds already are not computed again.
    progress : bool, optional
        Show a progress bar. Default: on a terminal.
    skip_tokens : int
        How many tokens to leave out at the beginning of each image: class and register tokens.

    Returns
    -------
    Pairs
        On the CPU. Relevance starts as the output itself, R = y (Note A), so that Σ aᵀc over all positions
        of an image is y where the rules conserve it.
    """
    attributor = composite if isinstance(composite, Attributor) else Gradient(model, composite)
    if attributor.model is not model:
        raise ValueError("the attributor explains another model than the one given; pass its own model")
    wrapped = DisentangledAttributor(attributor, layer, channel_dim=channel_dim, slot=slot)
    return wrapped.collect(loader, target, positions, random_state, progress, store, skip_tokens)
