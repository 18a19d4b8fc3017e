"""The images of patch flipping through the network, as fast as it goes.

There are two ways. Either one batch after the other, each on all of torch's threads, while workers fill the
next ones. Or batches side by side, each filled and run by one thread: so it is done on CPUs with a copy of
the network that is packed (see `fusing`). Threads that share a convolution wait for each other at its end,
and for all that is not a convolution.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..checks import check_finite
from ..distributed import parallel_map
from .filling import Filled, Filler, Jobs
from .folding import fold_batch_norms
from .fusing import fuse_activations
from .pace import FIRST, Paces

PLAIN, LAST = torch.contiguous_format, torch.channels_last


class Run:
    """One run of patch flipping: notes the scores, and adds up the seconds in the network.

    Parameters
    ----------
    model : callable
        Inputs (n, C, H, W) ↦ outputs (n, n_outputs).
    filler : Filler
    targets : tensor, shape (N,)
    scores : tensor, shape (N, T + 1)
        Rectified outputs are written into it.
    bar : tqdm
        Counts images.
    """

    def __init__(
        self,
        model: Callable[[Tensor], Tensor],
        filler: Filler,
        targets: Tensor,
        scores: Tensor,
        bar: tqdm[None],
    ) -> None:
        self.model, self.filler, self.targets, self.scores, self.bar = model, filler, targets, scores, bar
        self.seconds, self._lock = 0.0, Lock()

    def all(self, jobs: Jobs, batch_size: int | None, workers: int) -> None:
        """Do all jobs; without a batch size the fastest is looked for on the way."""
        if self._go_on_with_a_copy(jobs[:1]) and torch.get_num_threads() > 1:
            self._side_by_side(jobs, Paces(batch_size, (PLAIN,)))
        else:
            formats = (PLAIN, LAST) if batch_size is None and self._takes_channels_last(jobs) else (PLAIN,)
            self._one_by_one(jobs, Paces(batch_size, formats), workers)

    def _one_by_one(self, jobs: Jobs, paces: Paces, workers: int) -> None:
        pool = ThreadPoolExecutor(workers)
        try:
            ahead = _Ahead(pool, self.filler, jobs)
            while ahead.jobs:
                batch, filled = ahead.take(paces.now.batch_size)
                images = self.filler.images(batch, filled, paces.now.memory_format)
                paces.note(self._batch(batch, images) / len(batch))
        finally:
            pool.shutdown(cancel_futures=True)

    def _side_by_side(self, jobs: Jobs, paces: Paces) -> None:
        def fill_and_run(batch: Jobs) -> None:
            filled = [self.filler.pixels_after(*job) for job in batch]
            self._batch(batch, self.filler.images(batch, filled, None))

        while jobs:
            size = paces.now.batch_size
            n = len(jobs) if paces.found else size * torch.get_num_threads()
            now, jobs = jobs[:n], jobs[n:]
            begin = time.perf_counter()
            parallel_map(fill_and_run, [now[first : first + size] for first in range(0, len(now), size)])
            paces.note((time.perf_counter() - begin) / len(now))

    def _batch(self, batch: Jobs, images: Tensor) -> float:
        """Run the network and note the scores; the seconds. Scores on the CPU mean that a GPU is done."""
        begin = time.perf_counter()
        output = self._output(images)
        self.scores[tuple(zip(*batch, strict=True))] = _rectified(output, self.targets[[n for n, _ in batch]])
        seconds = time.perf_counter() - begin
        with self._lock:
            self.seconds += seconds
            self.bar.update(len(batch))
        return seconds

    def _output(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model(images)

    def _go_on_with_a_copy(self, jobs: Jobs) -> bool:
        """Take a faster copy of the network, if there is one that gives the same; whether it is packed."""
        folded = fold_batch_norms(self.model) if isinstance(self.model, nn.Module) else None
        if folded is None:
            return False
        images = self._first_images(jobs)
        expected = self._output(images)
        fused = fuse_activations(folded, images)
        if fused is not None and _gives(fused, images, expected):
            self.model = fused
            return True
        if _gives(folded, images, expected):
            self.model = folded
        return False

    def _takes_channels_last(self, jobs: Jobs) -> bool:
        """Whether the network gives the same in channels-last; `view`, say, may refuse it."""
        images = self._first_images(jobs[:FIRST])
        return _gives(self.model, images.contiguous(memory_format=LAST), self._output(images))

    def _first_images(self, jobs: Jobs) -> Tensor:
        return self.filler.images(jobs, [self.filler.pixels_after(*job) for job in jobs], PLAIN)


class _Ahead:
    """Jobs still to be done, the next ones filled by the workers while the network runs.

    Images are filled one by one, as the batch size may change until the fastest is found.
    """

    def __init__(self, pool: ThreadPoolExecutor, filler: Filler, jobs: Jobs) -> None:
        self.pool, self.filler, self.jobs = pool, filler, jobs
        self.futures: deque[Future[Filled]] = deque()

    def take(self, size: int) -> tuple[Jobs, list[Filled]]:
        """The next batch, which is then no longer to be done."""
        batch = self.jobs[:size]
        self._submit(size)
        filled = [self.futures.popleft().result() for _ in batch]
        self.jobs = self.jobs[len(batch) :]
        self._submit(2 * size)  # for the next batches, while this one is run
        return batch, filled

    def _submit(self, until: int) -> None:
        for job in self.jobs[len(self.futures) : until]:
            self.futures.append(self.pool.submit(self.filler.pixels_after, *job))


@torch.no_grad()
def _gives(model: Callable[[Tensor], Tensor], images: Tensor, expected: Tensor) -> bool:
    """Whether the outputs are the expected ones up to rounding: 1e-4 is far less than an error would make."""
    try:
        return bool((model(images) - expected).abs().max() <= 1e-4 * expected.abs().max())
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False


def _rectified(output: Tensor, targets: Tensor) -> Tensor:
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != len(targets):
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"the model must return a tensor ({len(targets)}, n_outputs), got {shape}")
    if int(targets.min()) < 0 or int(targets.max()) >= output.shape[1]:
        raise ValueError(
            f"target must be between 0 and {output.shape[1] - 1}, the last output, got "
            f"{sorted(set(targets.tolist()))}"
        )
    chosen = output.detach().double().cpu().gather(1, targets[:, None])[:, 0]
    check_finite(chosen, "the model's output")
    return chosen.clamp(min=0)
