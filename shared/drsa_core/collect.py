"""From a loader of images to pairs (a, c): the one loop behind the `collect` of both adapters (Note E)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from .checks import as_float_tensor, as_int, as_seed
from .distributed import ALONE, RankError, Ranks
from .layer import Inputs
from .numbered_batches import NumberedBatches, inputs_of
from .pair_store import PairStore, PairWriter
from .pairs import Pairs, sample_pairs
from .provenance import Provenance, describe_target, target_order
from .targets import LABEL, Target, check_length, targets_of_batch


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
    ranks: Ranks = ALONE,
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
    ranks : Ranks
        From `joined_ranks`. Each rank does an equal part of the batches and returns its pairs; in rank order
        these are, bit for bit, those of one process. The store may be one folder for all ranks, or one on
        each machine.
    **origin
        `backend`, `method`, `layer` and `model` of the pairs' `Provenance`.
    """
    if isinstance(target, str) and target != LABEL:
        raise ValueError(f"target must be an index, a list of them, a function or {LABEL!r}, got {target!r}")
    positions = None if positions is None else as_int(positions, "positions", 1)
    skip_tokens = as_int(skip_tokens, "skip_tokens", 0)
    random_state = as_seed(random_state)
    batches = NumberedBatches(loader, ranks, progress)
    if store is not None:
        batches.check_can_be_kept()
    seed = ranks.from_first(torch.Generator().seed()) if random_state is None else random_state
    provenance = Provenance(
        **origin,
        channel_dim=channel_dim,
        target=target if isinstance(target, str) else describe_target(target, tuple_is_index=True),
        positions=positions,
        random_state=random_state,
        skip_tokens=skip_tokens,
        target_order=None if isinstance(target, str | tuple) else target_order(target),
    )
    with _kept(store, provenance, ranks) as kept:
        for number, first, n_batch, batch in batches.missing(kept.holds, kept.compare):
            inputs = moved(inputs_of(batch), device)
            of_batch = labels_of(batch) if isinstance(target, str) else target
            chosen = targets_of_batch(of_batch, 0 if isinstance(target, str) else first, n_batch)
            a, c = context(inputs, chosen)
            if len(a) != n_batch:
                raise ValueError(
                    f"the context of {n_batch} images must have an activation (N, …) for each, got shape "
                    f"{tuple(a.shape)}; choose a layer whose first axis runs over the examples"
                )
            images = range(first, first + n_batch)
            pairs = pairs_at_positions(a, c, positions, seed, images, channel_dim, skip_tokens)
            kept.put(number, pairs, batch)
        if not isinstance(target, str):
            check_length(target, batches.n_images)
        if not batches.n_images:
            raise ValueError("the loader gave no images; an iterator can be used up only once")
        ranks.barrier("the end of the collection")
        return kept.load(batches.own).with_provenance(provenance)


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


def pairs_at_positions(
    a: Tensor,
    c: Tensor,
    positions: int | None,
    seed: int,
    images: Sequence[int],
    channel_dim: int,
    skip_tokens: int,
) -> Pairs:
    """Pairs of a batch at random positions of each image, which its number in the data set decides.

    Parameters
    ----------
    a, c : tensor, shape (N, …, D, …)
    positions : int or None
        Positions per image; None for all.
    seed : int
        Of the positions.
    images : sequence of int, length N
        Numbers of the images in the whole data set.
    channel_dim, skip_tokens : int
        As in `collect_pairs`.
    """
    parts = []
    a, c = (_without_first(values, skip_tokens, channel_dim) for values in (a, c))
    a, c = as_float_tensor(a, "activations"), as_float_tensor(c, "contexts")
    for i, image in enumerate(images):
        # 2**63 bounds what a generator takes; the odd factor keeps the seeds of neighbours apart.
        generator = torch.Generator().manual_seed((seed + 0x9E3779B97F4A7C15 * image) % 2**63)
        parts.append(sample_pairs(a[i : i + 1], c[i : i + 1], positions, generator, channel_dim))
    return Pairs.concatenate(parts)


class _Kept(Protocol):
    """Where the pairs of each batch go."""

    def holds(self, number: int, n_images: int) -> bool:
        """Whether a batch is there."""

    def compare(self, number: int, batch: Any) -> None:
        """Raise an error if a batch that is there was made from another one."""

    def put(self, number: int, pairs: Pairs, batch: Any) -> None:
        """Keep the pairs of a batch."""

    def load(self, numbers: range) -> Pairs:
        """The pairs of some batches."""


class _InMemory:
    def __init__(self) -> None:
        self.parts: dict[int, Pairs] = {}

    def holds(self, number: int, n_images: int) -> bool:
        return number in self.parts

    def compare(self, number: int, batch: Any) -> None:
        """Nothing is there before a collection begins."""

    def put(self, number: int, pairs: Pairs, batch: Any) -> None:
        self.parts[number] = pairs.to("cpu")

    def load(self, numbers: range) -> Pairs:
        return Pairs.concatenate([self.parts[number] for number in numbers])


class _InStore:
    def __init__(self, store: PairStore, writer: PairWriter) -> None:
        self.store, self.holds, self.compare, self.put = store, writer.holds, writer.compare, writer.put

    def load(self, numbers: range) -> Pairs:
        return self.store.load(numbers=numbers)


@contextmanager
def _kept(store: PairStore | None, provenance: Provenance, ranks: Ranks) -> Iterator[_Kept]:
    if store is None:
        yield _InMemory()
        return
    with ExitStack() as stack:
        writer: PairWriter | None = None
        for is_turn in (ranks.is_first, not ranks.is_first):  # the first rank says how the pairs are made
            with ranks.all_or_none(f"opening {store.folder}"):
                if is_turn:
                    writer = stack.enter_context(store.writing(provenance, ranks))
        if writer is None:
            raise RankError(f"{store.folder} was not opened")
        yield _InStore(store, writer)


def moved(inputs: Inputs, device: torch.device | None) -> Inputs:
    """Inputs without their graph, on a device."""
    if isinstance(inputs, tuple):
        return tuple(tensor.detach().to(device) for tensor in inputs)
    return inputs.detach().to(device)


def labels_of(batch: Any) -> Tensor:
    """The labels of a batch: its second entry."""
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        raise TypeError(f"target={LABEL!r} needs batches (inputs, labels, …), got {type(batch).__name__}")
    try:
        return torch.as_tensor(batch[1])
    except (TypeError, ValueError, RuntimeError) as error:  # texts, None, several for an image
        raise TypeError(
            f"target={LABEL!r} needs labels that are numbers of outputs, one for each image, got "
            f"{batch[1]!r:.80}"
        ) from error
