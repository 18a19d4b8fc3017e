"""Patch flipping: how fast the output falls when relevant patches are removed (section 5, Note D)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..checks import as_int, check_finite
from ..layer import batch_dependence
from ..targets import Target, check_length, select_scores
from ..token_maps import covers, spread
from .fills import Array, Fill, Preprocessing, find_fill
from .folding import fold_batch_norms

#: Patches flipped at step τ = 1, 2, …, by name of the schedule.
SCHEDULES = {
    "squares": lambda step: step**2,
    "square totals": lambda step: 2 * step - 1,  # τ² = 1 + 3 + … + (2τ − 1)
    "single": lambda step: 1,
}


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
        Time spent on filling and in the network.
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
    target: Target,
    preprocessing: Preprocessing | tuple[Sequence[float] | float, Sequence[float] | float],
    *,
    patch_size: int = 16,
    schedule: str | Sequence[int] = "squares",
    fill: str | Fill = "telea",
    batch_size: int | None = None,
    progress: bool = False,
) -> FlippingCurves:
    """Remove patches from the most to the least relevant, and record the rectified output of the target.

    Parameters
    ----------
    model : callable
        Inputs (n, C, H, W) ↦ outputs (n, n_outputs). A module must be in eval mode. It is run in a copy
        whose batch norms are folded into convolutions (see `folding`), and on a CPU on inputs in
        channels-last, if the outputs of the first batch stay the same up to rounding.
    inputs : tensor, shape (N, C, H, W)
        The images, as the network takes them.
    maps : tensor, shape (N, K, C, H, W) or (N, C, H, W)
        Their relevance, or `Explanation.token_maps` (N, K, h, w). With K concepts, the union of what each
        removes is removed (section 5.2). Maps of the inputs' own shape are one map; write K maps without
        channels as (N, K, 1, H, W).
    target : int, sequence of int or tensor (N,), or function
        Output to record: one for all images, one for each, or a function from the output to scores (n,).
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
        run. Default: 4 on a CPU, where the activations of larger batches fall out of its caches, else 64.
    progress : bool
        Show a progress bar.

    Returns
    -------
    FlippingCurves
        On the CPU, in float64.
    """
    if not isinstance(inputs, Tensor) or inputs.ndim != 4 or not inputs.is_floating_point():
        raise ValueError("inputs must be a tensor of floating point and shape (N, C, H, W)")
    inputs = inputs.detach()
    check_finite(inputs, "inputs")
    relevance = check_maps(maps, inputs)
    check_length(target, len(inputs))
    of_each: Tensor | None = None
    if not callable(target) and not isinstance(target, int):
        of_each = torch.as_tensor(target).expand(len(inputs))
    if not isinstance(preprocessing, Preprocessing):
        preprocessing = Preprocessing.from_mean_std(*preprocessing)
    fill = find_fill(fill)
    if isinstance(model, nn.Module):
        _check_mode(model, batch_size)
    if batch_size is None:
        batch_size = 4 if inputs.device.type == "cpu" else 64

    grid = patch_grid(inputs.shape[2], inputs.shape[3], patch_size)
    ranks = removal_ranks(patch_relevance(relevance, grid)).cpu()
    counts = removal_counts(ranks.shape[1], schedule)
    gone = torch.stack([ranks < count for count in counts], dim=1)  # (N, T + 1, P)
    # A step in which the union does not grow keeps the output of the step before.
    is_new = torch.ones(gone.shape[:2], dtype=torch.bool)
    is_new[:, 1:] = (gone[:, 1:] != gone[:, :-1]).any(2)

    pixels, neutral = _pixels(inputs, preprocessing)
    scores = torch.full(gone.shape[:2], torch.nan, dtype=torch.float64)
    run: Callable[[Tensor], Tensor] | None = None
    fill_seconds = network_seconds = 0.0
    bar = tqdm(total=int(is_new.sum()), desc="patch flipping", unit="image", disable=not progress)
    with bar, torch.no_grad():
        for batch in is_new.nonzero().split(as_int(batch_size, "batch_size", 1)):
            rows, steps = batch.unbind(1)
            begin = time.perf_counter()
            masks = gone[rows, steps].numpy().take(grid.numpy(), axis=1)  # (n, H, W)
            filled = [_filled(pixels[n], mask, neutral, fill) for n, mask in zip(rows, masks, strict=True)]
            originals = inputs[rows]
            shown = preprocessing.to_inputs(torch.from_numpy(np.stack(filled)).to(originals))
            # Pixels that are still there keep the very values of the inputs.
            is_gone = torch.from_numpy(masks).to(originals.device)[:, None]
            images = torch.where(is_gone, shown, originals)
            begin, before = time.perf_counter(), begin
            fill_seconds += begin - before
            if run is None:
                run = _fastest(model, images[:1])
            of_rows = target if of_each is None else of_each[rows]
            found = select_scores(run(images), of_rows, len(rows)).double().cpu()
            check_finite(found, "the model's output")
            scores[rows, steps] = found.clamp(min=0)
            network_seconds += time.perf_counter() - begin
            bar.update(len(batch))
    for step in range(1, len(counts)):
        scores[:, step] = torch.where(is_new[:, step], scores[:, step], scores[:, step - 1])
    share = torch.tensor(counts, dtype=torch.float64) / ranks.shape[1]
    return FlippingCurves(share, gone.double().mean(2), scores, fill_seconds, network_seconds)


# ------------------------------------------------------------------ images and network


def _pixels(inputs: Tensor, preprocessing: Preprocessing) -> tuple[Array, Array]:
    """Pixels (N, C, H, W) of the inputs, and the colour (C,) that the network sees as 0."""
    with torch.no_grad():
        pixels = preprocessing.to_pixels(inputs.clone())  # which it may write into
        neutral = preprocessing.to_pixels(torch.zeros_like(inputs[:1]))
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= -0.01 and high <= 1.01):
        raise ValueError(
            f"pixels must lie in [0, 1], but those of the inputs go from {low:.3g} to {high:.3g}: mean and "
            "std (or to_pixels) do not fit the inputs"
        )
    return pixels.float().cpu().numpy(), neutral.float().mean((0, 2, 3)).clamp(0, 1).cpu().numpy()


def _filled(pixels: Array, mask: Array, neutral: Array, fill: Fill) -> Array:
    """Pixels (C, H, W) with those of the mask filled in."""
    if not mask.any():
        return pixels
    # Copies, as a fill may write into what it is given, and other steps begin with the same pixels.
    filled = fill(pixels.copy(), mask.copy(), neutral.copy())
    if filled.shape != pixels.shape or not np.isfinite(filled).all():
        raise ValueError(f"fill must return finite pixels of shape {pixels.shape}, got shape {filled.shape}")
    return filled


def _fastest(model: Callable[[Tensor], Tensor], images: Tensor) -> Callable[[Tensor], Tensor]:
    """The folded copy or the model, in channels-last or plain: the first that gives the model's output."""

    def in_channels_last(network: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: network(x.contiguous(memory_format=torch.channels_last))

    folded = fold_batch_norms(model) if isinstance(model, nn.Module) else None
    networks: list[Callable[[Tensor], Tensor]] = [model] if folded is None else [folded, model]
    if images.device.type == "cpu":
        networks = [*map(in_channels_last, networks), *networks]
    expected = model(images)
    for network in networks:
        try:  # 1e-4 is far more than rounding, and far less than an error would make
            if bool((network(images) - expected).abs().max() <= 1e-4 * expected.abs().max()):
                return network
        except (RuntimeError, TypeError, ValueError, AttributeError):  # `view`, say, may refuse channels-last
            continue
    return model


def _check_mode(model: nn.Module, batch_size: int | None) -> None:
    """Raise if outputs depend on which images share a batch, which is nobody's choice here, or on chance."""
    where, in_training = ("the model", True) if model.training else batch_dependence(model)
    if where is not None and in_training:
        raise ValueError(f"{where} is in training mode; call model.eval()")
    if where is not None and batch_size != 1:
        raise ValueError(f"{where} normalises by the statistics of the batch; give batch_size=1")


# ------------------------------------------------------------------ which patches, and when


def check_maps(maps: Tensor, inputs: Tensor | None = None, n_subspaces: int | None = None) -> Tensor:
    """Return maps of shape (N, K, C, H, W), finite; maps (N, C, H, W) become those of K = 1.

    Parameters
    ----------
    maps : tensor, shape (N, K, C, H, W), or (N, C, H, W) or (N, K, h, w) with `inputs`
        Relevance R_pk, or that of one standard explanation, which has the shape of the inputs. C may be 1:
        relevance summed over channels. Maps of fewer positions than pixels (`Explanation.token_maps`) are
        spread over the inputs. Without `inputs`, whether the second of four axes holds concepts or channels
        cannot be known, and is refused unless its length is 1.
    inputs : tensor, shape (N, C, H, W), optional
        The images that the maps explain.
    n_subspaces : int, optional
        The K that is expected.
    """
    if not isinstance(maps, Tensor):
        raise TypeError(f"maps must be a torch tensor, got {type(maps).__name__}")
    if maps.ndim == 4 and inputs is not None and covers(maps, (int(inputs.shape[2]), int(inputs.shape[3]))):
        maps = spread(maps, (int(inputs.shape[2]), int(inputs.shape[3])))[:, :, None]
    elif maps.ndim == 4:
        n = int(maps.shape[1])
        # One map of one channel is the same in both readings.
        if n > 1 and (inputs is None or maps.shape[1:] != inputs.shape[1:]):
            raise ValueError(
                f"maps must have shape (N, K, C, H, W), got {tuple(maps.shape)}: give maps[:, None] for one "
                f"map of C = {n} channels, maps[:, :, None] for K = {n} maps without channels (token_maps)"
            )
        maps = maps[:, None]
    if maps.ndim != 5 or 0 in maps.shape:
        raise ValueError(
            f"maps must have shape (N, K, C, H, W), or (N, C, H, W) for K = 1, got {tuple(maps.shape)}"
        )
    if inputs is not None and (
        (len(maps), *maps.shape[3:]) != (len(inputs), *inputs.shape[2:])
        or maps.shape[2] not in (1, inputs.shape[1])
    ):
        raise ValueError(
            f"maps must have shape (N, K, C, H, W) with the (N, C, H, W) = {tuple(inputs.shape)} of the "
            f"inputs, got {tuple(maps.shape)}"
        )
    if n_subspaces is not None and maps.shape[1] != n_subspaces:
        raise ValueError(f"expected maps of K = {n_subspaces} concepts, got K = {maps.shape[1]}")
    check_finite(maps, "maps (relevance)")
    return maps.detach()


def patch_grid(height: int, width: int, patch_size: int) -> Tensor:
    """Number of the patch that each pixel belongs to, counted row by row, shape (H, W).

    If the patch size does not divide the image, the patches at the right and lower edge are smaller, and a
    warning says so.
    """
    size = as_int(patch_size, "patch_size", 1, min(height, width))
    if height % size or width % size:
        warnings.warn(
            f"patches of {size} × {size} do not divide an image of {height} × {width}: those at the right "
            "and lower edge are smaller",
            stacklevel=3,
        )
    rows, columns = torch.arange(height) // size, torch.arange(width) // size
    return rows[:, None] * (int(columns[-1]) + 1) + columns


def patch_relevance(maps: Tensor, grid: Tensor) -> Tensor:
    """Relevance of each patch, summed over its pixels and all channels, shape (N, K, P).

    Parameters
    ----------
    maps : tensor, shape (N, K, C, H, W)
    grid : tensor of int, shape (H, W)
        From `patch_grid`.
    """
    # In float64, so that ties between patches of equal relevance do not depend on the order of addition.
    pixels = check_maps(maps).double().sum(2).flatten(2)
    sums = pixels.new_zeros(*pixels.shape[:2], int(grid.max()) + 1)
    return sums.index_add_(2, grid.flatten().to(pixels.device), pixels)


def removal_ranks(relevance: Tensor) -> Tensor:
    """When each patch is removed, counted from 0 for the most relevant, shape (N, P).

    With K concepts, patch flipping runs once for each of them in parallel, and after every step the union of
    what they removed is gone (section 5.2): a patch goes with the first concept that removes it. Patches of
    equal relevance go in the order of their numbers.

    Parameters
    ----------
    relevance : tensor, shape (N, K, P)
    """
    check_finite(relevance, "relevance")  # NaN would be sorted to the front
    order = relevance.argsort(dim=2, descending=True, stable=True)
    ranks = torch.empty_like(order)
    ranks.scatter_(2, order, torch.arange(order.shape[2], device=order.device).expand_as(order))
    return ranks.amin(1)


def removal_counts(n_patches: int, schedule: str | Sequence[int] = "squares") -> list[int]:
    """How many patches each concept has removed after step 0, 1, …, T; the last is all of them.

    Parameters
    ----------
    n_patches : int
    schedule : {"squares", "square totals", "single"} or sequence of int
        "squares": step τ removes τ² patches, 1, 5, 14, 30, … in all. "square totals": after step τ it is τ²,
        1, 4, 9, … in all; the paper's sentence "we flip τ² such patches at each step" can be read either way.
        "single": one patch per step. A sequence gives the totals after each step itself.
    """
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ValueError(
                f"schedule must be one of {', '.join(SCHEDULES)} or a sequence, got {schedule!r}"
            )
        counts = [0]
        while counts[-1] < n_patches:
            counts.append(min(n_patches, counts[-1] + SCHEDULES[schedule](len(counts))))
        return counts
    counts = [0, *(as_int(count, "every entry of schedule") for count in schedule)]
    if counts[-1] != n_patches or any(b <= a for a, b in pairwise(counts)):
        raise ValueError(
            f"schedule must be increasing numbers of removed patches that end with all {n_patches}, got "
            f"{list(schedule)}"
        )
    return counts
