"""Checks of what users hand in: every message names what was expected, what came, and what to do."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

ArrayLike: TypeAlias = "Tensor | np.ndarray[Any, Any]"


def as_float_tensor(value: ArrayLike, name: str) -> Tensor:
    """Return `value` as a detached float32 or float64 tensor on its own device, without a copy if it is one.

    Half precision is widened to float32: sums over thousands of samples need the digits.
    """
    if isinstance(value, np.ndarray):
        value = _from_numpy(value, name)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a NumPy array or a torch tensor, got {type(value).__name__}")
    check_floating(value, name)
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {value.layout}; convert it with .to_dense()")
    value = value.detach()
    return value if value.dtype == torch.float64 else value.float()


def _from_numpy(array: np.ndarray[Any, Any], name: str) -> Tensor:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, and the values under the mask would be used like the others; leave "
            "those rows out, or give .filled(value)"
        )
    if array.dtype.kind not in "fciub":  # objects, text, dates
        raise TypeError(f"{name} must be floating point, got an array of {array.dtype}")
    # Torch takes neither negative strides nor foreign byte orders, and warns of read-only arrays.
    if not (array.flags.writeable and array.flags.c_contiguous and array.dtype.isnative):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    return torch.as_tensor(array)


def own_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy, for values that must not change with what they were given.

    Made outside of inference mode, whose tensors no graph could hold later.
    """
    with torch.inference_mode(False):
        return tensor.clone(memory_format=torch.contiguous_format)


def check_floating(value: Tensor, name: str) -> None:
    """Raise if `value` is not a tensor of real floating-point numbers."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a torch tensor, got {type(value).__name__}; convert it with torch.as_tensor"
        )
    if value.dtype.is_complex:
        raise TypeError(
            f"{name} must be floating point, got {value.dtype}; take .real, .imag or .abs() of it"
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
    """Return `value` as a finite float tensor of shape (N, D)."""
    tensor = as_float_tensor(value, name)
    if tensor.ndim != 2 or tensor.shape[0] < min_rows or tensor.shape[1] < 1:
        least = "both at least 1" if min_rows == 1 else f"n_features at least 1 and n_samples {min_rows}"
        raise ValueError(
            f"{name} must have shape (n_samples, n_features) with {least}, got {tuple(tensor.shape)}"
        )
    check_finite(tensor, name)
    return tensor


def check_pairs(a: ArrayLike, c: ArrayLike, min_rows: int = 1) -> tuple[Tensor, Tensor]:
    """Return activations and contexts as finite tensors of one shape (N, D), dtype and device."""
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
            "all activations a are zero: the layer is silent on these inputs. Check that the inputs are "
            "preprocessed as the model expects them, and that the layer is the intended one"
        )
    if not c.any():
        raise ValueError(
            "all contexts c are zero: the model's output does not respond to this layer. Check that the "
            "target, the layer and the attribution method are the intended ones"
        )
