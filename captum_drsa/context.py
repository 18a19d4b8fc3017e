"""Step 1 of Note B by Captum's methods: contexts from Shapley values, and from any layer attributor."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from captum.attr import LayerAttribution, PerturbationAttribution, ShapleyValueSampling
from drsa_core import context_from_relevance
from drsa_core.layer import (
    BackwardPass,
    Cut,
    Request,
    UpperNetwork,
    contexts_by_example,
    lost_relevance,
    warn_of_loss,
)
from drsa_core.layer.contexts import rows_per_run
from torch import Tensor

from .below_layer import original
from .inputs import as_captum_target, for_own_arguments


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
    perturbations_per_eval: int | None = field(default=None, repr=False)
    show_progress: bool = field(default=False, repr=False)

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
                perturbations_per_eval=self.perturbations_per_eval or rows_per_run(n_maps, activation),
                show_progress=self.show_progress,
            )
            maps = relevance.to(activation).reshape(shape)
            sums = activation.sum(positions, keepdim=True)
            _warn_of_cancellation(sums, activation.abs().sum(positions, keepdim=True), maps, request)
            return context_from_relevance(sums, maps).expand_as(activation)  # 0/0 = 0

        measure_bypass(request)
        with torch.no_grad():
            cut = Cut()
            score = request.scores(request.run(cut))
            return cut.above, contexts_by_example(request, cut.above, score, explain)


@dataclass(frozen=True)
class LayerAttributionContext:
    """c = R ⊘ a with the relevance R of any Captum layer attributor, e.g. `LayerDeepLift`."""

    attributor: LayerAttribution

    def __post_init__(self) -> None:
        if not self.attributor.multiplies_by_inputs:
            raise ValueError(
                f"context_method {type(self.attributor).__name__} gives no relevance R here, from which "
                "contexts c = R ⊘ a are found; make it with multiply_by_inputs=True, or use another one"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.attributor).__name__})"

    def __call__(self, request: Request) -> tuple[Tensor, Tensor]:
        """Activations and contexts. The target must be one of Captum's."""
        return self.with_loss(request)[:2]

    def with_loss(self, request: Request) -> tuple[Tensor, Tensor, float]:
        """Activations, contexts, and the share of the relevance that sits on zero activations.

        It does so where the attributor has a baseline, at which neurons are active that are not at the input.
        """
        if callable(request.target):
            raise TypeError(
                f"{type(self.attributor).__name__} does not take a callable target; wrap the model in one "
                "that returns the score, or use another context_method"
            )
        if self.attributor.layer is not request.layer:
            raise ValueError(
                f"context_method {type(self.attributor).__name__} was made for another layer than "
                f"{request.layer_name!r} of the model that is explained; make it with that model and layer"
            )
        request = original(request)  # Captum's attributor is one for the network's own inputs
        measure_bypass(request)
        cut = Cut()
        with torch.no_grad():
            request.run(cut)  # as a whole: it refuses a layer that runs twice, of which Captum takes one run
        activation = cut.above
        inputs = tuple(x.detach().clone() for x in request.inputs)  # Captum sets requires_grad on them
        if not isinstance(self.attributor, PerturbationAttribution):
            for x in inputs:
                x.requires_grad_(x.is_floating_point())  # else Captum does it, and warns
        relevance = for_own_arguments(self.attributor, request).attribute(
            inputs if len(inputs) > 1 else inputs[0],
            target=as_captum_target(request.target),
            additional_forward_args=request.args or None,
        )
        relevance = relevance[0] if isinstance(relevance, tuple) else relevance
        if relevance.shape != activation.shape:
            raise ValueError(
                f"{type(self.attributor).__name__} gives relevance of shape {tuple(relevance.shape)}, but "
                f"the output of layer {request.layer_name!r} has shape {tuple(activation.shape)}; give it "
                "the same layer, and attribute to its output"
            )
        relevance = relevance.detach()
        lost = lost_relevance(activation, relevance)
        warn_of_loss(lost, request.layer_name)
        return activation, context_from_relevance(activation, relevance), lost


def measure_bypass(request: Request) -> float | None:
    """Share of the gradient that goes around the layer: a method without gradients cannot see it.

    None for models that cannot be differentiated. There is a warning if the share is large.
    """
    if not all(torch.is_floating_point(x) for x in request.inputs):
        return None
    try:
        return BackwardPass(request).share_around
    except (RuntimeError, ValueError):
        return None


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
