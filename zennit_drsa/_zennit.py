"""The one place that looks into Zennit's hooks, rules and composites; when a release moves them, look here.

Zennit 0.5.1 and 1.0.0 are served. From 1.0.0 on, hooks may take keyword arguments of the layer, and its
canonizers and rules exchange parameters by attributes and new objects instead of `parameter.data`.
`tests/zennit_adapter/test_contract.py` names all that is relied on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any, TypeAlias

import torch
from drsa_core.layer import positional_inputs
from drsa_core.lrp import ModuleEdits
from drsa_core.provenance import content_digest
from torch import Tensor, nn
from zennit.canonizers import Canonizer
from zennit.composites import layer_map_base
from zennit.core import BasicHook, Composite, Hook, ParamMod, RemovableHandle, RemovableHandleList, Stabilizer
from zennit.rules import (
    AlphaBeta,
    Epsilon,
    Gamma,
    Norm,
    Pass,
    ReLUBetaSmooth,
    ReLUDeconvNet,
    ReLUGuidedBackprop,
    ZBox,
    ZPlus,
)

from .kept import CanonicalPart

Gradients: TypeAlias = tuple[Tensor | None, ...]

# Rules that modify gradients; every other Zennit rule passes relevance in the gradient's place.
GRADIENT_RULES = (ReLUBetaSmooth, ReLUDeconvNet, ReLUGuidedBackprop)
# Rules that drop what is negative, and so are not linear in what comes in.
NONLINEAR_RULES = (ReLUDeconvNet, ReLUGuidedBackprop)
# Rules that put their own value in the place of the layer's gradient without reading it.
_REPLACING = (Pass, ReLUBetaSmooth, ReLUDeconvNet)
# Rules that reduce to a sum of input ⊙ gradient: where an input is zero its gradient does not matter.
MULTIPLIED_BY_INPUT = (AlphaBeta, Epsilon, Gamma, Norm, ZBox, ZPlus)
# What a hook keeps of a backward pass, which says nothing about its rule. So does what starts with "_".
_WORKING_STATE = {"stored_tensors", "tensor_handles", "active", "backward", "pre_backward"}


# ---------------------------------------------------------------------- which rules are on a model


def hooks_on(module: nn.Module) -> list[Hook]:
    """The Zennit hooks that are registered on a module, once each, in their order."""
    hooks: dict[Hook, None] = {}
    for function in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        owner = getattr(function, "__self__", None)
        if isinstance(owner, Hook):  # Zennit registers several methods of a hook
            hooks[owner] = None
    return list(hooks)


def hooks_by_module(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """The Zennit hooks that are registered on a model's modules."""
    for module in model.modules():
        for hook in hooks_on(module):
            yield module, hook


def has_rule(module: nn.Module) -> bool:
    """Whether a module carries relevance by a rule or in a canonical form, rather than by its gradient."""
    return isinstance(module, CanonicalPart) or "forward" in vars(module) or bool(hooks_on(module))


def take_hooks_off(module: nn.Module) -> None:
    """Unregister the Zennit hooks of a module, without the composite's knowledge."""
    for functions in (module._forward_hooks, module._forward_pre_hooks):
        for key, function in list(functions.items()):
            if isinstance(getattr(function, "__self__", None), Hook):
                del functions[key]


def holds_relevance(model: nn.Module, slot: str | None = None) -> bool:
    """Whether the gradient slot holds relevance (LRP composites) rather than gradients."""
    if slot is not None:
        return slot == "relevance"
    return any(hook.active and not isinstance(hook, GRADIENT_RULES) for _, hook in hooks_by_module(model))


def has_cover(hook: Hook) -> bool:
    """Whether a rule takes relevance from its module's output to its input, past all that is inside."""
    return replaces_gradient(hook) or getattr(type(hook), "covers_module", False) is True


def describe_method(model: nn.Module, slot: str | None, how: str = "GradientContext()") -> str:
    """How contexts are found under the rules that are registered now, for a `Provenance`."""
    rules = describe_rules(model)
    if holds_relevance(model, slot):
        return f"LRP({rules})"
    return f"{how} under {rules}" if rules else how


def describe_rules(model: nn.Module) -> str:
    """The rules that are registered on a model, with a digest of where they are and of their parameters."""
    names = {module: name for name, module in model.named_modules()}
    parts, kinds = [], []
    for module, hook in hooks_by_module(model):
        parameters = {key: value for key, value in vars(hook).items() if not _is_working_state(key)}
        parts.append([names[module], type(hook).__qualname__, parameters])
        kinds.append(type(hook).__name__)
    for module, name in names.items():
        if isinstance(module, CanonicalPart) and (rule := module.rule()) is not None:
            parts.append([name, rule])
            kinds.append(rule)
    return f"{', '.join(dict.fromkeys(kinds))} {content_digest(*parts)}" if kinds else ""


def describe_canonizers(canonizers: Sequence[Canonizer]) -> str:
    """The canonizers of a composite, with a digest of their parameters, for a `Provenance`."""
    if not canonizers:
        return "none"
    parts = [
        [type(canonizer).__qualname__, {k: v for k, v in vars(canonizer).items() if not _is_working_state(k)}]
        for canonizer in canonizers
    ]
    names = dict.fromkeys(type(canonizer).__name__ for canonizer in canonizers)
    return f"{', '.join(names)} {content_digest(*parts)}"


def _is_working_state(attribute: str) -> bool:
    # Rules of this package keep graphs and the like under names with an underscore.
    return attribute in _WORKING_STATE or attribute.startswith("_")


# ---------------------------------------------------------------------- what a hook keeps


def is_active(hook: Hook) -> bool:
    """Whether a hook modifies gradients at the moment; `Composite.inactive` switches it off."""
    return bool(hook.active)


def keep(hook: Hook, **tensors: Any) -> None:
    """Store tensors in a hook; Zennit lets go of them when the hook is removed."""
    hook.stored_tensors.update(tensors)


def kept(hook: Hook, name: str) -> Any:
    """What was stored in a hook: "input" (a tuple, as the layer got it), "grad_output" or one's own."""
    return hook.stored_tensors[name]


def keeps_of_forward(hook: Hook) -> bool:
    """Whether a hook keeps something of the forward pass, so that its rule is that of the last run alone."""
    return any(name != "grad_output" for name in hook.stored_tensors)


def puts_identities(hook: Hook) -> bool:
    """Whether a hook puts Zennit's identity before its module, which fails where no graph is built."""
    return type(hook).pre_forward is Hook.pre_forward


def register_positional(hook: Hook, module: nn.Module) -> RemovableHandleList:
    """Register `hook.pre_forward(module, args)` and `hook.forward(module, args, output)` and nothing else.

    Zennit's own `register` also puts identities before and after the layer, which carry a backward hook.
    """
    return RemovableHandleList(
        [
            RemovableHandle(hook),
            module.register_forward_pre_hook(hook.pre_forward),
            module.register_forward_hook(hook.forward),
        ]
    )


# ---------------------------------------------------------------------- what a rule computes


def is_basic(hook: Hook) -> bool:
    """Whether a hook computes backward what Zennit's `BasicHook` does: modified forward passes, reduced."""
    return type(hook).backward is BasicHook.backward


def replaces_gradient(hook: Hook) -> bool:
    """Whether a rule never reads the gradient that autograd computes for its layer.

    A hook class of one's own says so with a class attribute `replaces_gradient = True`.
    """
    own = getattr(type(hook), "replaces_gradient", False) is True
    return own or is_basic(hook) or type(hook) in _REPLACING


def exchanges_parameters(hook: Hook) -> bool:
    """Whether a rule puts other parameters into its layer.

    A hook of this package says so with an attribute `exchanges_parameters`.
    """
    own: bool = getattr(hook, "exchanges_parameters", False)
    return own or (isinstance(hook, BasicHook) and type(hook) not in (Epsilon, Norm))


def runs_with_input_alone(hook: Hook) -> bool:
    """Whether a rule runs its module again with its first argument and no other.

    Zennit does so up to 0.5.1. A hook class of this package says so with `runs_with_input_alone = True`.
    """
    own = getattr(type(hook), "runs_with_input_alone", False) is True
    return own or (is_basic(hook) and "kwargs" not in signature(BasicHook.forward).parameters)


def modified_forwards(hook: BasicHook, module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Inputs and outputs of a basic hook's modified forward passes, with a graph from one to the other."""
    first, *others = hook.stored_tensors["input"]
    # Zennit 0.5.1 knows neither further arguments nor keywords, 1.0.0 hands both on.
    keywords = hook.stored_tensors.get("kwargs")
    others, keywords = ([], {}) if keywords is None else (others, keywords)
    passes = []
    modifiers = zip(hook.input_modifiers, hook.param_modifiers, hook.output_modifiers, strict=True)
    for modify_input, modify_parameters, modify_output in modifiers:
        # A modifier may return what it got, or a view of it: requires_grad must not reach what is stored.
        input = modify_input(first.detach()).detach().requires_grad_()
        with ParamMod.ensure(modify_parameters)(module) as modified, torch.enable_grad():
            output = modify_output(modified.forward(input, *others, **keywords))
        passes.append((input, output))
    return passes


def stabilized(denominator: Tensor, stabilizer: float) -> Tensor:
    """The denominator with `stabilizer` added with its sign, as in Zennit's rules."""
    result: Tensor = Stabilizer.ensure(stabilizer)(denominator)
    return result


def rule_for_others(module: nn.Module, stabilizer: float) -> Hook | None:
    """Zennit's usual rule for a layer without weights: activations, sums, average pooling, norms."""
    return next((hook for types, hook in layer_map_base(stabilizer) if isinstance(module, types)), None)


# ---------------------------------------------------------------------- canonizers


def running_statistics(model: nn.Module) -> dict[nn.Module, int]:
    """Where the running variances of a model's batch norms are, to be known again after canonizers ran."""
    return {
        module: module.running_var.data_ptr()
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is not None
    }


def is_merged(norm: Any, before: dict[nn.Module, int]) -> bool:
    """Whether a batch norm is part of the layer before it.

    A canonizer from here has merged it, or Zennit has made it an identity, with new running statistics.
    """
    if getattr(vars(norm).get("forward"), "is_merged_norm", False):
        return True
    if norm.running_var is None or norm.running_var.data_ptr() == before.get(norm):
        return False
    values = [(norm.running_var, 1), (norm.weight, 1), (norm.running_mean, 0), (norm.bias, 0)]
    return all(tensor is None or bool(torch.all(tensor == value)) for tensor, value in values)


def exact_norms(model: nn.Module, before: dict[nn.Module, int]) -> list[ModuleEdits]:
    """Make the identities that Zennit puts in the place of merged batch norms exact; a handle takes it back.

    Up to 0.5.1 they keep their ε, and each divides by √(1 + ε): with Keras' ε = 1e-3, the logits of a
    ResNet50 change by 0.2 %. With torch's 1e-5 that is rounding, and maps stay those of Zennit to the last
    digits. To be called behind `composite.register`, with `running_statistics` from before.
    """
    edits = ModuleEdits()
    norm: Any
    for norm in before:
        if norm.eps > 1e-4 and is_merged(norm, before) and "forward" not in vars(norm):
            edits.attribute(norm, "eps", 0.0)
    return [edits]


def register(composite: Composite, model: nn.Module) -> None:
    """Register a composite to a model without rules; to be used inside `restored`, which undoes the rest.

    Merged norms become exact, and inputs given by name come by position.
    """
    if composite.handles:
        raise ValueError(
            f"the {type(composite).__name__} is registered to a model already; leave its context (or call "
            "its remove()) and pass it unregistered"
        )
    if next(hooks_by_module(model), None) is not None:
        raise ValueError(
            f"another Zennit composite is registered to this {type(model).__name__}, and the rules of both "
            "would apply; leave its context first"
        )
    statistics = running_statistics(model)
    composite.register(model)
    if statistics:
        composite.handles.extend(exact_norms(model, statistics))
    composite.handles.extend(positional_inputs(model.modules()))


def unregister(composite: Composite) -> None:
    """Take a composite off its model, last things first: canonizers may have changed the same weights."""
    try:
        composite.handles.reverse()
        composite.remove()
    finally:
        composite.handles.clear()
        composite.hook_refs.clear()


def check_norms(root: nn.Module) -> None:
    """Refuse norms that neither Zennit's canonizers and rules nor canonizers here have seen to.

    Zennit's batch norms are those of one to three axes. `nn.SyncBatchNorm` is none of them, and would scale
    relevance as it scales gradients.
    """
    for name, module in root.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and not has_rule(module):
            raise ValueError(
                f"{name or 'the model'} is a SyncBatchNorm, which Zennit neither merges nor has a rule for: "
                "the maps would be wrong. Put a torch.nn.BatchNorm2d with the same state_dict() in its place"
            )
