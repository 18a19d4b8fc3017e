"""Methods with noise: the parts of a map and the whole need the same random numbers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def drawn_again(inputs: Iterable[Tensor], enabled: bool = True) -> AbstractContextManager[None]:
    """What is drawn after this context is what was drawn inside of it.

    `randn_like` and its kin draw from the generator of the tensor's device, so that not only that of the CPU
    is put back.

    Parameters
    ----------
    inputs : iterable of tensor
        What the noise is for.
    enabled : bool
        Without it, the generators go on.
    """
    return torch.random.fork_rng({x.device for x in inputs if x.is_cuda}, enabled=enabled)
