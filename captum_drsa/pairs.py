"""Pairs (a, c) at random positions of the images of a loader (Note E)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from drsa_core import Pairs, PairStore, sample_pairs
from torch import Tensor
from tqdm.auto import tqdm

from .request import Inputs


def pairs_from_loader(
    context: Callable[[Inputs], tuple[Tensor, Tensor]],
    loader: Iterable[Any],
    positions: int | None = 20,
    random_state: int | None = None,
    progress: bool = False,
    store: PairStore | None = None,
    channel_dim: int = 1,
    device: torch.device | None = None,
) -> Pairs:
    """Pairs at random positions of every image of a loader.

    Parameters
    ----------
    context : callable
        Inputs ↦ activations and contexts, shapes (N, …, D, …).
    loader : iterable
        Batches: a tensor, or a tuple or list whose first entry is the tensor, or the tuple of tensors.
    positions : int or None
        Positions per image; None for all.
    random_state : int, optional
        Seed of the positions; the positions of a batch depend on it and on the number of the batch alone.
    progress : bool
        Show a progress bar.
    store : PairStore, optional
        Where to keep the pairs of each batch. Batches that it holds already are not computed again.
    channel_dim : int
        Axis of the features in the activation.
    device : torch.device, optional
        Where to move the inputs.
    """
    seed = torch.Generator().seed() if random_state is None else random_state
    done = 0 if store is None else len(store)
    parts: list[Pairs] = []
    for number, batch in enumerate(tqdm(loader, desc="collecting pairs", unit="batch", disable=not progress)):
        if number < done:
            continue
        a, c = context(_inputs_of(batch, device))
        # 2**63 bounds what a generator takes; the odd factor keeps the seeds of neighbours apart.
        generator = torch.Generator().manual_seed((seed + 0x9E3779B97F4A7C15 * number) % 2**63)
        pairs = sample_pairs(a, c, positions, generator, channel_dim)
        if store is None:
            parts.append(pairs)
        else:
            store.append(pairs)
    if store is not None and len(store):
        return store.load()
    if not parts:
        raise ValueError("the loader gave no batches; an iterator can be used up only once")
    return Pairs.concatenate(parts)


def _inputs_of(batch: Any, device: torch.device | None) -> Inputs:
    inputs = batch
    if isinstance(batch, list | tuple) and batch:
        inputs = batch[0]
        if isinstance(inputs, list | tuple):
            inputs = tuple(inputs)
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise TypeError(
            "the loader must give tensors, or tuples whose first entry is the input (a tensor or a tuple of "
            f"tensors), got {type(batch).__name__}"
        )
    moved = tuple(tensor.to(device) for tensor in tensors)
    return moved if isinstance(inputs, tuple) else moved[0]
