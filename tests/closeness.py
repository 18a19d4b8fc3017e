"""Comparison of two runs of the same computation."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the order of additions, which threads and memory alignment may change from run to run."""
    actual, expected = actual.detach(), expected.detach()
    # Cancellation in relevance leaves an error relative to the largest value, not to each.
    tolerance = 1e4 * torch.finfo(expected.dtype).eps if expected.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * float(expected.abs().max()))
