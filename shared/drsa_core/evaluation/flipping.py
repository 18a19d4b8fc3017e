"""Patch flipping: how fast the output falls when relevant patches are removed (section 5, Note D)."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..parameters import as_int
from ..validation import check_finite
from .fills import Array, Fill, find_fill
from .folding import fold_batch_norms
from .fusing import fuse_activations
from .pace import FIRST, Pace, Probe, probe
from .patches import check_maps, patch_grid, patch_relevance, removal_counts, removal_ranks

LAST = torch.channels_last
#: Numbers of the image and of the step.
Jobs: TypeAlias = list[tuple[int, int]]


@dataclass(frozen=True)
class Preprocessing:
    """How the network's inputs and pixels in [0, 1] become one another; patches are filled in pixel space.

    Attributes
    ----------
    to_pixels, to_inputs : callable
        Batches (N, C, H, W) to batches of that shape, inverse to one another.
    """

    to_pixels: Callable[[Tensor], Tensor]
    to_inputs: Callable[[Tensor], Tensor]

    @classmethod
    def from_mean_std(
        cls, mean: Sequence[float] | float, std: Sequence[float] | float, channel_order: str = "RGB"
    ) -> Preprocessing:
        """For inputs (pixels − mean) / std, both of length C or one number.

        Parameters
        ----------
        mean, std : float or sequence of float
            In the order of the network's channels.
        channel_order : {"RGB", "BGR"}
            Order of the network's channels. Pixels are RGB; networks that come from Caffe, such as those of
            Keras, take BGR.
        """
        shift = torch.as_tensor(mean, dtype=torch.float64).reshape(-1, 1, 1)
        scale = torch.as_tensor(std, dtype=torch.float64).reshape(-1, 1, 1)
        if (
            not bool((scale > 0).all())
            or not bool(shift.isfinite().all())
            or not bool(scale.isfinite().all())
        ):
            raise ValueError(f"mean must be finite and std positive, got mean {mean} and std {std}")
        if channel_order not in ("RGB", "BGR"):
            raise ValueError(f"channel_order must be 'RGB' or 'BGR', got {channel_order!r}")

        def ordered(x: Tensor) -> Tensor:
            return x if channel_order == "RGB" else x.flip(1)

        return cls(
            lambda x: ordered(x * scale.to(x) + shift.to(x)),
            lambda x: (ordered(x) - shift.to(x)) / scale.to(x),
        )


@dataclass(frozen=True)
class FlippingCurves:
    """The network's output while patches are removed, for N images and T steps.

    Attributes
    ----------
    share : tensor, shape (T + 1,)
        Share of all patches that each concept has removed after step 0 … T.
    removed : tensor, shape (N, T + 1)
        Share that is really gone: the union over concepts, which is the same as `share` for K = 1.
    scores : tensor, shape (N, T + 1)
        Rectified output of the target, max(0, f(x^(τ))).
    fill_seconds, network_seconds : float
        Time spent on filling (summed over the workers) and in the network.
    """

    share: Tensor
    removed: Tensor
    scores: Tensor
    fill_seconds: float
    network_seconds: float

    @property
    def aupc(self) -> Tensor:
        """Area under the patch-flipping curve Σ_τ w(τ) (f(x^(τ−1)) + f(x^(τ))) / 2 over `share`, shape (N,).

        Lower is better. (The minus sign in the printed formula is a misprint.) With K concepts w(τ) counts
        what each of them removes: K maps remove up to K times as much in a step, and AUPC falls with K by
        itself, as it does in the paper's tables. It compares methods of one K.
        """
        return torch.trapezoid(self.scores, self.share.expand_as(self.scores))

    @property
    def aupc_of_removed(self) -> Tensor:
        """The same area over `removed`, which does not reward a large K as such, shape (N,)."""
        return torch.trapezoid(self.scores, self.removed)


def patch_flipping(
    model: Callable[[Tensor], Tensor],
    inputs: Tensor,
    maps: Tensor,
    target: int | Sequence[int] | Tensor,
    preprocessing: Preprocessing | tuple[Sequence[float] | float, Sequence[float] | float],
    *,
    patch_size: int = 16,
    schedule: str | Sequence[int] = "squares",
    fill: str | Fill = "telea",
    batch_size: int | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> FlippingCurves:
    """Remove patches from the most to the least relevant, and record the rectified output of the target.

    Parameters
    ----------
    model : callable
        Inputs (n, C, H, W) ↦ outputs (n, n_outputs). A module must be in eval mode. It is run in a copy
        whose batch norms are folded into convolutions (see `folding`), with which on CPUs activations become
        one operation (see `fusing`); the same up to rounding. Any other callable, such as `model.forward`,
        is run as it is.
    inputs : tensor, shape (N, C, H, W)
        The images, as the network takes them.
    maps : tensor, shape (N, K, C, H, W) or (N, C, H, W)
        Their relevance, or `Explanation.token_maps` (N, K, h, w). With K concepts, the union of what each
        removes is removed (section 5.2). Maps of the inputs' own shape are one map; write K maps without
        channels as (N, K, 1, H, W).
    target : int, sequence of int or tensor, shape (N,)
        Output to record: one for all images, or one for each.
    preprocessing : Preprocessing, or pair (mean, std)
        How pixels in [0, 1] become inputs.
    patch_size : int
        Side of the patches in pixels.
    schedule : str or sequence of int
        As in `removal_counts`.
    fill : {"telea", "mean", "blur", "constant"} or callable
        What replaces removed pixels; as in `drsa_core.evaluation.fills`. An image of which nothing is left
        gets the colour that the network sees as 0, except with "blur".
    batch_size : int, optional
        Images per forward pass. Steps and images share the batches; a step that removes nothing new is not
        run. Default: the fastest, and inputs in the faster of two memory formats, both found on the first
        batches (see `pace`). The outputs then differ by rounding from one run to the next; for the same bits
        give a number, with which inputs keep their own memory format.
    workers : int, optional
        Threads that fill the next batch while the network runs. Default: one for each CPU, at most 8.
    progress : bool
        Show a progress bar.

    Returns
    -------
    FlippingCurves
        On the CPU, in float64.
    """
    if not isinstance(inputs, Tensor):
        raise TypeError(f"inputs must be a torch tensor, got {type(inputs).__name__}")
    if inputs.ndim != 4 or not inputs.is_floating_point() or 0 in inputs.shape:
        raise ValueError(
            "inputs must be images of floating point and shape (N, C, H, W), got "
            f"{tuple(inputs.shape)} {inputs.dtype}"
        )
    if isinstance(model, nn.Module) and model.training:
        raise ValueError(
            "the model is in training mode, where its outputs depend on the batch; call model.eval()"
        )
    inputs = inputs.detach()
    check_finite(inputs, "inputs")
    relevance = check_maps(maps, inputs)
    targets = _targets(target, len(inputs))
    if not isinstance(preprocessing, Preprocessing):
        preprocessing = Preprocessing.from_mean_std(*preprocessing)
    batch_size = None if batch_size is None else as_int(batch_size, "batch_size", 1)
    workers = min(8, os.cpu_count() or 1) if workers is None else as_int(workers, "workers", 1)

    grid = patch_grid(inputs.shape[2], inputs.shape[3], patch_size)
    ranks = removal_ranks(patch_relevance(relevance, grid)).cpu()
    n_patches = ranks.shape[1]
    counts = removal_counts(n_patches, schedule)
    gone = torch.stack([ranks < count for count in counts], dim=1)  # (N, T + 1, P)
    filler = _Filler(inputs, preprocessing, find_fill(fill), gone, grid)

    # A step in which the union does not grow keeps the output of the step before.
    is_new = torch.ones(gone.shape[:2], dtype=torch.bool)
    is_new[:, 1:] = (gone[:, 1:] != gone[:, :-1]).any(2)
    jobs = [(int(n), int(step)) for n, step in is_new.nonzero()]
    scores = torch.full(gone.shape[:2], torch.nan, dtype=torch.float64)
    clock = _Clock(model, targets, scores)
    pool = ThreadPoolExecutor(workers)
    bar = tqdm(total=len(jobs), desc="patch flipping", unit="image", disable=not progress)
    try:
        ahead = _Ahead(pool, filler, jobs)
        clock.fold(ahead)
        tries: Probe | None = None
        if batch_size is None:
            pace, tries = _first_pace(ahead, clock)
        else:
            pace = Pace(batch_size, None)
        while ahead.jobs:
            batch, images = ahead.take(pace)
            seconds = clock.run(batch, images)
            bar.update(len(batch))
            try:
                pace = pace if tries is None else tries.send(seconds)
            except StopIteration as found:
                pace, tries = found.value, None
    finally:
        pool.shutdown(cancel_futures=True)
        bar.close()
    for step in range(1, len(counts)):
        scores[:, step] = torch.where(is_new[:, step], scores[:, step], scores[:, step - 1])
    share = torch.tensor(counts, dtype=torch.float64) / n_patches
    return FlippingCurves(share, gone.double().mean(2), scores, sum(filler.seconds), clock.seconds)


class _Filler:
    """Images with what is gone after a step filled in."""

    def __init__(
        self, inputs: Tensor, preprocessing: Preprocessing, fill: Fill, gone: Tensor, grid: Tensor
    ) -> None:
        self.inputs, self.preprocessing, self.fill = inputs, preprocessing, fill
        # In NumPy, as what the workers do must not compete for the threads of the network.
        self.gone, self.grid = gone.numpy(), grid.numpy()
        with torch.no_grad():
            pixels = preprocessing.to_pixels(inputs)
            neutral = preprocessing.to_pixels(torch.zeros_like(inputs[:1]))
        if pixels.shape != inputs.shape:
            raise ValueError(
                f"to_pixels must keep the inputs' shape {tuple(inputs.shape)}, got {tuple(pixels.shape)}"
            )
        check_finite(pixels, "the pixels from to_pixels")
        low, high = float(pixels.min()), float(pixels.max())
        if low < -0.01 or high > 1.01:
            raise ValueError(
                f"pixels must lie in [0, 1], but those of the inputs go from {low:.3g} to {high:.3g}: mean "
                "and std (or to_pixels) do not fit the inputs"
            )
        self.pixels: Array = pixels.float().cpu().numpy()
        self.neutral: Array = neutral.float().mean((0, 2, 3)).clamp(0, 1).cpu().numpy()
        self.seconds: list[float] = []  # appending is safe from several threads

    def pixels_after(self, n: int, step: int) -> tuple[Array, Array]:
        """Filled pixels (C, H, W) of image n after a step, and the mask (H, W) of what was removed."""
        begin = time.perf_counter()
        mask = self.gone[n, step][self.grid]
        filled = self.fill(self.pixels[n], mask, self.neutral) if mask.any() else self.pixels[n]
        if filled.shape != self.pixels[n].shape:
            raise ValueError(f"fill must return an image of shape {self.pixels[n].shape}, got {filled.shape}")
        if not np.isfinite(filled).all():
            raise ValueError(f"fill returned NaN or Inf for image {n}; it must return finite pixels")
        self.seconds.append(time.perf_counter() - begin)
        return filled, mask

    def images(self, batch: Jobs, filled: Sequence[tuple[Array, Array]], pace: Pace) -> Tensor:
        """Network inputs; pixels that are still there keep the very values of the inputs."""
        originals = self.inputs[[n for n, _ in batch]]
        pixels = torch.from_numpy(np.stack([image for image, _ in filled])).to(originals)
        masks = torch.from_numpy(np.stack([mask for _, mask in filled])).to(originals.device)
        images = torch.where(masks[:, None], self.preprocessing.to_inputs(pixels), originals)
        return images if pace.memory_format is None else images.contiguous(memory_format=pace.memory_format)


class _Ahead:
    """Jobs still to be done, the next ones filled by the workers while the network runs.

    Images are filled one by one, as the batch size may change until the fastest is found.
    """

    def __init__(self, pool: ThreadPoolExecutor, filler: _Filler, jobs: Jobs) -> None:
        self.pool, self.filler, self.jobs = pool, filler, jobs
        self.futures: deque[Future[tuple[Array, Array]]] = deque()

    def peek(self, pace: Pace) -> tuple[Jobs, Tensor]:
        """The next batch, and its images as the network takes them."""
        batch = self.jobs[: pace.batch_size]
        self._submit(2 * pace.batch_size)
        filled = [future.result() for future, _ in zip(self.futures, batch, strict=False)]
        return batch, self.filler.images(batch, filled, pace)

    def take(self, pace: Pace) -> tuple[Jobs, Tensor]:
        """The next batch, which is then no longer to be done."""
        batch, images = self.peek(pace)
        for _ in batch:
            self.futures.popleft()
        self.jobs = self.jobs[len(batch) :]
        self._submit(2 * pace.batch_size)  # for the next batches, while this one is run
        return batch, images

    def _submit(self, until: int) -> None:
        for job in self.jobs[len(self.futures) : until]:
            self.futures.append(self.pool.submit(self.filler.pixels_after, *job))


class _Clock:
    """Runs the network, notes the scores, and adds up the seconds."""

    def __init__(self, model: Callable[[Tensor], Tensor], targets: Tensor, scores: Tensor) -> None:
        self.model, self.targets, self.scores = model, targets, scores
        self.packed = False
        self.seconds = 0.0

    def run(self, batch: Jobs, images: Tensor) -> float:
        """Seconds per image; scores on the CPU mean that a GPU is done."""
        begin = time.perf_counter()
        output = self.output(images)
        self.scores[tuple(zip(*batch, strict=True))] = _rectified(output, self.targets[[n for n, _ in batch]])
        seconds = time.perf_counter() - begin
        self.seconds += seconds
        return seconds / len(batch)

    def output(self, images: Tensor) -> Tensor:
        """The network's output."""
        with torch.no_grad():
            return self.model(images)

    def fold(self, ahead: _Ahead) -> None:
        """Go on with a faster copy, if there is one that gives the same."""
        folded = fold_batch_norms(self.model) if isinstance(self.model, nn.Module) else None
        if folded is None:
            return
        images = ahead.peek(Pace(1, None))[1]
        expected = self.output(images)
        fused = fuse_activations(folded, images)
        if fused is not None and _gives(fused, images, expected):
            self.model, self.packed = fused, True
        elif _gives(folded, images, expected):
            self.model = folded

    def takes_channels_last(self, images: Tensor) -> bool:
        """Whether the network gives the same in channels-last; `view`, say, may refuse it."""
        return _gives(self.model, images.contiguous(memory_format=LAST), self.output(images))


@torch.no_grad()
def _gives(model: Callable[[Tensor], Tensor], images: Tensor, expected: Tensor) -> bool:
    """Whether the outputs are the expected ones up to rounding: 1e-4 is far less than an error would make."""
    try:
        return bool((model(images) - expected).abs().max() <= 1e-4 * expected.abs().max())
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False


def _first_pace(ahead: _Ahead, clock: _Clock) -> tuple[Pace, Probe]:
    """What to try on the first batch, and the search that goes on from there."""
    plain = torch.contiguous_format
    formats = [plain]
    # Packed convolutions return channels-last whatever they are given.
    if not clock.packed and clock.takes_channels_last(ahead.peek(Pace(FIRST, plain))[1]):
        formats.append(LAST)
    tries = probe(tuple(formats))
    return next(tries), tries


def _targets(target: int | Sequence[int] | Tensor, n_images: int) -> Tensor:
    if isinstance(target, np.ma.MaskedArray):
        raise TypeError("target must not be a masked array; drop the masked entries, or fill them")
    targets = torch.as_tensor(target).cpu()
    if targets.is_floating_point() or targets.dtype == torch.bool or targets.ndim > 1:
        raise TypeError(f"target must be an integer, or one for each image, got {target!r}")
    if targets.ndim == 1 and len(targets) != n_images:
        raise ValueError(
            f"target must be one integer, or one for each of the {n_images} images, got {len(targets)}"
        )
    return targets.expand(n_images).long()


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
