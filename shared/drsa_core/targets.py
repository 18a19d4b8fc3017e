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
    if not isinstance(output, Tensor):
        if callable(target):
            return _scores_of_object(output, target, n_examples)
        raise TypeError(
            f"the model must return a tensor, got {type(output).__name__}; give the target as a function of "
            "what it returns, e.g. target=lambda output: output.logits[:, 1]"
        )
    if output.ndim == 0 and n_examples in (None, 1):
        output = output.reshape(1)
    if output.ndim == 0 or (n_examples is not None and len(output) != n_examples):
        raise ValueError(
            f"the model must return one row for each of the {n_examples} examples, got shape "
            f"{tuple(output.shape)}; explain a model that scores each example by itself"
        )
    if callable(target):
        score: object = target(output.clone())  # it may write into what it gets
        what = "the callable target"
    else:
        what = f"target {_shown(target)}"
        score = _indexed(output, target, what)
    if not isinstance(score, Tensor) or score.numel() != len(output):
        got = tuple(score.shape) if isinstance(score, Tensor) else type(score).__name__
        raise ValueError(
            f"{what} must select one score for each of the {len(output)} rows of the output, of shape "
            f"{tuple(output.shape)}, but gives {got}; name the target class, e.g. target=0"
        )
    return score.reshape(len(output))


def _scores_of_object(output: object, target: Callable[[Any], Any], n_examples: int | None) -> Tensor:
    """The scores (n,) that a function selects from an output of which nothing else is known."""
    score = target(output)
    one_a_row = isinstance(score, Tensor) and score.ndim > 0 and score.numel() == len(score)
    if not one_a_row or n_examples not in (None, len(score)):
        got = tuple(score.shape) if isinstance(score, Tensor) else type(score).__name__
        rows = "row of the output" if n_examples is None else f"of the {n_examples} examples"
        raise ValueError(
            f"the callable target must select one score for each {rows}, a {type(output).__name__}, but "
            f"gives {got}; e.g. target=lambda output: output.logits[:, 1]"
        )
    return score.reshape(-1)


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
    """The target of example i alone; `select_scores` has seen that there is one for each, or one for all."""
    target = as_listed(target)
    of_example: Callable[[int], Target] | None = getattr(target, "of_example", None)
    if of_example is not None:  # a function that is another one for each example
        return of_example(i)
    if isinstance(target, np.ndarray | Tensor):
        entries = torch.as_tensor(target)
        return int(entries[i] if entries.numel() > 1 else entries)
    return target[i if len(target) > 1 else 0] if isinstance(target, list) else target


def targets_of_batch(target: Target, first: int, n_batch: int) -> Target:
    """The part of a target for a whole loader that belongs to its images from `first` on."""
    target = as_listed(target)
    if isinstance(target, Tensor | np.ndarray) and np.ndim(target) > 0:
        part: Any = target[first : first + n_batch]
    elif isinstance(target, list):
        part = target[first : first + n_batch]
    else:
        return target
    if len(part) != n_batch:
        raise ValueError(
            f"target has {len(target)} entries, but the loader gave {first + n_batch} images or more; give "
            "one target for each image, in the order of the loader"
        )
    return part


def check_length(target: Target, n_images: int) -> None:
    """Raise if a target with one entry for each image has another number of entries."""
    target = as_listed(target)
    is_list = isinstance(target, list) or (isinstance(target, Tensor | np.ndarray) and np.ndim(target) > 0)
    if is_list and len(target) != n_images:  # type: ignore[arg-type]
        raise ValueError(
            f"target has {len(target)} entries, but the loader gave {n_images} images"  # type: ignore[arg-type]
        )


def _indexed(output: Tensor, target: Target, what: str) -> Tensor:
    n_rows = len(output)
    if target is None:
        return output
    target = as_listed(target)
    if isinstance(target, tuple):
        rows: list[tuple[int, ...]] = [_indices(target, what)] * n_rows
    elif isinstance(target, list) and target and isinstance(target[0], tuple):
        rows = [_indices(entry, what) for entry in target]
    else:
        numbers = _integers(target, what)
        if numbers.ndim == 0 or numbers.numel() == 1:
            rows = [(int(numbers),)] * n_rows
        else:
            rows = [(number,) for number in numbers.reshape(-1).tolist()]
    if len(rows) != n_rows:
        raise ValueError(
            f"{what} has {len(rows)} entries for {n_rows} rows of the output; give one for all, or one for "
            "each example"
        )
    sizes = output.shape[1:]
    for row in rows:
        inside = len(row) == len(sizes) and all(-s <= i < s for i, s in zip(row, sizes, strict=True))
        if not inside:
            raise ValueError(
                f"{what} does not fit the model's output of shape {tuple(output.shape)}: expected "
                f"{len(sizes)} index(es) below {tuple(sizes)}, got {row}. Give an index within the output, "
                "one per example, or a function of the output"
            )
    columns = [torch.tensor(column, device=output.device) for column in zip(*rows, strict=True)]
    return output[(torch.arange(n_rows, device=output.device), *columns)]


def _integers(target: object, what: str) -> Tensor:
    try:
        numbers = torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{what} is not an index, a list of them, or a function of the output") from error
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise TypeError(f"{what} must be made of integers, got {numbers.dtype}")
    return numbers


def _indices(entry: Sequence[Any], what: str) -> tuple[int, ...]:
    return tuple(int(i) for i in _integers(list(entry), what).tolist())


def _shown(target: object) -> str:
    text = repr(target)
    return text if len(text) < 60 else f"{text[:57]}…"
