"""Batches with their number and that of their first image in the whole data set, for one rank or all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sized
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

from .distributed import ALONE, Ranks
from .fingerprint import feed
from .layer import Inputs


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
        lengths = self.ranks.all_gather(len(self.loader))
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

    def check_can_be_kept(self) -> None:
        """Refuse a loader whose order is another one in every run: batches are found again by their number.

        One with a generator may give the same order again. Whether it does, `missing` can compare.
        """
        sampler = getattr(self.loader, "sampler", None)
        samplers = (sampler, getattr(getattr(self.loader, "batch_sampler", None), "sampler", None))
        for sampler in samplers:
            is_random = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
            if is_random and getattr(sampler, "generator", None) is None:
                raise ValueError(
                    f"the loader's {type(sampler).__name__} gives another order in every run, so that a "
                    "store cannot know which images are done; give shuffle=False (positions are random "
                    "anyway), or the sampler a generator with a seed of its own for every run"
                )

    def missing(
        self,
        is_done: Callable[[int, int], bool],
        compare: Callable[[int, Any], None] | None = None,
    ) -> Iterator[NumberedBatch]:
        """Own batches for which `is_done(number, n_images)` is false, in order.

        Parameters
        ----------
        is_done : function
        compare : function, optional
            `compare(number, batch)` is called for batches that are done and loaded all the same, to raise an
            error if they are others now. Where only what is missing is loaded, these are the first and the
            last that are done.
        """
        # None: tqdm shows it on a terminal.
        hidden = None if self.progress is None else not self.progress
        if not self.ranks.is_first:
            hidden = True
        bar = tqdm(desc="collecting pairs", unit="batch", disable=hidden)
        with bar:
            find = self._planned if self._plan else self._all
            yield from find(is_done, compare, bar)

    def _planned(
        self, is_done: Callable[[int, int], bool], compare: Callable[[int, Any], None] | None, bar: Any
    ) -> Iterator[NumberedBatch]:
        """Batches of a plan: those that are done are not loaded."""
        if self._plan is None:
            return
        firsts = [0, *accumulate(map(len, self._plan))]
        self.n_images, self.own = firsts[-1], self.ranks.share(len(self._plan))
        todo = [number for number in self.own if not is_done(number, len(self._plan[number]))]
        bar.reset(total=len(todo))
        done = sorted(set(self.own) - set(todo))
        known = sorted({done[0], done[-1]}) if compare is not None and done else []
        loader = _with_batches(self.loader, [self._plan[number] for number in (*known, *todo)])
        for number, batch in zip((*known, *todo), loader, strict=True):
            if compare is not None and number in known:
                compare(number, batch)
                continue
            yield NumberedBatch(number, firsts[number], len(self._plan[number]), batch)
            bar.update()

    def _all(
        self, is_done: Callable[[int, int], bool], compare: Callable[[int, Any], None] | None, bar: Any
    ) -> Iterator[NumberedBatch]:
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
            if share is not None and here not in share:
                continue
            if not is_done(here, images):
                yield NumberedBatch(here, first, images, batch)
            elif compare is not None:
                compare(here, batch)
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


def batch_digest(batch: Any, with_labels: bool) -> str:
    """Short digest of the inputs of a batch and, if they matter, of its labels."""
    digest = hashlib.blake2b(digest_size=8)
    feed(digest, inputs_of(batch))
    if with_labels and isinstance(batch, list | tuple) and len(batch) > 1:
        feed(digest, torch.as_tensor(batch[1]))
    return digest.hexdigest()


def check_same_batch(before: str | None, batch: Any, with_labels: bool, where: object) -> None:
    """Compare a batch with the digest of the one that was kept under its number; None: that was not kept."""
    if before is None or before == batch_digest(batch, with_labels):
        return
    what = "images or labels" if with_labels else "images"
    raise ValueError(
        f"{where} was made from other {what} than the loader gives now in the same place: another data set, "
        "another order, or transforms that are random. Give the data that it was begun with, or use another "
        "folder"
    )


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
