"""Patch flipping: how fast the output falls when relevant patches are removed (section 5, Note D)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..checks import as_int, check_finite
from ..layer import batch_dependence
from .filling import Filler, Preprocessing
from .fills import Fill, find_fill
from .patches import check_maps, patch_grid, patch_relevance, removal_counts, removal_ranks
from .running import Run


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
        Time spent on filling and in the network, each summed over what runs side by side.
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
        one operation (see `fusing`) and batches are run side by side, one on each of torch's threads; the
        same up to rounding. Any other callable, such as `model.forward`, is run as it is.
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
        Batches that are run side by side are filled by the threads that run them.
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
    inputs = inputs.detach()
    check_finite(inputs, "inputs")
    relevance = check_maps(maps, inputs)
    targets = _targets(target, len(inputs))
    if not isinstance(preprocessing, Preprocessing):
        preprocessing = Preprocessing.from_mean_std(*preprocessing)
    batch_size = None if batch_size is None else as_int(batch_size, "batch_size", 1)
    if isinstance(model, nn.Module):
        _check_mode(model, batch_size)
    workers = min(8, os.cpu_count() or 1) if workers is None else as_int(workers, "workers", 1)

    grid = patch_grid(inputs.shape[2], inputs.shape[3], patch_size)
    ranks = removal_ranks(patch_relevance(relevance, grid)).cpu()
    n_patches = ranks.shape[1]
    counts = removal_counts(n_patches, schedule)
    gone = torch.stack([ranks < count for count in counts], dim=1)  # (N, T + 1, P)
    filler = Filler(inputs, preprocessing, find_fill(fill), gone, grid)

    # A step in which the union does not grow keeps the output of the step before.
    is_new = torch.ones(gone.shape[:2], dtype=torch.bool)
    is_new[:, 1:] = (gone[:, 1:] != gone[:, :-1]).any(2)
    jobs = [(n, step) for n, step in is_new.nonzero().tolist()]
    scores = torch.full(gone.shape[:2], torch.nan, dtype=torch.float64)
    with tqdm(total=len(jobs), desc="patch flipping", unit="image", disable=not progress) as bar:
        run = Run(model, filler, targets, scores, bar)
        run.all(jobs, batch_size, workers)
    for step in range(1, len(counts)):
        scores[:, step] = torch.where(is_new[:, step], scores[:, step], scores[:, step - 1])
    share = torch.tensor(counts, dtype=torch.float64) / n_patches
    return FlippingCurves(share, gone.double().mean(2), scores, sum(filler.seconds), run.seconds)


def _check_mode(model: nn.Module, batch_size: int | None) -> None:
    """Raise if outputs depend on which images share a batch, which is nobody's choice here, or on chance."""
    where, in_training = ("the model", True) if model.training else batch_dependence(model)
    if where is not None and in_training:
        raise ValueError(
            f"{where} is in training mode, where outputs depend on the batch or on chance; call model.eval()"
        )
    if where is not None and batch_size != 1:
        raise ValueError(
            f"{where} normalises by the statistics of the batch, in evaluation mode too, so that outputs "
            "depend on which images share a batch; give batch_size=1"
        )


def _targets(target: int | Sequence[int] | Tensor, n_images: int) -> Tensor:
    if isinstance(target, np.ma.MaskedArray):
        raise TypeError("target must not be a masked array; drop the masked entries, or fill them")
    try:
        targets = torch.as_tensor(target).cpu()
    except (TypeError, ValueError, RuntimeError) as error:  # a function, a text, None
        raise TypeError(
            f"target must be an integer, or one for each image, got {target!r:.80}; for a function of the "
            "output, give a model that returns (n, 1), and target=0"
        ) from error
    if targets.is_floating_point() or targets.dtype == torch.bool or targets.ndim > 1:
        raise TypeError(f"target must be an integer, or one for each image, got {target!r}")
    if targets.ndim == 1 and len(targets) != n_images:
        raise ValueError(
            f"target must be one integer, or one for each of the {n_images} images, got {len(targets)}"
        )
    return targets.expand(n_images).long()
