"""Independent runs side by side, which share torch's threads among them.

Products of a hundred columns do not get faster when several threads share them. So small problems get a
thread each, and as many are solved at once as torch has threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def side_by_side(function: Callable[[Item], Outcome], items: Sequence[Item]) -> list[Outcome]:
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
