"""Numbers, labels and arrays that users hand in; scales and precision."""

from __future__ import annotations

import math
import operator
import sys
import warnings
from collections.abc import Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

ArrayLike: TypeAlias = "Tensor | np.ndarray[Any, Any]"
Seed: TypeAlias = "int | np.integer[Any] | None"
HALF = (torch.float16, torch.bfloat16)


def as_int(value: Any, name: str, low: int | None = None, high: int | None = None) -> int:
    """An int from `low` to `high`, both included; those of NumPy and torch count, booleans and floats not."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    _check_bounds(number, low, high, f"{name} must be an integer", value)
    return int(number)  # type: ignore[arg-type]


def as_float(value: Any, name: str, low: float | None = None, high: float | None = None) -> float:
    """A finite float from `low` to `high`, both included."""
    try:
        number = None if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    finite = None if number is None or not math.isfinite(number) else number
    _check_bounds(finite, low, high, f"{name} must be a finite number", value)
    return float(number)  # type: ignore[arg-type]


def _check_bounds(number: float | None, low: float | None, high: float | None, text: str, value: Any) -> None:
    if number is None or (low is not None and number < low) or (high is not None and number > high):
        bounds = "" if low is None else f" of at least {low}" if high is None else f" from {low} to {high}"
        raise ValueError(f"{text}{bounds}, got {value!r}")


def as_seed(value: Any, name: str = "random_state") -> int | None:
    """A seed: None, or an int of at least 0."""
    return None if value is None else as_int(value, f"{name}, if not None,", 0)


def as_hashable_labels(labels: Iterable[Any], name: str) -> list[Hashable]:
    """Labels as Python values, one for each instance: elements of a tensor have different hashes."""
    _refuse_mask(labels, name)
    values = (labels if isinstance(labels, Tensor | np.ndarray) else np.asarray(list(labels))).tolist()
    if not isinstance(values, list):
        raise ValueError(f"{name} must have shape (N,), got {values!r}")
    for place, label in enumerate(values):
        if not isinstance(label, Hashable) or label != label:  # NaN
            raise ValueError(
                f"{name} must hold one label for each instance, got {label!r:.40} at index {place}"
            )
    return values


def as_int_labels(labels: object, n: int, of: str, name: str = "labels") -> Tensor:
    """Labels as a tensor of int on the CPU, shape (n,)."""
    _refuse_mask(labels, name)
    wanted = f"{name} must be {n} integers, one for each {of}"
    try:
        tensor = torch.as_tensor(labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:  # texts, None, rows of different length
        raise TypeError(f"{wanted}, got {labels!r:.80}") from error
    if tensor.is_floating_point() or tensor.is_complex() or tensor.shape != (n,):
        raise ValueError(f"{wanted}, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensor.long()


def _refuse_mask(value: object, name: str) -> None:
    if isinstance(value, np.ma.MaskedArray):  # torch would take the hidden values for real ones
        raise TypeError(f"{name} must not be a masked array; leave the masked entries out, or fill them")


def as_float_tensor(value: ArrayLike, name: str) -> Tensor:
    """A detached float32 or float64 tensor, half precision widened; not copied if it is one already."""
    if isinstance(value, np.ndarray):
        _refuse_mask(value, name)
        if value.dtype.kind != "f":
            raise TypeError(f"{name} must be floating point, got an array of {value.dtype}")
        # Torch takes neither negative strides nor foreign byte orders, and warns of read-only arrays.
        wide = np.float64 if value.dtype.itemsize >= 8 else np.float32
        value = torch.from_numpy(np.require(value, wide, ["C", "W"]))
    check_floating(value, name)
    value = value.detach()
    return value if value.dtype == torch.float64 else value.float()


def own_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy, made outside of inference mode, whose tensors no graph could hold later."""
    with torch.inference_mode(False):
        return tensor.clone(memory_format=torch.contiguous_format)


def check_floating(value: Any, name: str) -> None:
    """Raise if `value` is not a tensor of real floating-point numbers."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a torch tensor, got {type(value).__name__}; convert it with torch.as_tensor"
        )
    if not value.dtype.is_floating_point:
        raise TypeError(f"{name} must be floating point, got {value.dtype}; convert it with .float()")


def check_finite(value: Tensor, name: str) -> None:
    """Raise if `value` holds NaN or Inf, saying how many and where the first one is."""
    bad = ~torch.isfinite(value)
    if bad.any():
        first = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{name} has {int(bad.sum())} NaN or Inf values, the first at index {first}")


def check_matrix(value: ArrayLike, name: str, min_rows: int = 1) -> Tensor:
    """A finite float tensor of shape (N, D), N at least `min_rows`."""
    tensor = as_float_tensor(value, name)
    if tensor.ndim != 2 or tensor.shape[0] < min_rows or tensor.shape[1] < 1:
        least = "both at least 1" if min_rows == 1 else f"n_features at least 1 and n_samples {min_rows}"
        raise ValueError(
            f"{name} must have shape (n_samples, n_features) with {least}, got {tuple(tensor.shape)}"
        )
    check_finite(tensor, name)
    return tensor


def check_pairs(a: ArrayLike, c: ArrayLike, min_rows: int = 1) -> tuple[Tensor, Tensor]:
    """Activations and contexts as finite tensors of one shape (N, D), dtype and device."""
    a, c = check_matrix(a, "a (activations)", min_rows), check_matrix(c, "c (contexts)", min_rows)
    if a.shape != c.shape:
        raise ValueError(
            f"a and c must have the same shape (n_samples, n_features), got a {tuple(a.shape)} "
            f"and c {tuple(c.shape)}: row n of c is the context of row n of a"
        )
    dtype = torch.promote_types(a.dtype, c.dtype)
    return a.to(dtype), c.to(device=a.device, dtype=dtype)


def check_nonzero(a: Tensor, c: Tensor) -> None:
    """Raise if all activations or all contexts are zero: no direction is then relevant, any answer noise."""
    if not a.any():
        raise ValueError(
            "all activations a are zero: the layer is silent on these inputs. Check that they are "
            "preprocessed as the model expects them, and that the layer is the intended one"
        )
    if not c.any():
        raise ValueError(
            "all contexts c are zero: the model's output does not respond to this layer. Check that the "
            "target, the layer and the attribution method are the intended ones"
        )


@contextmanager
def full_precision() -> Iterator[None]:
    """Switch autocast off, as a `with` block or a decorator: a basis in bfloat16 is not orthonormal."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda", "mps", "xpu"):
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


# Products of activations and contexts leave float32 long before the data do: 1e-20 · 1e-20 is 0 there, and
# 1e20 · 1e20 is infinite. Subspaces do not depend on the scale, so it is taken out before anything is
# multiplied. Scales are powers of two: dividing by them changes no digit.


def unit_scale(values: Tensor) -> tuple[Tensor, int]:
    """Values divided by 2^e such that the largest modulus lies in [½, 1), and e; zeros have e = 0."""
    largest = float(values.abs().amax()) if values.numel() else 0.0
    exponent = math.frexp(largest)[1]
    return times_power_of_two(values, -exponent), exponent


def times_power_of_two(values: Tensor, exponent: int) -> Tensor:
    """Values · 2^exponent, in two steps: the factor itself may lie outside of the dtype's range."""
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half) if exponent else values


def unscaled(values: Tensor, exponent: int, name: str) -> Tensor:
    """Values · 2^exponent in float64; ValueError if the largest of them would become infinite or zero."""
    result = times_power_of_two(values.double(), exponent)
    largest = float(result.abs().amax())
    if not math.isfinite(largest) or (largest < torch.finfo(torch.float64).tiny and bool(values.any())):
        raise ValueError(
            f"{name} is about 2^{exponent}, beyond the range of float64. The subspaces are right all the "
            "same; multiply a or c by a constant if you need this number"
        )
    return result


def unit_rows(rows: Tensor) -> Tensor:
    """Rows (N, D) divided by their lengths, in float64; rows of zeros stay zero."""
    rows = rows.double()
    largest = rows.abs().amax(1, keepdim=True)
    rows = rows / torch.where(largest > 0, largest, 1)  # squares of the quotients stay in range
    lengths = rows.norm(dim=1, keepdim=True)
    return rows / torch.where(lengths > 0, lengths, 1)


# Libraries between the user's line and a warning of ours.
_OURS = ("drsa_core", "zennit_drsa", "captum_drsa", "torch", "zennit", "captum", "contextlib")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line outside of this library, and of those that it wraps, that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
