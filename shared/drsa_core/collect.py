"""From a loader of images to pairs (a, c): the one loop behind the `collect` of both adapters (Note E)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from .layer.request import Inputs
from .pair_store import PairStore
from .pairs import Pairs, sample_pairs
from .parameters import as_int, as_seed
from .provenance import Provenance, describe_target, target_order
from .target import LABEL, Target, check_length, targets_of_batch
from .validation import as_float_tensor


def collect_pairs(
    context: Callable[[Inputs, Target], tuple[Tensor, Tensor]],
    loader: Iterable[Any],
    target: Target | str,
    *,
    positions: int | None = 20,
    random_state: int | None = None,
    store: PairStore | None = None,
    progress: bool | None = None,
    device: torch.device | None = None,
    channel_dim: int = 1,
    skip_tokens: int = 0,
    **origin: Any,
) -> Pairs:
    """Pairs at random positions of every image of a loader.

    Parameters
    ----------
    context : function
        Inputs and their target ↦ activations and contexts, shapes (N, …, D, …).
    loader : iterable
        Batches: a tensor, or a tuple or list whose first entry is the tensor, or the tuple of tensors.
    target : int, list or tensor of int, function of the output, or "label"
        One for all images, one for each image in the order of the loader, a function from the model's output
        to the scores, or "label" for the second entry of every batch.
    positions : int or None
        Random positions per image, without repetition; None for all.
    random_state : int, optional
        Seed of the positions. Those of an image depend on it and on the image's number in the loader alone,
        not on the size of the batches or the backend.
    store : PairStore, optional
        Where to keep each batch as it is done. Batches that it holds already are not computed again.
    progress : bool, optional
        Show a progress bar. Default: on a terminal.
    device : torch.device, optional
        Where to move the inputs.
    channel_dim : int
        Axis of the features in the activation.
    skip_tokens : int
        How many tokens to leave out at the beginning of each (N, T, D): class and register tokens, which
        stand for no place of the input.
    **origin
        `backend`, `method`, `layer` and `model` of the pairs' `Provenance`.
    """
    if isinstance(loader, Tensor):
        raise TypeError(
            f"loader must give batches, got one tensor of shape {tuple(loader.shape)}; for one batch pass [x]"
        )
    if isinstance(target, str) and target != LABEL:
        raise ValueError(f"target must be an index, a list of them, a function or {LABEL!r}, got {target!r}")
    positions = None if positions is None else as_int(positions, "positions", 1)
    skip_tokens = as_int(skip_tokens, "skip_tokens", 0)
    random_state = as_seed(random_state)
    seed = torch.Generator().seed() if random_state is None else random_state
    provenance = Provenance(
        **origin,
        channel_dim=channel_dim,
        target=target if isinstance(target, str) else describe_target(target, tuple_is_index=True),
        positions=positions,
        random_state=random_state,
        skip_tokens=skip_tokens,
        target_order=None if isinstance(target, str | tuple) else target_order(target),
    )
    n_images = 0
    with _kept(store, provenance) as (n_done, keep, load):
        hidden = None if progress is None else not progress  # None: tqdm shows it on a terminal
        n_batches = 0
        for batch in tqdm(loader, desc="collecting pairs", unit="batch", disable=hidden):
            inputs = _inputs_of(batch, device)
            n_batch = len(inputs[0] if isinstance(inputs, tuple) else inputs)
            if not n_batch:
                continue
            first, n_images = n_images, n_images + n_batch
            n_batches += 1
            if n_batches <= n_done:
                continue
            of_batch = _labels_of(batch) if isinstance(target, str) else target
            chosen = targets_of_batch(of_batch, 0 if isinstance(target, str) else first, n_batch)
            a, c = context(inputs, chosen)
            a, c = (_without_first(values, skip_tokens, channel_dim) for values in (a, c))
            keep(_at_positions(a, c, positions, seed, first, channel_dim))
        if not isinstance(target, str):
            check_length(target, n_images)
        if not n_images:
            raise ValueError("the loader gave no images; an iterator can be used up only once")
        return load()


def _without_first(values: Tensor, n_tokens: int, channel_dim: int) -> Tensor:
    """(N, T, D), or (N, D, T), without its first tokens."""
    if not n_tokens:
        return values
    if values.ndim != 3:
        raise ValueError(
            f"skip_tokens={n_tokens} is for layers with tokens (N, T, D), got an activation of shape "
            f"{tuple(values.shape)}; leave it at 0"
        )
    axis = 3 - channel_dim % 3  # that of examples is 0, and features have one of 1 and 2
    n_rest = values.shape[axis] - n_tokens
    if n_rest < 1:
        raise ValueError(
            f"skip_tokens={n_tokens} leaves nothing of the {values.shape[axis]} tokens of an activation of "
            f"shape {tuple(values.shape)} with channel_dim={channel_dim}"
        )
    return values.narrow(axis, n_tokens, n_rest)


def _at_positions(
    a: Tensor, c: Tensor, positions: int | None, seed: int, first: int, channel_dim: int
) -> Pairs:
    parts = []
    a, c = as_float_tensor(a, "activations"), as_float_tensor(c, "contexts")
    for i in range(len(a)):
        # 2**63 bounds what a generator takes; the odd factor keeps the seeds of neighbours apart.
        generator = torch.Generator().manual_seed((seed + 0x9E3779B97F4A7C15 * (first + i)) % 2**63)
        parts.append(sample_pairs(a[i : i + 1], c[i : i + 1], positions, generator, channel_dim))
    return Pairs.concatenate(parts)


@contextmanager
def _kept(
    store: PairStore | None, provenance: Provenance
) -> Iterator[tuple[int, Callable[[Pairs], None], Callable[[], Pairs]]]:
    """How many batches are there, where to put the next one, and how to get all."""
    if store is not None:
        with store.writing(provenance) as writer:
            yield writer.n_done, writer.append, store.load
        return
    parts: list[Pairs] = []

    def keep(pairs: Pairs) -> None:
        parts.append(pairs.to("cpu"))

    yield 0, keep, lambda: Pairs.concatenate(parts).with_provenance(provenance)


def _inputs_of(batch: Any, device: torch.device | None) -> Inputs:
    inputs = batch
    if isinstance(batch, list | tuple) and batch:
        inputs = batch[0]
        if isinstance(inputs, list | tuple):
            inputs = tuple(inputs)
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise TypeError(
            "loader must give tensors, or tuples or lists that start with the input (a tensor or a tuple of "
            f"tensors), got {type(batch).__name__}; NumPy arrays become tensors with torch.as_tensor"
        )
    moved = tuple(tensor.detach().to(device) for tensor in tensors)
    return moved if isinstance(inputs, tuple) else moved[0]


def _labels_of(batch: Any) -> Tensor:
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        raise TypeError(f"target={LABEL!r} needs batches (inputs, labels, …), got {type(batch).__name__}")
    return torch.as_tensor(batch[1])
