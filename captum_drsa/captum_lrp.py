"""LRP: the backward pass of Captum's own rules, filtered by the virtual layer (sections 3.1 and 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from captum.attr import LRP
from drsa_core import Subspaces, context_from_relevance, filter_context
from drsa_core.layer import (
    Cut,
    Request,
    as_activation,
    copies,
    eager,
    gradients_at_cut,
    gradients_at_inputs,
    guarded,
    lost_relevance,
    share_around,
    warn_of_bypass,
    warn_of_loss,
)
from drsa_core.provenance import content_digest
from drsa_core.targets import gradient_at_output
from torch import Tensor

from ._captum import RuleHooks, rules_on
from .below_layer import original


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
        model, request = eager(self.method.model), original(request)
        if not all(x.is_floating_point() for x in request.inputs):
            raise TypeError(
                "Captum's LRP needs floating-point inputs, and has no contexts for token numbers; use "
                "context_method='gradient' or 'integrated_gradients'"
            )

        def contexts() -> tuple[Tensor, Tensor]:
            backward = LRPPass(self.method, request)
            return backward.activation, backward.context

        return guarded(model, contexts, [rule for _, rule in rules_on(model)])


class LRPPass:
    """One LRP forward pass, propagated down to the layer; `through` takes it on to the input by block.

    To be used inside `guarded`: Captum's rules stay on the model until that is left.

    Attributes
    ----------
    activation : tensor, shape (N, …, D, …)
        The model's own activation a at the layer, not the one under the rules' weights.
    relevance, context : tensor, shape (N, …, D, …)
        R and c = R ⊘ a at the layer.
    lost, share_around : float
        As in `BackwardPass`.
    """

    def __init__(self, method: LRP, request: Request, verbose: bool = False) -> None:
        self._name = request.layer_name
        self._inputs = tuple(x.detach().clone().requires_grad_() for x in request.inputs)
        hooks = RuleHooks(method, verbose)

        activations: list[Tensor] = []

        def note(module: object, args: object, output: object) -> None:
            activation = as_activation(output, request.layer, self._name, request.channel_dim, len(request))
            activations.append(activation.detach().clone())

        handle = request.layer.register_forward_hook(note)
        output = hooks.first_pass(copies(self._inputs), copies(request.args))
        handle.remove()
        if len(activations) != 1:
            raise ValueError(
                f"layer {self._name!r} must run once in a forward pass, but ran {len(activations)} times; "
                "choose another layer"
            )
        self.activation = activations[0]

        # Registered after Captum's hooks on the same module, so that the cut is above all of them.
        hooks.register()
        self._cut = Cut()
        request.layer.register_forward_hook(lambda module, args, output: self._cut(output))
        # Relevance at the output, output ⊙ ∂y/∂output: the output itself at the target and 0 elsewhere for an
        # index, the one minus the other for a difference of logits.
        initial = output.detach() * gradient_at_output(output, request.target, len(request))
        with torch.enable_grad():
            modified = self._second_pass(hooks, request)
            self.relevance, around = gradients_at_cut(
                modified, self._cut.above, self._inputs, self._name, initial, retain_graph=True
            )
        self.context = context_from_relevance(self.activation, self.relevance)
        self.lost, self.share_around = lost_relevance(self.activation, self.relevance), 0.0
        warn_of_loss(self.lost, self._name)
        if any(part is not None for part in around):
            self.share_around = share_around(around, self._below(self.relevance))
            warn_of_bypass(self.share_around, self._name)

    def _second_pass(self, hooks: RuleHooks, request: Request) -> Tensor:
        try:
            return hooks.second_pass(copies(self._inputs), copies(request.args))
        except RuntimeError as error:
            if "doesn't require grad" not in str(error):
                raise
            raise ValueError(
                "no gradient flows from the explained score to layer "
                f"{self._name!r} or from that layer to every input: the model detaches an activation "
                "(torch.no_grad, .detach(), argmax, checkpointing with use_reentrant=True), which LRP cannot "
                "pass"
            ) from error

    def _below(self, cotangent: Tensor, retain_graph: bool = True) -> tuple[Tensor, ...]:
        return gradients_at_inputs(
            self._cut.below, self._inputs, self._name, cotangent.contiguous(), retain_graph=retain_graph
        )

    def through(self, context: Tensor, subspaces: Subspaces, dim: int) -> tuple[Tensor, ...]:
        """Relevance of each input that passes through each block, shapes (N, K, …).

        Between layers Captum's rules keep relevance in the gradient slot, not c: what starts downwards is
        R⁽ᵏ⁾ = a ⊙ U_kU_kᵀc.
        """
        filtered = self.activation * filter_context(context, subspaces, dim)
        last = len(filtered) - 1
        by_concept = [self._below(part, k < last) for k, part in enumerate(filtered)]
        return tuple(torch.stack(parts, dim=1) for parts in zip(*by_concept, strict=True))
