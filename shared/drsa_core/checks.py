"""Numbers, labels and arrays that users hand in, checked once at the door; scales and precision.

NumPy scalars, 0-d arrays and 0-d tensors count as numbers, because loops over arrays yield them. Booleans do
not, and a float is never taken for an integer.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

ArrayLike: TypeAlias = "Tensor | np.ndarray[Any, Any]"
Seed: TypeAlias = "int | np.integer[Any] | None"
HALF = (torch.float16, torch.bfloat16)


# Numbers ------------------------------------------------------------------------------------------------


def as_scalar(value: object) -> object:
    """Return the Python number inside a NumPy scalar, a 0-d array or a 0-d tensor; other values unchanged."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray | Tensor) and value.ndim == 0):
        return value.item()
    return value


def as_int(value: object, name: str, low: int | None = None, high: int | None = None) -> int:
    """Return `value` as an int from `low` to `high`, both included.

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
    """Return `value` as a finite float from `low` to `high`, both included.

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
    """Return a seed: None, or an int of at least 0."""
    return None if value is None else as_int(value, f"{name}, if not None,", 0)


def torch_generator(random_state: Seed) -> torch.Generator:
    """Return a CPU generator with that seed, or with a fresh one for None."""
    seed, generator = as_seed(random_state), torch.Generator()
    if seed is None:
        generator.seed()
        return generator
    return generator.manual_seed(seed % 2**64)  # torch takes 64 bits, NumPy any number of them


def _within(number: Any, low: float | None, high: float | None) -> bool:
    return (low is None or number >= low) and (high is None or number <= high)


def _range(low: float | None, high: float | None) -> str:
    if low is None:
        return "" if high is None else f" of at most {high}"
    return f" of at least {low}" if high is None else f" from {low} to {high}"


# Labels -------------------------------------------------------------------------------------------------


def as_hashable_labels(labels: Iterable[Any], name: str) -> list[Hashable]:
    """Return labels as a list of Python values, one for each instance, so that equal ones are one class.

    Elements of a tensor are different objects with different hashes: each would be a class.

    Parameters
    ----------
    labels : tensor or array, shape (N,), or iterable
        The iterable may hold 0-d tensors and NumPy scalars.
    """
    if isinstance(labels, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array")
    if isinstance(labels, np.ndarray | Tensor):
        if labels.ndim != 1:
            raise ValueError(f"{name} must have shape (N,), got {tuple(labels.shape)}")
        values = labels.tolist()
    else:
        values = [as_scalar(label) for label in labels]
    for place, label in enumerate(values):
        if not isinstance(label, Hashable) or isinstance(label, Tensor) or label != label:  # NaN
            raise ValueError(
                f"{name} must hold one label for each instance, got {label!r:.40} at index {place}"
            )
    return values


def as_int_labels(labels: object, n: int, of: str, name: str = "labels") -> Tensor:
    """Return labels as a tensor of int on the CPU, shape (n,)."""
    wanted = f"{name} must be {n} integers, one for each {of}"
    if isinstance(labels, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array")
    try:
        tensor = torch.as_tensor(labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:  # texts, None, rows of different length
        raise TypeError(f"{wanted}, got {labels!r:.80}") from error
    if tensor.is_floating_point() or tensor.is_complex() or tensor.shape != (n,):
        raise ValueError(f"{wanted}, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensor.long()


# Tensors ------------------------------------------------------------------------------------------------


def as_float_tensor(value: ArrayLike, name: str) -> Tensor:
    """Return `value` as a detached float32 or float64 tensor on its device, without a copy if it is one.

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
    """Return a contiguous copy, for values that must not change with what they were given.

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
    if not value.dtype.is_floating_point:
        how = "take .real, .imag or .abs() of it" if value.dtype.is_complex else "convert it with .float()"
        raise TypeError(f"{name} must be floating point, got {value.dtype}; {how}")


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


@contextmanager
def full_precision() -> Iterator[None]:
    """Switch autocast off, as a `with` block or a decorator.

    Autocast is meant for the layers of a network. Products with a basis in bfloat16 keep two digits, with
    which a basis is not orthonormal, and a solver does not converge.
    """
    with ExitStack() as stack:
        for device in ("cpu", "cuda", "mps", "xpu"):
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


# Scales -------------------------------------------------------------------------------------------------
# Products of activations and contexts leave float32 long before the data do: 1e-20 · 1e-20 is 0 there, and
# 1e20 · 1e20 is infinite. Subspaces do not depend on the scale, so it is taken out before anything is
# multiplied. Scales are powers of two: dividing by them changes no digit.


def unit_scale(values: Tensor) -> tuple[Tensor, int]:
    """Values divided by 2^e such that the largest modulus lies in [½, 1), and e; zeros have e = 0.

    Parameters
    ----------
    values : tensor of floats
        Finite.
    """
    largest = float(values.abs().amax()) if values.numel() else 0.0
    exponent = math.frexp(largest)[1]
    return times_power_of_two(values, -exponent), exponent


def times_power_of_two(values: Tensor, exponent: int) -> Tensor:
    """Values · 2^exponent, in two steps: the factor itself may lie outside of the dtype's range."""
    if exponent == 0:
        return values
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)


def unscaled(values: Tensor, exponent: int, name: str) -> Tensor:
    """Values · 2^exponent in float64.

    Raises
    ------
    ValueError
        If the largest of them is too large or too small for float64: it would become infinite or zero.
    """
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


def feature_relevance(a: Tensor, c: Tensor) -> tuple[Tensor, int]:
    """E[a_j c_j] of each feature: values (D,) in float64, and e such that it is values · 2^e.

    Parameters
    ----------
    a, c : tensor, shape (N, D)
    """
    (a, of_a), (c, of_c) = unit_scale(a), unit_scale(c)
    return (a.double() * c.double()).mean(0), of_a + of_c
