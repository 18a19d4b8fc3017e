"""Batches with their number and that of their first image in the whole data set, for one rank or all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from tqdm.auto import tqdm

from .layer.request import Inputs
from .ranks import ALONE, Ranks


class NumberedBatch(NamedTuple):
    """A batch that is to be computed.

    `number` counts the batches of the whole data set that are not empty, `first` its images; `images` is how
    many are in this batch.
    """

    number: int
    first: int
    images: int
    batch: Any


class NumberedBatches:
    """This rank's share of the batches of a loader: a row without gaps, rank after rank.

    A batch is the same, with the same numbers, whatever the number of ranks. Of a `DataLoader` that goes
    through its data set in order, with torch's own `collate_fn`, only batches that are needed are loaded;
    other loaders are gone through by every rank, and what is not needed is dropped.

    Parameters
    ----------
    loader : iterable
        As in `collect_pairs`. With several ranks it must have a length, and give the same on each.
    ranks : Ranks
    progress : bool, optional
        Show a progress bar, with an estimate of the time left, on the first rank. Default: on a terminal.

    Attributes
    ----------
    n_images : int
        Images seen so far, or, after the last batch, images of the data set.
    own : range
        Numbers of this rank's batches; to be read after the last one, where no length was known before.
    """

    def __init__(self, loader: Iterable[Any], ranks: Ranks = ALONE, progress: bool | None = None) -> None:
        if isinstance(loader, Tensor):
            raise TypeError(
                f"loader must give batches, got one tensor of shape {tuple(loader.shape)}; for one batch "
                "pass [x]"
            )
        self.loader, self.ranks, self.progress = loader, ranks, progress
        self.n_images = 0
        self.own = range(0)
        self._plan = _plan_of(loader)
        if ranks.size > 1:
            self._check_order()

    def _check_order(self) -> None:
        if isinstance(self.loader, DataLoader) and isinstance(self.loader.sampler, RandomSampler):
            raise ValueError(
                "the loader shuffles, so that every rank would see another order; give shuffle=False. The "
                "ranks share the batches themselves, a DistributedSampler is not needed"
            )
        if not isinstance(self.loader, Sized):
            raise TypeError(
                "several ranks need a loader with a length, e.g. a DataLoader over a data set that has one, "
                f"got {type(self.loader).__name__}"
            )
        lengths = self.ranks.numbers(len(self.loader))
        if len(set(lengths)) > 1:
            raise ValueError(
                f"the ranks' loaders have {lengths} batches; give the whole data set to each, without a "
                "DistributedSampler: the ranks share the batches themselves"
            )
        if lengths[0] < self.ranks.size:
            raise ValueError(
                f"the loader has {lengths[0]} batches for {self.ranks.size} ranks; use smaller batches, or "
                "fewer ranks"
            )

    def missing(self, is_done: Callable[[int, int], bool]) -> Iterator[NumberedBatch]:
        """Own batches for which `is_done(number, n_images)` is false, in order."""
        # None: tqdm shows it on a terminal.
        hidden = None if self.progress is None else not self.progress
        if not self.ranks.is_first:
            hidden = True
        bar = tqdm(desc="collecting pairs", unit="batch", disable=hidden)
        with bar:
            yield from self._planned(is_done, bar) if self._plan else self._all(is_done, bar)

    def _planned(self, is_done: Callable[[int, int], bool], bar: Any) -> Iterator[NumberedBatch]:
        """Batches of a plan: those that are done are not loaded."""
        if self._plan is None:
            return
        firsts = [0, *accumulate(map(len, self._plan))]
        self.n_images, self.own = firsts[-1], self.ranks.share(len(self._plan))
        todo = [number for number in self.own if not is_done(number, len(self._plan[number]))]
        bar.reset(total=len(todo))
        loader = _with_batches(self.loader, [self._plan[number] for number in todo])
        for number, batch in zip(todo, loader, strict=True):
            yield NumberedBatch(number, firsts[number], len(self._plan[number]), batch)
            bar.update()

    def _all(self, is_done: Callable[[int, int], bool], bar: Any) -> Iterator[NumberedBatch]:
        n_batches = len(self.loader) if isinstance(self.loader, Sized) else None
        bar.reset(total=n_batches)
        share = None if self.ranks.size == 1 else self.ranks.share(n_batches or 0)
        number = 0
        for batch in self.loader:
            bar.update()
            images = n_images_of(batch)
            if not images:
                continue
            first, self.n_images = self.n_images, self.n_images + images
            here, number = number, number + 1
            if (share is None or here in share) and not is_done(here, images):
                yield NumberedBatch(here, first, images, batch)
        # Empty batches have no number, so that there may be fewer than the length says.
        self.own = range(number) if share is None else range(share.start, min(share.stop, number))


def inputs_of(batch: Any) -> Inputs:
    """The inputs of a batch: a tensor or a tuple of tensors.

    Parameters
    ----------
    batch : tensor, tuple or list
        The tensor, or something whose first entry is the tensor, or the tuple of tensors.
    """
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
    return inputs


def n_images_of(batch: Any) -> int:
    """Number of images in a batch."""
    inputs = inputs_of(batch)
    return len(inputs[0] if isinstance(inputs, tuple) else inputs)


def _plan_of(loader: Iterable[Any]) -> list[list[int]] | None:
    """Indices of each batch of a `DataLoader` that goes through its data set in order; None for all others.

    Subclasses and functions that make batches may do anything: such loaders are gone through.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return None
    if (
        loader.collate_fn is not default_collate
    ):  # others may drop images, so that only a batch can be counted
        return None
    sampler = loader.batch_sampler
    if type(sampler) is not BatchSampler or type(sampler.sampler) is not SequentialSampler:
        return None
    return list(sampler)


def _with_batches(loader: Any, batches: list[list[int]]) -> Iterable[Any]:
    """A loader like another one, of these batches only."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )
