"""From a loader of examples to pairs (a, c): the one loop behind the `collect` of both adapters (Note E)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from tqdm.auto import tqdm

from .checks import as_float_tensor, as_int, as_int_labels, as_seed
from .distributed import ALONE, Ranks
from .layer import Inputs
from .pair_store import PairStore
from .pairs import Pairs, sample_pairs
from .provenance import Provenance, content_digest, describe_target, target_order
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
    backend: str,
    method: str,
    layer: str,
    model: str | None = None,
    canonizers: str | None = None,
) -> Pairs:
    """Pairs at random positions of every example of a loader.

    Parameters
    ----------
    context : function
        Inputs and their target ↦ activations and contexts, shapes (N, …, D, …).
    loader, target, positions, random_state, store, progress, skip_tokens, ranks
        As in `Explainer.collect`. The positions of an example depend on the seed and on its number in the
        loader only, not on the size of the batches or the backend.
    device : torch.device, optional
        Where to move the inputs.
    channel_dim : int
        Axis of the features in the activation.
    backend, method, layer, model, canonizers
        As in `Provenance`.

    Returns
    -------
    Pairs
        On the CPU. Those of several ranks are in rank order, bit for bit, those of one process.
    """
    by_label = isinstance(target, str)
    if by_label and target != LABEL:
        raise ValueError(f"target must be an index, a list of them, a function or {LABEL!r}, got {target!r}")
    positions = None if positions is None else as_int(positions, "positions", 1)
    skip_tokens, random_state = as_int(skip_tokens, "skip_tokens", 0), as_seed(random_state)
    batches = Batches(loader, ranks, progress, resumes=store is not None)
    seed = ranks.from_first(torch.Generator().seed()) if random_state is None else random_state
    provenance = Provenance(
        backend=backend,
        method=method,
        layer=layer,
        model=model,
        canonizers=canonizers,
        channel_dim=channel_dim,
        target=target if isinstance(target, str) else describe_target(target, tuple_is_index=True),
        positions=positions,
        random_state=random_state,
        skip_tokens=skip_tokens,
        target_order=None if isinstance(target, str | tuple) else target_order(target),
    )
    parts = []
    with ExitStack() as stack:
        writer = None if store is None else stack.enter_context(store.writing(provenance, ranks))
        for batch in batches.missing(None if writer is None else writer.holds):
            digest = None if writer is None else batch.digest(by_label)
            if writer is not None and batch.is_done:
                check_same_batch(writer.digest(batch.number), digest, f"batch {batch.number} of {store!r}")
                continue
            if isinstance(target, str):
                chosen: Target = batch.labels()
            else:
                chosen = targets_of_batch(target, batch.first, batch.size)
            a, c = context(batch.inputs(device), chosen)
            pairs = pairs_at_positions(a, c, positions, seed, batch.examples, channel_dim, skip_tokens)
            if writer is None:
                parts.append(pairs.to("cpu"))
            else:
                writer.put(batch.number, pairs, digest)
        if not isinstance(target, str):
            check_length(target, batches.n_examples)
        ranks.barrier("the end of the collection")
        pairs = Pairs.concatenate(parts) if store is None else store.load(numbers=batches.own)
    return pairs.with_provenance(provenance)


def pairs_at_positions(
    a: Tensor,
    c: Tensor,
    positions: int | None,
    seed: int,
    examples: Sequence[int],
    channel_dim: int,
    skip_tokens: int,
) -> Pairs:
    """Pairs of a batch (N, …, D, …) at random positions, which the numbers of the examples decide."""
    if len(a) != len(examples):
        raise ValueError(
            f"the context of {len(examples)} examples must have an activation (N, …) for each, got shape "
            f"{tuple(a.shape)}; choose a layer whose first axis runs over the examples"
        )
    if skip_tokens:
        if a.ndim != 3 or a.shape[3 - channel_dim % 3] <= skip_tokens:
            raise ValueError(
                f"skip_tokens={skip_tokens} is for layers with more tokens (N, T, D), got an activation of "
                f"shape {tuple(a.shape)} with channel_dim={channel_dim}"
            )
        axis = 3 - channel_dim % 3  # that of examples is 0, and features have one of 1 and 2
        a, c = (values.narrow(axis, skip_tokens, values.shape[axis] - skip_tokens) for values in (a, c))
    a, c = as_float_tensor(a, "activations"), as_float_tensor(c, "contexts")
    parts = []
    for i, number in enumerate(examples):
        # 2**63 bounds what a generator takes; the odd factor keeps the seeds of neighbours apart.
        generator = torch.Generator().manual_seed((seed + 0x9E3779B97F4A7C15 * number) % 2**63)
        parts.append(sample_pairs(a[i : i + 1], c[i : i + 1], positions, generator, channel_dim))
    return Pairs.concatenate(parts)


def check_same_batch(before: str | None, now: str | None, where: str) -> None:
    """Compare the digests of a batch and of the one that was stored under its number, if that has one."""
    if before not in (None, now):
        raise ValueError(
            f"{where} was made from other examples or labels than the loader gives now in the same place: "
            "another data set, another order, or transforms that are random. Give the data that it was begun "
            "with, or use another folder"
        )


class Batch(NamedTuple):
    """A batch that was loaded.

    `number` counts the batches of the whole data set that are not empty, `first` its examples; `size` is how
    many are in this batch, `is_done` whether it needs not be computed.
    """

    number: int
    first: int
    size: int
    data: Any
    is_done: bool

    @property
    def examples(self) -> range:
        """Numbers of its examples in the data set."""
        return range(self.first, self.first + self.size)

    def inputs(self, device: torch.device | None = None) -> Inputs:
        """A tensor or a tuple of tensors, without their graph, on a device."""
        inputs = inputs_of(self.data)
        if isinstance(inputs, tuple):
            return tuple(tensor.detach().to(device) for tensor in inputs)
        return inputs.detach().to(device)

    def labels(self) -> list[int]:
        """The labels: the second entry."""
        if not isinstance(self.data, list | tuple) or len(self.data) < 2:
            raise TypeError(
                f"target={LABEL!r} needs batches (inputs, labels, …), got {type(self.data).__name__}"
            )
        labels = as_int_labels(self.data[1], self.size, "image of the batch")
        return [as_int(label, "every label", 0) for label in labels.tolist()]

    def digest(self, with_labels: bool) -> str:
        """Digest of the inputs and, if they matter, of the labels."""
        return content_digest(inputs_of(self.data), self.labels() if with_labels else None)


def inputs_of(data: Any) -> Inputs:
    """The inputs of what a loader gives: a tensor, or the first entry of a tuple or list."""
    inputs = data
    if isinstance(data, list | tuple) and data:
        inputs = tuple(data[0]) if isinstance(data[0], list | tuple) else data[0]
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise TypeError(
            "loader must give tensors, or tuples or lists that start with the input (a tensor or a tuple of "
            f"tensors), got {type(data).__name__}; NumPy arrays become tensors with torch.as_tensor"
        )
    return inputs


class Batches:
    """This rank's share of the batches of a loader: a row without gaps, rank after rank.

    A batch is the same, with the same numbers, whatever the number of ranks. Of a `DataLoader` that goes
    through its data set in order, only batches that are needed are loaded; other loaders are gone through by
    every rank.

    With `resumes`, batches are found again in another run, by their number: their order must not be random.

    Attributes
    ----------
    n_examples : int
        Examples of the data set; after the last batch.
    own : range
        Numbers of this rank's batches; after the last one.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        ranks: Ranks = ALONE,
        progress: bool | None = None,
        resumes: bool = False,
    ) -> None:
        if isinstance(loader, Tensor):
            raise TypeError(f"loader must give batches, got one tensor {tuple(loader.shape)}; pass [x]")
        self.loader, self.ranks = loader, ranks
        self.progress = progress if ranks.is_first else False
        self.n_examples, self.own = 0, range(0)
        for loads in (loader, getattr(loader, "batch_sampler", None)):
            sampler = getattr(loads, "sampler", None)
            is_random = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
            if is_random and (resumes or ranks.size > 1) and getattr(sampler, "generator", None) is None:
                raise ValueError(
                    "the loader shuffles, so that every run and every rank sees another order; give "
                    "shuffle=False (positions are random anyway), or a generator with a seed"
                )
        if ranks.size > 1:
            lengths = ranks.all_gather(len(loader) if isinstance(loader, Sized) else -1)
            if len(set(lengths)) > 1 or lengths[0] < ranks.size:
                raise ValueError(
                    f"several ranks need a loader of one length (-1: none), with a batch for each, got "
                    f"{lengths}; give the whole data set to each, without a DistributedSampler"
                )

    def missing(self, holds: Callable[[int, int], bool] | None) -> Iterator[Batch]:
        """Own batches for which `holds(number, size)` is false, in order.

        Batches that are done come too where they had to be loaded; of a `DataLoader` in order the first and
        the last that are done, so that other data is noticed.
        """
        plan = _plan_of(self.loader)
        with tqdm(desc="collecting pairs", unit="batch", disable=hidden(self.progress)) as bar:
            for batch in self._all(holds, bar) if plan is None else self._planned(plan, holds, bar):
                yield batch
                bar.update()
        if not self.n_examples:
            raise ValueError("the loader gave no images; an iterator can be used up only once")

    def _planned(
        self, plan: list[list[int]], holds: Callable[[int, int], bool] | None, bar: Any
    ) -> Iterator[Batch]:
        firsts = [0, *accumulate(map(len, plan))]
        self.n_examples, self.own = firsts[-1], self.ranks.share(len(plan))
        done = [number for number in self.own if holds is not None and holds(number, len(plan[number]))]
        numbers = sorted((set(self.own) - set(done)) | {*done[:1], *done[-1:]})
        bar.reset(total=len(numbers))
        loader: Any = self.loader
        same = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
        options = {name: getattr(loader, name) for name in (*same, "multiprocessing_context", "generator")}
        chosen = DataLoader(loader.dataset, batch_sampler=[plan[n] for n in numbers], **options)
        for number, data in zip(numbers, chosen, strict=True):
            yield Batch(number, firsts[number], len(plan[number]), data, number in done)

    def _all(self, holds: Callable[[int, int], bool] | None, bar: Any) -> Iterator[Batch]:
        n_batches = len(self.loader) if isinstance(self.loader, Sized) else None
        bar.reset(total=n_batches)
        share = range(2**62) if self.ranks.size == 1 else self.ranks.share(n_batches or 0)
        number = 0
        for data in self.loader:
            inputs = inputs_of(data)
            size = len(inputs[0] if isinstance(inputs, tuple) else inputs)
            if not size:  # empty batches have no number
                continue
            if number in share:
                is_done = holds is not None and holds(number, size)
                yield Batch(number, self.n_examples, size, data, is_done)
            self.n_examples, number = self.n_examples + size, number + 1
        self.own = range(share.start, min(share.stop, number))


def hidden(progress: bool | None) -> bool | None:
    """What tqdm calls `disable`: None shows a bar on a terminal."""
    return None if progress is None else not progress


def _plan_of(loader: Iterable[Any]) -> list[list[int]] | None:
    """Indices of each batch of a `DataLoader` that goes through its data set in order; None for all others.

    Subclasses and functions that make batches may do anything, and drop examples.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return None
    sampler = loader.batch_sampler
    is_plain = type(sampler) is BatchSampler and type(sampler.sampler) is SequentialSampler
    return list(sampler) if is_plain and loader.collate_fn is default_collate else None  # type: ignore[arg-type]
