"""The network above the layer, g: a ↦ y, for one example and many activations at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from .request import Request


class UpperNetwork:
    """g(a) for one example, where a is a batch of activations put in the place of the layer's own.

    The part below the layer has to be run as well, for what bypasses the layer, but its result does not
    depend on a. So it is run on the one example, not on as many copies as there are activations. A model
    that does not take a batch size that changes at the layer (it concatenates a bypass, say, or reshapes
    with the batch size of its input) is found out on the first call, and gets the copies.

    Parameters
    ----------
    request : Request
        A batch of one.
    activation : tensor, shape (1, …, D, …)
        φ(x), for the check.
    score : tensor, shape (1,)
        y = g(φ(x)), for the check.
    """

    def __init__(self, request: Request, activation: Tensor, score: Tensor) -> None:
        self._request = request
        self._shares_lower_part = True
        self._shares_lower_part = self._reproduces(activation, score)

    def __call__(self, activation: Tensor) -> Tensor:
        """Scores y, shape (n,), of activations of shape (n, …, D, …).

        The activations may be overwritten: the next layer may work in place (ReLU after a convolution).
        """
        request = self._request
        if not self._shares_lower_part:
            request = request.repeated(len(activation))
        score = request.select(request.run(lambda _: activation))
        if len(score) != len(activation):
            raise ValueError(
                f"the model gives {len(score)} rows for {len(activation)} activations at layer "
                f"{request.layer_name!r}; the first axis of the activation must run over the examples"
            )
        return score

    def _reproduces(self, activation: Tensor, score: Tensor) -> bool:
        """Whether two activations above one input give twice the known score."""
        try:
            with torch.no_grad():
                twice = self(torch.cat([activation, activation]))
        except (RuntimeError, ValueError, IndexError, AssertionError):
            return False
        # The batch size may change the order of summation, hence not bit for bit.
        return torch.allclose(twice, score.expand(2), rtol=1e-3, atol=1e-5)
