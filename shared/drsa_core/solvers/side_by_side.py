"""Independent runs side by side, each on a thread of its own.

Products of a hundred columns do not get faster when several threads share them. So small problems get one
thread each, and as many are solved at once as torch has threads. What a run computes does not depend on how
many run beside it.
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
    way have ended; the others are not begun. Afterwards torch has as many threads as before.
    """
    n_threads = torch.get_num_threads()
    # The number holds for the thread that sets it, and for threads that begin later.
    pool = ThreadPoolExecutor(min(n_threads, len(items)), initializer=partial(torch.set_num_threads, 1))
    try:
        return list(pool.map(function, items))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(n_threads)
