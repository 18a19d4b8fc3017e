"""The one place that looks into Zennit's hooks; when a Zennit release moves them, look here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from drsa_core.fingerprint import feed
from torch import nn
from zennit.core import Hook
from zennit.rules import ReLUBetaSmooth, ReLUDeconvNet, ReLUGuidedBackprop

# Rules that modify gradients; every other Zennit rule passes relevance in the gradient's place.
GRADIENT_RULES = (ReLUBetaSmooth, ReLUDeconvNet, ReLUGuidedBackprop)
# What a hook keeps of a backward pass, which says nothing about its rule.
_WORKING_STATE = {"stored_tensors", "tensor_handles", "active", "backward", "pre_backward"}


def hooks_by_module(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """The Zennit hooks that are registered on a model's modules, once each."""
    for module in model.modules():
        owners = (getattr(function, "__self__", None) for function in module._forward_hooks.values())
        # Zennit registers several methods of a hook; dict keeps the order and drops the repetitions.
        for hook in dict.fromkeys(owner for owner in owners if isinstance(owner, Hook)):
            yield module, hook


def holds_relevance(model: nn.Module, slot: str | None = None) -> bool:
    """Whether the gradient slot holds relevance (LRP composites) rather than gradients."""
    if slot is not None:
        return slot == "relevance"
    return any(hook.active and not isinstance(hook, GRADIENT_RULES) for _, hook in hooks_by_module(model))


def describe_rules(model: nn.Module) -> str:
    """The rules that are registered on a model, with a digest of where they are and of their parameters."""
    names = {module: name for name, module in model.named_modules()}
    digest, kinds = hashlib.sha256(), []
    for module, hook in hooks_by_module(model):
        parameters = {key: value for key, value in vars(hook).items() if not _is_working_state(key)}
        feed(digest, [names[module], type(hook).__qualname__, parameters])
        kinds.append(type(hook).__name__)
    return f"{', '.join(dict.fromkeys(kinds))} {digest.hexdigest()[:12]}" if kinds else ""


def _is_working_state(attribute: str) -> bool:
    # Rules of this package keep graphs and the like under names with an underscore.
    return attribute in _WORKING_STATE or attribute.startswith("_")
