"""Step 1 of Note B: activations a = φ(x) and contexts c, with R_k = (U_kᵀa)ᵀ(U_kᵀc)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from captum.attr import IntegratedGradients, LayerAttribution, ShapleyValueSampling
from drsa_core import context_from_relevance
from torch import Tensor

from .cut import Cut, gradient_at_layer
from .request import Request
from .upper_network import UpperNetwork

# A context method maps a request to activations and contexts, both of shape (N, …, D, …).
ContextMethod: TypeAlias = Callable[[Request], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class GradientContext:
    """c = ∂y/∂a (Note B.2, Gradient × Input)."""

    def __call__(self, request: Request) -> tuple[Tensor, Tensor]:
        """Activations and contexts from one forward pass and a backward pass down to the layer."""
        with torch.enable_grad():
            activation, score = _cut_run(request)
            gradient = gradient_at_layer(score.sum(), activation, request.layer_name)
        return activation.detach(), gradient


@dataclass(frozen=True)
class IntegratedGradientsContext:
    """c = ∫ ∂y/∂a dt along the straight path from 0 to a (Note B.2, Integrated Gradients).

    Attributes
    ----------
    n_steps : int
        Steps of the integral. Default 100, as in Note D.
    internal_batch_size : int, optional
        Activations per run of the upper network: bounds the memory. Default: as many as 128 MB hold.
    """

    n_steps: int = 100
    internal_batch_size: int | None = None

    def __call__(self, request: Request) -> tuple[Tensor, Tensor]:
        """Activations and contexts, example by example."""
        errors: list[Tensor] = []

        def explain(upper: UpperNetwork, activation: Tensor) -> Tensor:
            # Without the product with a − 0 the integral itself is returned: nothing is divided by a.
            method = IntegratedGradients(lambda path: upper(path.clone()), multiply_by_inputs=False)
            size = self.internal_batch_size or _rows_per_run(self.n_steps, activation)
            context: Tensor = method.attribute(
                activation, n_steps=self.n_steps, internal_batch_size=min(size, self.n_steps)
            )
            errors.append(_conservation_error(activation, context, upper))
            return context

        # IG cannot tell a missing path from a network that is flat; this can, and is cheap.
        with torch.enable_grad():
            activation, score = _cut_run(request)
            gradient_at_layer(score.sum(), activation, request.layer_name)
        pairs = _by_example(request, activation.detach(), score.detach(), explain)
        self._warn_of_few_steps(float(torch.stack(errors).max()), request.layer_name)
        return pairs

    def _warn_of_few_steps(self, error: float, layer_name: str) -> None:
        if error > 0.1:
            warnings.warn(
                f"the integral above layer {layer_name!r} with {self.n_steps} steps is off by {error:.0%} of "
                "y(a) − y(0), to which the relevance aᵀc must sum; take more steps, "
                f"context_method=IntegratedGradientsContext(n_steps={4 * self.n_steps})",
                stacklevel=3,
            )


@dataclass(frozen=True)
class ShapleyContext:
    """c_j = R_j / Σ_positions a_j, with the Shapley values R_j of the feature maps (Note B.2, Shapley).

    Attributes
    ----------
    n_samples : int
        Random permutations. Default 25, as in Note D.
    perturbations_per_eval : int, optional
        Activations per run of the upper network: bounds the memory. Default: as many as 128 MB hold.
    show_progress : bool
        Captum's progress bar, one per example.
    """

    n_samples: int = 25
    perturbations_per_eval: int | None = None
    show_progress: bool = False

    def __call__(self, request: Request) -> tuple[Tensor, Tensor]:
        """Activations and contexts, example by example. The players are the D maps, the baseline is 0."""
        dim = request.channel_dim

        def explain(upper: UpperNetwork, activation: Tensor) -> Tensor:
            n_maps = activation.shape[dim]
            shape = [1] * activation.ndim
            shape[dim] = n_maps
            positions = [axis for axis in range(activation.ndim) if axis != dim % activation.ndim]

            def score_of_coalition(present: Tensor) -> Tensor:
                """Scores (n,) with the maps that are 1 in `present`, shape (n, D), and without the others."""
                return upper(activation * present.reshape(len(present), *shape[1:]))

            relevance = ShapleyValueSampling(score_of_coalition).attribute(
                activation.new_ones(1, n_maps),
                n_samples=self.n_samples,
                perturbations_per_eval=self.perturbations_per_eval or _rows_per_run(n_maps, activation),
                show_progress=self.show_progress,
            )
            maps = relevance.to(activation).reshape(shape)
            sums = activation.sum(positions, keepdim=True)
            _warn_of_cancellation(sums, activation.abs().sum(positions, keepdim=True), maps, request)
            return context_from_relevance(sums, maps).expand_as(activation)  # 0/0 = 0

        with torch.no_grad():
            activation, score = _cut_run(request)
            return _by_example(request, activation, score, explain)


@dataclass(frozen=True)
class LayerAttributionContext:
    """c = R ⊘ a with the relevance R of any Captum layer attributor, e.g. `LayerDeepLift`."""

    attributor: LayerAttribution

    def __call__(self, request: Request) -> tuple[Tensor, Tensor]:
        """Activations and contexts. The target must be one of Captum's."""
        if callable(request.target):
            raise TypeError(
                f"{type(self.attributor).__name__} does not take a callable target; wrap the model in one "
                "that returns the score, or use another context_method"
            )
        with torch.no_grad():
            activation = request.activation().clone()
        relevance = self.attributor.attribute(
            request.inputs if len(request.inputs) > 1 else request.inputs[0],
            target=request.target,
            additional_forward_args=request.args or None,
        )
        relevance = relevance[0] if isinstance(relevance, tuple) else relevance
        if relevance.shape != activation.shape:
            raise ValueError(
                f"{type(self.attributor).__name__} gives relevance of shape {tuple(relevance.shape)}, but "
                f"the output of layer {request.layer_name!r} has shape {tuple(activation.shape)}; give it "
                "the same layer, and attribute to its output"
            )
        return activation, context_from_relevance(activation, relevance.detach())


def _conservation_error(activation: Tensor, context: Tensor, upper: UpperNetwork) -> Tensor:
    """What Σ aᵀc misses of y(a) − y(0), relative to that, shape ().

    Where y(a) − y(0) is itself small, next to terms that cancel in the sum, these are the measure.
    """
    relevance = activation * context
    gained = (upper.score - upper.score_at_zero).sum()
    scale = torch.maximum(gained.abs(), 0.05 * relevance.abs().sum())
    return (relevance.sum() - gained).abs() / scale.clamp(min=1e-30)


def _warn_of_cancellation(sums: Tensor, sizes: Tensor, relevance: Tensor, request: Request) -> None:
    """Warn if relevance sits on maps whose activations cancel: c_j = R_j / Σ a_j is then out of all measure.

    Parameters
    ----------
    sums, sizes, relevance : tensor, shape (1, …, D, …)
        Σ a_j, Σ |a_j| and R_j over the positions of each feature map.
    """
    cancels = sums.abs() < 0.1 * sizes
    share = float(relevance[cancels].abs().sum() / relevance.abs().sum().clamp(min=1e-30))
    if share > 0.1:
        warnings.warn(
            f"{share:.0%} of the relevance at layer {request.layer_name!r} is on feature maps whose positive "
            "and negative activations cancel, so that the Shapley contexts R_j / Σ a_j are very large there. "
            "They are meant for layers after a ReLU: choose one, or set "
            "context_method='integrated_gradients' or 'gradient'",
            stacklevel=2,
        )


def _rows_per_run(n_rows: int, activation: Tensor) -> int:
    """Size of equal batches of activations, each of at most 128 MB, if there are `n_rows` in all.

    In large batches the weights of the upper network are read less often, and so is the lower part run.
    """
    at_most = max(1, 2**27 // activation.nbytes)
    n_runs = math.ceil(n_rows / at_most)
    return math.ceil(n_rows / n_runs)


def _cut_run(request: Request) -> tuple[Tensor, Tensor]:
    """Activation, as a leaf of the graph above the layer, and scores (N,) of one forward pass."""
    cut = Cut()
    score = request.select(request.run(cut))
    return cut.above, score


def _by_example(
    request: Request,
    activation: Tensor,
    score: Tensor,
    explain: Callable[[UpperNetwork, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    contexts = []
    for i in range(len(request)):
        a = activation[i : i + 1]
        contexts.append(explain(UpperNetwork(request.example(i), a, score[i : i + 1]), a))
    return activation, torch.cat(contexts)
