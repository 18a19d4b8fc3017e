"""Numbers in the precision that they are in, also inside of `torch.autocast`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_DEVICES = ("cpu", "cuda", "mps", "xpu")
HALF = (torch.float16, torch.bfloat16)


@contextmanager
def full_precision() -> Iterator[None]:
    """Without autocast, as a `with` block or a decorator.

    Autocast is meant for the layers of a network. Products with a basis in bfloat16 keep two digits, with
    which a basis is not orthonormal, and a solver does not converge.
    """
    with ExitStack() as stack:
        for device in _DEVICES:
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
