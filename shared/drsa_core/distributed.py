"""`Ranks`: the processes of one job, as `torchrun` starts them; `parallel_map`: the threads of one process.

Without `torchrun` there is one rank, and nothing is sent. All talk goes through `torch.distributed`: NCCL for
tensors on GPUs, gloo for everything else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
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
    """This process among those of its job. All ranks make the same calls in the same order.

    Attributes
    ----------
    rank, size : int
        Number of this process, from 0, and how many there are.
    control : process group or None
        A gloo group of all ranks, for tensors on the CPU; None if this is the only rank.
    device : torch.device
        Where this rank computes: its GPU, or the CPU.
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
        """The name of a file of which every rank has one."""
        return file if self.size == 1 else f"{file}-{self.rank}-of-{self.size}"

    def share(self, n: int) -> range:
        """The numbers out of 0 … n − 1 that are this rank's: a row without gaps, rank after rank."""
        return range(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, the same bits on each; in place where it can be."""
        if self.size > 1:
            tensor = tensor.contiguous()
            with self._watched("a sum"):
                dist.all_reduce(tensor, group=None if tensor.is_cuda else self.control)
        return tensor

    def all_gather(self, message: Any) -> list[Any]:
        """What each rank gives, in order; anything that can be pickled."""
        parts = [message] * self.size
        if self.size > 1:
            with self._watched("a message"):
                dist.all_gather_object(parts, message, self.control)
        return parts

    def rows(self, tensor: Tensor) -> Tensor:
        """Rows of all ranks, one rank after the other; their numbers may differ."""
        return tensor if self.size == 1 else torch.cat(self.all_gather(tensor.cpu())).to(tensor.device)

    def from_first(self, message: Any) -> Any:
        """What the first rank gives; the messages of all others are dropped."""
        return self.all_gather(message if self.is_first else None)[0]

    def barrier(self, where: str) -> None:
        """Wait until all ranks are here. The `RankError` after the timeout names those that are missing."""
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
        said = self.all_gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None]
        if failed:
            raise RankError(f"{what} failed on {'; '.join(failed)}")

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
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    joined = dist.is_available() and dist.is_initialized()
    if not joined and int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        yield Ranks(device=device)
        return
    if not joined:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"rank {os.environ.get('RANK', '?')} could not join the others within {timeout} ({error}); "
                "check that all were started, by torchrun, with the same addresses"
            ) from error
    try:
        control = dist.new_group(backend="gloo", timeout=timeout) if dist.get_world_size() > 1 else None
        yield Ranks(dist.get_rank(), dist.get_world_size(), control, device, timeout)
    finally:
        if not joined:
            dist.destroy_process_group()


Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def parallel_map(function: Callable[[Item], Outcome], items: Sequence[Item]) -> list[Outcome]:
    """What the function gives for each item, in their order, computed on as many threads as torch has.

    `function` must only change what belongs to its item. The first error is raised once those that are under
    way have ended; the others are not begun. Inference mode and recording of gradients are as in the thread
    that calls. Afterwards torch has as many threads as before.
    """
    n_threads = torch.get_num_threads()
    at_once = min(n_threads, len(items))
    # A thread begins with torch's usual modes, where what was made in inference mode cannot be written to.
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def as_here(item: Item) -> Outcome:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return function(item)

    # The number of threads holds for the thread that sets it, and for threads that begin later.
    pool = ThreadPoolExecutor(at_once, initializer=torch.set_num_threads, initargs=(n_threads // at_once,))
    try:
        return list(pool.map(as_here, items))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(n_threads)
