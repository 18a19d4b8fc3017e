"""`Ranks`: the processes of one job, as `torchrun` starts them, and what they say to each other.

Without `torchrun` there is one rank, and nothing is sent. All talk goes through `torch.distributed`: gloo for
tensors on the CPU, NCCL for those on GPUs. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

#: How long a rank waits for the others. They meet only after work of their own, which may differ in length.
TIMEOUT = timedelta(minutes=30)


class RankError(RuntimeError):
    """Another rank failed, is gone, or did not arrive in time."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of its job.

    Attributes
    ----------
    rank, size : int
        Number of this process, from 0, and how many there are.
    control : process group or None
        A gloo group of all ranks, for tensors on the CPU; None if this is the only rank.
    device : torch.device
        Where this rank computes: the GPU of its own, or the CPU.
    timeout : timedelta
        How long it waits for the others.
    """

    rank: int = 0
    size: int = 1
    control: Any = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout: timedelta = TIMEOUT

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that reports for all."""
        return self.rank == 0

    def name_of(self, file: str) -> str:
        """The name of a file that every rank has for itself."""
        return file if self.size == 1 else f"{file}-{self.rank}-of-{self.size}"

    def share(self, n: int) -> range:
        """The numbers out of 0 … n − 1 that are this rank's: a row without gaps, rank after rank."""
        return range(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, the same bits on each; in place where it can be."""
        if self.size > 1:
            tensor = tensor.contiguous()
            with self._watched("a sum"):
                dist.all_reduce(tensor, group=self._group(tensor))
        return tensor

    def rows(self, tensor: Tensor) -> Tensor:
        """Rows of all ranks, one rank after the other; their numbers may differ."""
        if self.size == 1:
            return tensor
        counts = self.all_gather(len(tensor))
        padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in counts]
        with self._watched("rows"):
            dist.all_gather(parts, padded, group=self._group(tensor))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def all_gather(self, number: int) -> list[int]:
        """The number that each rank gives, in order."""
        if self.size == 1:
            return [number]
        mine = torch.tensor([number])
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with self._watched("a number"):
            dist.all_gather(parts, mine, group=self.control)
        return [int(part) for part in parts]

    def messages(self, message: Any) -> list[Any]:
        """What each rank says, in order; anything that JSON can hold."""
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        counts = self.all_gather(len(data))
        everything = bytes(self.rows(data).tolist())
        ends = torch.tensor(counts).cumsum(0).tolist()
        return [json.loads(everything[end - n : end]) for end, n in zip(ends, counts, strict=True)]

    def from_first(self, message: Any) -> Any:
        """What the first rank says; the message of all others is dropped."""
        return self.messages(message if self.is_first else None)[0] if self.size > 1 else message

    def barrier(self, where: str) -> None:
        """Wait until all ranks are here.

        Raises
        ------
        RankError
            That names the ranks that are missing, once the time is over or as soon as one is gone.
        """
        if self.size > 1:
            with self._watched(where):
                # By default it would take the 30 minutes of the backend, not the time of the group.
                dist.monitored_barrier(self.control, self.timeout, wait_all_ranks=True)

    @contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """A block that counts as failed on all ranks if it fails on one; without this the others would wait.

        Raises
        ------
        RankError
            On ranks where the block went well; it repeats what the others said.
        """
        failure: Exception | None = None
        try:
            yield
        except RankError:
            raise  # the others know, or are gone
        except Exception as error:
            failure = error
        said = self.messages(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None]
        if failed:
            raise RankError(f"{what} failed on {'; '.join(failed)}")

    def _group(self, tensor: Tensor) -> Any:
        return None if tensor.is_cuda else self.control  # None: the default group, NCCL on GPUs

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.size} waited for the others ({what}) in vain: one of them was "
                "killed, failed, or took longer than the timeout. See what it wrote last, then start the job "
                f"again: finished parts are kept. ({error})"
            ) from error


#: The only rank of a program that nobody distributed.
ALONE = Ranks()


@contextmanager
def joined_ranks(timeout: timedelta = TIMEOUT) -> Iterator[Ranks]:
    """All ranks of this job for the time of a `with` block: those of `torchrun`, or this process alone.

    A process group that is there already is used, and stays. Else the variables that `torchrun` sets decide:
    with `WORLD_SIZE` above 1 a group is made, and ended after the block.

    Parameters
    ----------
    timeout : timedelta
        How long a rank waits for the others before it gives up with a `RankError`.
    """
    if dist.is_available() and dist.is_initialized():
        yield _ranks(timeout)
        return
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        yield Ranks(device=_own_device())
        return
    if not dist.is_available():
        raise RankError("WORLD_SIZE is above 1, but this PyTorch was built without torch.distributed")
    device = _own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {os.environ.get('RANK', '?')} could not join the others within {timeout} ({error}); check "
            "that all were started, by torchrun, with the same addresses"
        ) from error
    try:
        yield _ranks(timeout)
    finally:
        dist.destroy_process_group()


def _ranks(timeout: timedelta) -> Ranks:
    rank, size = dist.get_rank(), dist.get_world_size()
    control = dist.new_group(backend="gloo", timeout=timeout) if size > 1 else None
    return Ranks(rank, size, control, _own_device(), timeout)


def _own_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def parallel_map(function: Callable[[Item], Outcome], items: Sequence[Item]) -> list[Outcome]:
    """What the function gives for each item, in their order.

    `function` must only change what belongs to its item. The first error is raised once those that are under
    way have ended; the others are not begun. Inference mode and recording of gradients are as in the thread
    that calls. Afterwards torch has as many threads as before.
    """
    n_threads = torch.get_num_threads()
    at_once = min(n_threads, len(items))
    # The number holds for the thread that sets it, and for threads that begin later.
    share = partial(torch.set_num_threads, n_threads // at_once)
    # A thread begins with torch's usual modes, where what was made in inference mode cannot be written to.
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def as_here(item: Item) -> Outcome:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return function(item)

    pool = ThreadPoolExecutor(at_once, initializer=share)
    try:
        return list(pool.map(as_here, items))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(n_threads)


def one_by_one(function: Callable[[Item], Outcome], items: Sequence[Item]) -> list[Outcome]:
    """The same, one after the other, each with all threads."""
    return [function(item) for item in items]
