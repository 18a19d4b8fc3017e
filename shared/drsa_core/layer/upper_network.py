"""The network above the layer, g: a ↦ y, for one example and many activations at a time."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .request import Request


class UpperNetwork:
    """g(a) for one example, where a is a batch of activations put in the place of the layer's own.

    The part below the layer has to be run as well, for what bypasses the layer, but its result does not
    depend on a. So it is run on the one example, not on as many copies as there are activations. A model
    that does not take a batch size that changes at the layer (it concatenates a bypass, say, or reshapes
    with the batch size of its input) is found out by a trial, and gets the copies.

    Parameters
    ----------
    request : Request
        A batch of one.
    activation : tensor, shape (1, …, D, …)
        φ(x), for the check.
    score : tensor, shape (1,)
        y = g(φ(x)).

    Attributes
    ----------
    score, score_at_zero : tensor, shape (1,)
        g(φ(x)) and g(0).
    """

    def __init__(self, request: Request, activation: Tensor, score: Tensor) -> None:
        self._request, self.score = request, score
        self._shares_lower_part = True
        rows = torch.cat([activation, activation, torch.zeros_like(activation)])
        # The batch size may change the order of summation, hence not bit for bit. Half precision has few
        # digits, and sums of them fewer.
        tolerance = 1e-3 if score.dtype in (torch.float32, torch.float64) else 0.05
        try:
            scores = self._scores(rows)
            # Without an absolute tolerance: scores may be small. In doubt the copies are right as well.
            fits = torch.allclose(scores[:2], score.expand(2), rtol=tolerance, atol=0)
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            fits = False
        if not fits:
            self._shares_lower_part = False
            scores = self._scores_of_copies(rows)
            if not torch.allclose(scores[:2], score.expand(2), rtol=tolerance, atol=1e-2 * tolerance):
                warnings.warn(
                    "the model gives an example another score in its batch than among copies of itself: it "
                    f"mixes examples, or draws random numbers. Contexts at layer {request.layer_name!r} are "
                    "those of the example by itself; explain a model that scores each example by itself, or "
                    "one example at a time",
                    stacklevel=2,
                )
        self.score_at_zero = scores[2:]

    def __call__(self, activation: Tensor) -> Tensor:
        """Scores y, shape (n,), of activations of shape (n, …, D, …).

        The activations may be overwritten: the next layer may work in place (ReLU after a convolution).
        """
        request = self._request_for(len(activation))
        return _scores_of(request, request.run(lambda _: activation), len(activation))

    def gradient(self, activation: Tensor) -> Tensor:
        """Gradients ∂y/∂a at activations, both of shape (n, …, D, …)."""
        rows = activation.detach().requires_grad_()
        request = self._request_for(len(rows))
        with torch.enable_grad(), request.running(lambda _: rows.clone()) as output:
            score = _scores_of(request, output, len(rows))
            (gradient,) = torch.autograd.grad(score.sum(), rows)
        return gradient

    def _request_for(self, n_rows: int) -> Request:
        return self._request if self._shares_lower_part else self._request.repeated(n_rows)

    @property
    def is_potential(self) -> bool:
        """Whether the scores are those of one function, whose gradients can be integrated."""
        return getattr(self._request.target, "is_potential", True)

    def _scores(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            return self(rows.clone())

    def _scores_of_copies(self, rows: Tensor) -> Tensor:
        try:
            return self._scores(rows)
        except (RuntimeError, IndexError) as error:
            error.add_note(
                f"This came from a batch of {len(rows)} copies of one example. The part above layer "
                f"{self._request.layer_name!r} is run in batches of other sizes here: explain a model that "
                "takes any number of examples, with a target that does, or use the gradient as the context "
                "(context_method='gradient')"
            )
            raise


def _scores_of(request: Request, output: object, n_rows: int) -> Tensor:
    score = request.select(output)
    if len(score) != n_rows:
        raise ValueError(
            f"the model gives {len(score)} rows for {n_rows} activations at layer {request.layer_name!r}; "
            "the first axis of the activation must run over the examples"
        )
    return score
