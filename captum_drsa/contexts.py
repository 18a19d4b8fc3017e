"""Step 1 of Note B by Captum's methods: contexts from Shapley values, LRP, and any layer attributor."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from captum.attr import LRP, LayerAttribution, PerturbationAttribution, ShapleyValueSampling
from drsa_core import context_from_relevance, lost_relevance
from drsa_core.checks import warn_user
from drsa_core.contexts import UpperNetwork, contexts_by_example, rows_per_run
from drsa_core.layer import TOLERANCE, Cut, Request, Split, eager, warn_of_loss
from drsa_core.model_state import restored
from drsa_core.provenance import content_digest
from drsa_core.targets import gradient_at_output
from torch import Tensor, nn

from ._captum import ATTRIBUTES, Network, for_network, lrp_rules_in_force, rules_on
from .embeddings import own_inputs


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
            sums, sizes = (a.sum(positions, keepdim=True) for a in (activation, activation.abs()))
            # Where activations cancel, R_j / Σ a_j is out of all measure.
            share = float(maps[sums.abs() < 0.1 * sizes].abs().sum() / maps.abs().sum().clamp(min=1e-30))
            if share > 0.1:
                warn_user(
                    f"{share:.0%} of the relevance at layer {request.layer_name!r} is on feature maps whose "
                    "positive and negative activations cancel, so that the Shapley contexts R_j / Σ a_j are "
                    "very large there. They are meant for layers after a ReLU: choose one, or set "
                    "context_method='integrated_gradients' or 'gradient'",
                )
            return context_from_relevance(sums, maps).expand_as(activation)  # 0/0 = 0

        activation, score, _ = bare_pass(request)
        with torch.no_grad():
            return activation, contexts_by_example(request, activation, score, explain)


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
        """Activations and contexts."""
        return self.with_loss(request)[:2]

    def with_loss(self, request: Request) -> tuple[Tensor, Tensor, float]:
        """Activations, contexts, and the share of the relevance that sits on zero activations.

        It does so where the attributor has a baseline, at which neurons are active that are not at the input.
        """
        if self.attributor.layer is not request.layer:
            raise ValueError(
                f"context_method {type(self.attributor).__name__} was made for another layer than "
                f"{request.layer_name!r} of the model that is explained; make it with that model and layer"
            )
        forward = self.attributor.forward_func
        request = replace(
            own_inputs(request), forward=eager(forward) if isinstance(forward, nn.Module) else forward
        )
        activation, _, _ = bare_pass(
            request
        )  # it refuses a layer that runs twice, of which Captum takes one run
        by_gradient = not isinstance(self.attributor, PerturbationAttribution)
        inputs = tuple(
            x.detach().clone().requires_grad_(by_gradient and x.is_floating_point()) for x in request.inputs
        )
        scores = Network(request)
        relevance = for_network(self.attributor, scores).attribute(
            inputs if len(inputs) > 1 else inputs[0], additional_forward_args=scores.additional_args
        )
        relevance = (relevance[0] if isinstance(relevance, tuple) else relevance).detach()
        if relevance.shape != activation.shape:
            raise ValueError(
                f"{type(self.attributor).__name__} gives relevance of shape {tuple(relevance.shape)}, but "
                f"layer {request.layer_name!r} has outputs of shape {tuple(activation.shape)}"
            )
        lost = lost_relevance(activation, relevance)
        if lost > TOLERANCE:
            warn_of_loss(lost, request.layer_name)
        return activation, context_from_relevance(activation, relevance), lost


@dataclass(frozen=True)
class LRPContext:
    """c = R ⊘ a with the relevance R that `LRP` brings to the layer, 0 on inactive neurons (section 3.2).

    Attributes
    ----------
    method : captum.attr.LRP
        Its model carries the rules.
    """

    method: LRP

    def __repr__(self) -> str:
        parts, kinds = [], []
        for name, rule in rules_on(eager(self.method.model)):
            settings = {k: v for k, v in vars(rule).items() if isinstance(v, bool | int | float | str | None)}
            parts.append([name, type(rule).__qualname__, settings])
            kinds.append(type(rule).__name__)
        rules = f"{', '.join(dict.fromkeys(kinds))} {content_digest(*parts)}" if kinds else "default rules"
        return f"LRPContext({rules})"

    def __call__(self, request: Request) -> tuple[Tensor, Tensor]:
        """Activations and contexts."""
        model = eager(self.method.model)
        with restored(model, also=[rule for _, rule in rules_on(model)], attributes=ATTRIBUTES):
            split, _ = lrp_split(self.method, own_inputs(request))
        return split.activation, split.context


def lrp_split(method: LRP, request: Request, verbose: bool = False) -> tuple[Split, Tensor]:
    """The pass under Captum's rules, cut at the layer, and the model's own output; inside `restored`."""
    if not all(x.is_floating_point() for x in request.inputs):
        raise TypeError(
            "Captum's LRP needs floating-point inputs, and has no contexts for token numbers; use "
            "context_method='gradient' or 'integrated_gradients'"
        )
    output, activation = lrp_rules_in_force(method, request, verbose)
    # Relevance at the output: that itself at an index and 0 elsewhere; the one minus the other for y₁ − y₂.
    start = output * gradient_at_output(output, request.target, len(request))
    try:
        return Split(request, start=lambda _: start, passes_relevance=True, activation=activation), output
    except RuntimeError as error:
        if "doesn't require grad" not in str(error):
            raise
        raise ValueError(
            f"no gradient flows from the explained score to layer {request.layer_name!r} or from there to "
            "every input: the model detaches an activation (torch.no_grad, .detach(), argmax, checkpointing "
            "with use_reentrant=True), which LRP cannot pass"
        ) from error


def bare_pass(request: Request) -> tuple[Tensor, Tensor, float | None]:
    """Activation (N, …, D, …), score (N,), and the share of the gradient that goes around the layer.

    None for models that cannot be differentiated.
    """
    if all(x.is_floating_point() for x in request.inputs):
        try:
            split = Split(request)
            return split.activation, request.scores(split.output).detach(), split.around
        except (RuntimeError, ValueError):  # what is wrong without gradients too comes again
            pass
    cut = Cut()
    with torch.no_grad(), request.running(cut) as output:
        request.refuse_tokens_first(cut.below)
        return cut.below, request.scores(output), None
