"""Which output is explained: an index, one for each example, or a function of the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Target: TypeAlias = (
    "int | tuple[int, ...] | Tensor | np.ndarray[Any, Any] | Sequence[int] | Sequence[tuple[int, ...]]"
    "| Callable[[Any], Tensor] | None"
)

# The target that stands for the second entry of every batch, as data sets with labels give it.
LABEL = "label"


def select_scores(output: object, target: Target, n_examples: int | None = None) -> Tensor:
    """The explained score y of each row of a model's output, shape (n,).

    Parameters
    ----------
    output : tensor, shape (n, …), or any object
        What the model returned. Other objects than tensors, such as those of `transformers`, need a target
        that is a function.
    target : int, tuple, sequence, tensor, function or None
        An index for outputs (n, C); a tuple of indices for outputs of more axes; a list or tensor with one of
        these for each row; a function from the output to the scores (n,). None if there is one score a row.
    n_examples : int, optional
        The number n, for a message if the output has another one.
    """
    n_rows, kind = n_examples, type(output).__name__
    if isinstance(output, Tensor):
        if output.ndim == 0 and n_examples in (None, 1):
            output = output.reshape(1)
        if output.ndim == 0 or n_examples not in (None, len(output)):
            raise ValueError(
                f"the model must return one row for each of the {n_examples} examples, got shape "
                f"{tuple(output.shape)}; explain a model that scores each example by itself"
            )
        n_rows, kind = len(output), f"output of shape {tuple(output.shape)}"
    if callable(target):
        score: object = target(output.clone() if isinstance(output, Tensor) else output)  # it may write there
    elif isinstance(output, Tensor):
        score = _indexed(output, target)
    else:
        raise TypeError(
            f"the model must return a tensor, got {kind}; give the target as a function of what it returns, "
            "e.g. target=lambda output: output.logits[:, 1]"
        )
    if n_rows is None and isinstance(score, Tensor) and score.ndim:
        n_rows = len(score)
    if not isinstance(score, Tensor) or score.numel() != n_rows:
        got = tuple(score.shape) if isinstance(score, Tensor) else type(score).__name__
        what = "the callable target" if callable(target) else f"target {target!r:.60}"
        raise ValueError(
            f"{what} must select one score for each of the {n_rows} rows of the output, a {kind}, but gives "
            f"{got}; name the target class, e.g. target=0"
        )
    return score.reshape(-1)


def _indexed(output: Tensor, target: Target) -> Tensor:
    """One entry of each row of an output."""
    if target is None:
        return output
    try:
        index = torch.as_tensor(as_listed(target), device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"target {target!r:.60} is no index, list of them, or function") from error
    if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool:
        raise TypeError(f"target must be made of integers, got {index.dtype}")
    if isinstance(target, tuple):
        index = index.reshape(1, -1)
    elif not (isinstance(target, Sequence) and index.ndim == 2):  # a list of tuples
        index = index.reshape(-1, 1)
    n_rows, sizes = len(output), torch.tensor(output.shape[1:], dtype=torch.long, device="cpu")
    if len(index) not in (1, n_rows):
        raise ValueError(
            f"target {target!r:.60} has {len(index)} entries for {n_rows} rows of the output; give one for "
            "all, or one for each example"
        )
    if index.shape[1] != len(sizes) or bool(((index >= sizes) | (index < -sizes)).any()):
        raise ValueError(
            f"target {target!r:.60} does not fit the model's output of shape {tuple(output.shape)}: expected "
            f"{len(sizes)} index(es) below {tuple(output.shape[1:])}, one set for each example"
        )
    index = index.expand(n_rows, -1).to(output.device)
    return output[(torch.arange(n_rows, device=output.device), *index.T)]


def gradient_at_output(output: object, target: Target, n_examples: int | None = None) -> Tensor:
    """∂y/∂output, of the output's shape: a one in the place of the target, for an index.

    `n_examples` as in `select_scores`.
    """
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the model must return a tensor, got {type(output).__name__}; wrap the model in a module that "
            "returns the scores"
        )
    with torch.enable_grad():
        leaf = output.detach().clone().requires_grad_()
        score = select_scores(leaf, target, n_examples)
        gradient = None
        if score.requires_grad:
            (gradient,) = torch.autograd.grad(score.sum(), leaf, allow_unused=True)
    if gradient is None:
        raise ValueError(
            "no gradient flows from the explained score to the output: the callable target detaches it "
            "(torch.no_grad, .detach(), argmax)"
        )
    return gradient


def as_listed(target: Target) -> Target:
    """The target, as a list if it is another sequence with one entry for each example, such as a range.

    A tuple is an index into an output of several axes.
    """
    is_other = isinstance(target, Sequence) and not isinstance(target, list | tuple | str)
    return list(target) if is_other else target  # type: ignore[arg-type]


def target_of_example(target: Target, i: int) -> Target:
    """The target of example i; `select_scores` has seen that there is one for each, or one for all."""
    target = as_listed(target)
    of_example: Callable[[int], Target] | None = getattr(target, "of_example", None)
    if of_example is not None:  # a function that is another one for each example
        return of_example(i)
    if isinstance(target, np.ndarray | Tensor):
        entries = torch.as_tensor(target)
        return int(entries[i] if entries.numel() > 1 else entries)
    return target[i if len(target) > 1 else 0] if isinstance(target, list) else target


def targets_of_batch(target: Target, first: int, n_batch: int) -> Target:
    """The part of a target for a whole loader that belongs to its examples from `first` on."""
    target = as_listed(target)
    if not _is_listed(target):
        return target
    part: Any = target[first : first + n_batch]  # type: ignore[index]
    if len(part) != n_batch:
        check_length(target, f"{first + n_batch} images or more")
    return part


def check_length(target: Target, n_images: int | str) -> None:
    """Raise if a target with one entry for each image has another number of entries."""
    target = as_listed(target)
    if _is_listed(target) and len(target) != n_images:  # type: ignore[arg-type]
        raise ValueError(
            f"target has {len(target)} entries, but the loader gave {n_images}; give one target for "  # type: ignore[arg-type]
            "each image, in the order of the loader"
        )


def _is_listed(target: Target) -> bool:
    is_array = isinstance(target, Tensor | np.ndarray) and np.ndim(target) > 0
    return is_array or isinstance(target, list)
