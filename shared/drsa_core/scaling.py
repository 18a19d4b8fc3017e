"""Data of any scale, brought to one before anything is multiplied.

Products of activations and contexts leave float32 long before the data do: 1e-20 · 1e-20 is 0 there, and
1e20 · 1e20 is infinite. Subspaces do not depend on the scale, so it is taken out first. Scales are powers of
two: dividing by them changes no digit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
    rows = rows / torch.where(largest > 0, largest, 1)  # squares of what is left stay in range
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
