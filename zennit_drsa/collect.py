"""`collect`: activations and contexts for the solvers, with Zennit's rules (Note E)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from drsa_core import Pairs, PairStore, sample_pairs
from torch import Tensor, nn
from tqdm.auto import tqdm
from zennit.core import Composite

from .arriving import arriving_at
from .composite import DisentangledComposite
from .nonfinite import check_finite

Target: TypeAlias = int | Sequence[int] | Tensor | Callable[[Any], "int | Sequence[int] | Tensor"]


def collect(
    model: nn.Module,
    composite: Composite | None,
    layer: str | nn.Module,
    loader: Iterable[Any],
    target: Target,
    positions: int | None = 20,
    *,
    channel_dim: int = 1,
    slot: str | None = None,
    random_state: int | None = None,
    store: PairStore | None = None,
    progress: bool = True,
) -> Pairs:
    """Collect (a, c) pairs at a layer, with one forward and one backward pass for each batch.

    Parameters
    ----------
    model : module
        The model to explain, in eval mode. Batches are moved to its device.
    composite : Composite or None
        Zennit's rules; None gives the contexts of Gradient × Input, c = ∂y/∂a (Note B.2).
    layer : str or module
        The layer, or its dotted name.
    loader : iterable
        Batches: input tensors, or tuples that start with one.
    target : int, sequence of int, tensor (n_images,), or function
        Output to explain: one for all images, one for each image in the order of the loader, or a function of
        the batch as it comes from the loader that returns either, e.g. `lambda batch: batch[1]`.
    positions : int or None
        Random positions per image, without repetition; None for all.
    channel_dim, slot
        As in `SubspaceFilter`.
    random_state : int, optional
        Seed of the positions.
    store : PairStore, optional
        Where to keep each batch as it is done. Batches that it holds already are not computed again.
    progress : bool
        Show a progress bar.

    Returns
    -------
    Pairs
        On the CPU. Relevance starts as the output itself, R = y (Note A), so that Σ aᵀc over all positions of an
        image is y where the rules conserve it.
    """
    generator = torch.Generator()
    if random_state is None:
        generator.seed()
    else:
        generator.manual_seed(random_state)
    parts: list[Pairs] = []
    n_images, n_stored = 0, 0 if store is None else len(store)
    rules = DisentangledComposite(composite, layer, None, channel_dim=channel_dim, slot=slot)
    with rules.context(model):
        for index, batch in enumerate(tqdm(loader, desc="collect", unit="batch", disable=not progress)):
            input = _input(batch, model)
            targets = _targets(target, batch, len(input), n_images)
            first, n_images = n_images, n_images + len(input)
            # Drawn for batches from the store as well, so that a collection that went on equals one in one go.
            seed = int(torch.randint(2**62, (), generator=generator))
            if index < n_stored:
                continue
            pairs = _batch_pairs(rules, model, input, targets, positions, seed)
            pairs = Pairs(pairs.a.cpu(), pairs.c.cpu(), pairs.image + (first if store is None else 0))
            if store is None:
                parts.append(pairs)
            else:
                store.append(pairs)
    if isinstance(target, Tensor | Sequence) and len(target) != n_images:
        raise ValueError(f"target has {len(target)} entries, but the loader gave {n_images} images")
    if store is not None:
        return store.load()
    if not parts:
        raise ValueError("the loader gave no batches")
    images = torch.cat([part.image for part in parts])
    return Pairs(torch.cat([part.a for part in parts]), torch.cat([part.c for part in parts]), images)


def _batch_pairs(
    rules: DisentangledComposite,
    model: nn.Module,
    input: Tensor,
    targets: Tensor,
    positions: int | None,
    seed: int,
) -> Pairs:
    relevance_passes = rules.virtual_layer.passes_relevance

    def attr_output(output: Tensor) -> Tensor:
        if output.ndim != 2 or not ((targets >= 0) & (targets < output.shape[1])).all():
            raise ValueError(
                f"target must be between 0 and the number of outputs minus 1; the output has shape "
                f"{tuple(output.shape)}, the targets are {sorted(set(targets.tolist()))[:10]}"
            )
        chosen = nn.functional.one_hot(targets.to(output.device), output.shape[1]).to(output)
        return chosen * output.detach() if relevance_passes else chosen

    arriving = arriving_at(rules.virtual_layer, model, input, attr_output)
    check_finite(arriving.context, model, input, attr_output)
    generator = torch.Generator().manual_seed(seed)
    dim = rules.filter.channel_dim
    return sample_pairs(arriving.activation, arriving.context, positions, generator, dim)


def _input(batch: Any, model: nn.Module) -> Tensor:
    input = batch[0] if isinstance(batch, tuple | list) else batch
    if not isinstance(input, Tensor):
        raise TypeError(
            "loader must give tensors, or tuples or lists that start with the input tensor, "
            f"got {type(batch).__name__}"
        )
    parameter = next(model.parameters(), None)
    return input.detach() if parameter is None else input.detach().to(parameter.device)


def _targets(target: Target, batch: Any, n_batch: int, first: int) -> Tensor:
    """Targets of a batch, shape (N,)."""
    is_function = callable(target) and not isinstance(target, Tensor)
    value = torch.as_tensor(target(batch) if is_function else target)
    if value.is_floating_point() or value.dtype == torch.bool:
        raise TypeError(f"target must be made of integers, got {value.dtype}")
    if value.ndim == 0:
        return value.expand(n_batch).long()
    chosen = value if is_function else value[first : first + n_batch]
    if chosen.shape != (n_batch,):
        raise ValueError(
            f"target must give one index for each of the {n_batch} images of a batch, got shape "
            f"{tuple(chosen.shape)} for the images from {first} on"
        )
    return chosen.long()
