"""Numbers, seeds and labels that users hand in, as plain Python values.

NumPy scalars, 0-d arrays and 0-d tensors count as numbers, because loops over arrays yield them. Booleans do
not, and a float is never taken for an integer.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Hashable, Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Seed: TypeAlias = "int | np.integer[Any] | None"


def as_scalar(value: object) -> object:
    """The Python number inside a NumPy scalar, a 0-d array or a 0-d tensor; anything else as it is."""
    if isinstance(value, np.ma.MaskedArray):
        return value  # a masked value is not a number
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray | Tensor) and value.ndim == 0):
        return value.item()
    return value


def as_int(value: object, name: str, low: int | None = None, high: int | None = None) -> int:
    """Return `value` as an int from `low` to `high`, both included; NumPy's and 0-d ones are welcome.

    Raises
    ------
    ValueError
        For anything else, booleans and whole floats included.
    """
    number = as_scalar(value)
    if isinstance(number, bool) or not isinstance(number, numbers.Integral) or not _within(number, low, high):
        raise ValueError(f"{name} must be an integer{_range(low, high)}, got {value!r}")
    return int(number)


def as_float(value: object, name: str, low: float | None = None, high: float | None = None) -> float:
    """Return `value` as a finite float from `low` to `high`, both included; NumPy's and 0-d ones are welcome.

    Raises
    ------
    ValueError
        For anything else, booleans, NaN and infinity included.
    """
    number = as_scalar(value)
    is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number) or not _within(number, low, high):  # type: ignore[arg-type]
        raise ValueError(f"{name} must be a finite number{_range(low, high)}, got {value!r}")
    return float(number)  # type: ignore[arg-type]


def as_seed(value: object, name: str = "random_state") -> int | None:
    """Return a seed: None, or an int of at least 0, NumPy's included."""
    return None if value is None else as_int(value, f"{name}, if not None,", 0)


def torch_generator(random_state: Seed) -> torch.Generator:
    """A CPU generator with that seed, or with a fresh one for None."""
    seed, generator = as_seed(random_state), torch.Generator()
    if seed is None:
        generator.seed()
        return generator
    # torch takes 64 bits and no more; NumPy takes any.
    return generator.manual_seed(seed % 2**64)


def as_hashable_labels(labels: Iterable[Any], name: str) -> list[Hashable]:
    """Labels as a list of Python values, one for each instance, so that equal ones are one class.

    A tensor's elements are different objects, each with a hash of its own: a class each, if they were taken
    as they are.

    Parameters
    ----------
    labels : tensor or array, shape (N,), or iterable
        The iterable may hold 0-d tensors and NumPy scalars.
    """
    if isinstance(labels, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array; drop the masked entries, or fill them")
    if isinstance(labels, np.ndarray | Tensor):
        if labels.ndim != 1:
            raise ValueError(f"{name} must have shape (N,), got {tuple(labels.shape)}")
        values = labels.tolist()
    else:
        values = [as_scalar(label) for label in labels]
    for place, label in enumerate(values):
        if not isinstance(label, Hashable) or isinstance(label, Tensor):
            raise TypeError(
                f"{name} must hold one label for each instance, got {type(label).__name__} at index {place}"
            )
        if isinstance(label, float) and math.isnan(label):
            raise ValueError(f"{name} must not hold NaN, got one at index {place}")
    return values


def as_int_labels(labels: object, n: int, of: str, name: str = "labels") -> Tensor:
    """Labels as a tensor of int on the CPU, shape (n,)."""
    if isinstance(labels, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array; drop the masked entries, or fill them")
    try:
        tensor = torch.as_tensor(labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:  # texts, None, rows of different length
        raise TypeError(f"{name} must be {n} integers, one for each {of}, got {labels!r:.80}") from error
    if tensor.is_floating_point() or tensor.is_complex() or tensor.shape != (n,):
        raise ValueError(
            f"{name} must be {n} integers, one for each {of}, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}"
        )
    return tensor.long()


def _within(number: Any, low: float | None, high: float | None) -> bool:
    return (low is None or number >= low) and (high is None or number <= high)


def _range(low: float | None, high: float | None) -> str:
    if low is None:
        return "" if high is None else f" of at most {high}"
    return f" of at least {low}" if high is None else f" from {low} to {high}"
