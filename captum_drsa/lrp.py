"""LRP: the backward pass of Captum's own rules, filtered by the virtual layer (sections 3.1 and 3.2)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from captum.attr import LRP
from drsa_core import Subspaces, context_from_relevance, filter_context, lost_relevance
from torch import Tensor

from ._captum import RuleHooks
from .cut import Cut, gradient_at_layer
from .request import Request
from .restoration import preserved

# Standard rules leave no relevance on zero activations; more than this share is worth a word.
_LOST_RELEVANCE = 1e-3


@dataclass(frozen=True)
class LRPContext:
    """c = R ⊘ a with the relevance R that `LRP` brings to the layer, 0 on inactive neurons (section 3.2).

    Attributes
    ----------
    method : captum.attr.LRP
        Its model carries the rules.
    """

    method: LRP

    def __call__(self, request: Request) -> tuple[Tensor, Tensor]:
        """Activations and contexts."""
        with preserved(self.method.model):
            backward = LRPPass(self.method, request)
            return backward.activation, backward.context


class LRPPass:
    """One LRP forward pass, propagated down to the layer; `through` takes it on to the input by block.

    To be used inside `preserved(model)`: Captum's rules stay on the model until that is left.

    Attributes
    ----------
    activation : tensor, shape (N, …, D, …)
        The model's own activation a at the layer, not the one under the rules' weights.
    relevance, context : tensor, shape (N, …, D, …)
        R and c = R ⊘ a at the layer.
    """

    def __init__(self, method: LRP, request: Request, verbose: bool = False) -> None:
        self._name = request.layer_name
        self._inputs = tuple(x.detach().clone().requires_grad_() for x in request.inputs)
        hooks = RuleHooks(method, verbose)

        activations: list[Tensor] = []
        handle = request.layer.register_forward_hook(
            lambda module, args, output: activations.append(request.as_activation(output).clone())
        )
        output = hooks.first_pass(self._inputs, request.args)
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
        with torch.enable_grad():
            initial = _initial_relevance(request, output)
            modified = self._second_pass(hooks, request)
            self.relevance = gradient_at_layer(modified, self._cut.above, self._name, initial)
        self.context = context_from_relevance(self.activation, self.relevance)
        lost = lost_relevance(self.activation, self.relevance)
        if lost > _LOST_RELEVANCE:
            warnings.warn(
                f"{lost:.1%} of the relevance at layer {self._name!r} sits on zero activations, where no "
                "subspace can carry it; the K maps miss that share. Choose the layer after the activation "
                "function, or another rule above it",
                stacklevel=4,
            )

    def _second_pass(self, hooks: RuleHooks, request: Request) -> Tensor:
        try:
            return hooks.second_pass(self._inputs, request.args)
        except RuntimeError as error:
            if "doesn't require grad" not in str(error):
                raise
            raise ValueError(
                "no gradient flows from the explained score to layer "
                f"{self._name!r} or from that layer to every input: the model detaches an activation "
                "(torch.no_grad, .detach(), argmax), which LRP cannot pass"
            ) from error

    def through(self, context: Tensor, subspaces: Subspaces, dim: int) -> tuple[Tensor, ...]:
        """Relevance of each input that passes through each block, shapes (N, K, …).

        Between layers Captum's rules keep relevance in the gradient slot, not c: what starts downwards is
        R⁽ᵏ⁾ = a ⊙ U_kU_kᵀc.
        """
        filtered = self.activation * filter_context(context, subspaces, dim)
        return self._cut.gradients_below(self._inputs, filtered, self._name)


def _initial_relevance(request: Request, output: Tensor) -> Tensor:
    """Relevance at the output, output ⊙ ∂y/∂output.

    For an index that is the output itself at the target and 0 elsewhere; for a difference of logits it is
    the one minus the other.
    """
    leaf = output.detach().clone().requires_grad_()
    gradient = gradient_at_layer(request.select(leaf).sum(), leaf, "the output")
    return leaf.detach() * gradient
