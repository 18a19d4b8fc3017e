"""Modules under rules as these need them: one input, in the first place, and parameters used as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from typing import Any

from drsa_core.layer import inputs_in_place
from drsa_core.lrp import is_additive
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from zennit.core import Hook

from ._zennit import exchanges_parameters, hooks_on, runs_with_input_alone
from .canonizers import kind


def refuse_derived(name: str, module: nn.Module) -> None:
    """Refuse a layer that makes other weights of its parameters under a rule that exchanges these."""
    raise ValueError(
        f"layer {name!r} ({type(module).__name__}) does not use its parameters as they are (standardised "
        "weights or low-rank updates, for instance), so that LRP rules cannot put others in their place. "
        "Explain a copy of the model with torch's own layer there and the weights that this one works out "
        "to, or use rules that leave weights as they are (γ = 0, Epsilon)"
    )


def checked_arguments(
    root: nn.Module, derived: Callable[[str, nn.Module], None] = refuse_derived
) -> list[RemovableHandle]:
    """Give the modules with rules their input in its place, and refuse further ones that a rule leaves out.

    `derived` is called with layers that make other weights of their parameters, if a rule exchanges these.

    To be called when the rules are registered.
    """
    ruled = [(name, module) for name, module in root.named_modules() if hooks_on(module)]
    handles = []
    for name, module in ruled:
        if any(map(exchanges_parameters, hooks_on(module))) and _runs_code_of_its_own(module):
            handles.append(_checked_once(name, module, derived))
        for hook in filter(runs_with_input_alone, hooks_on(module)):
            refuse = partial(_refuse_further, name, hook)
            handles.append(module.register_forward_pre_hook(refuse, prepend=True, with_kwargs=True))
    return [*handles, *inputs_in_place(ruled)]  # the last to be prepended is the first to run


def _runs_code_of_its_own(module: nn.Module) -> bool:
    # What a canonizer has written knows which parameters it uses.
    is_known = "forward" in vars(module) or kind(module).__module__.partition(".")[0] == "torch"
    return bool(module._parameters) and not is_known


def _checked_once(name: str, module: nn.Module, derived: Callable[[str, nn.Module], None]) -> RemovableHandle:
    """Have the parameters of a module checked at its next run, on one example."""

    def check(module: nn.Module, args: tuple[Any, ...]) -> None:
        handle.remove()
        is_known = args and isinstance(args[0], Tensor) and not module.training  # where it may be random
        if is_known and not is_additive(module, args[0][:1].detach()):
            derived(name, module)

    handle = module.register_forward_pre_hook(check, prepend=True)
    return handle


def _refuse_further(
    name: str, hook: Hook, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    if len(args) < 2 and not keywords:
        return
    known = list(signature(module.forward).parameters.values())
    named = [p for p in known if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    defaults = {p.name: p.default for p in known}
    further = {p.name: value for p, value in zip(named[1:], args[1:], strict=False)} | keywords
    given = [key for key, value in further.items() if not _is_same(value, defaults.get(key, Parameter.empty))]
    if given or len(args) > max(len(named), 1):
        raise ValueError(
            f"module {name!r} ({type(module).__name__}) is called with more than its input "
            f"({', '.join(given) or 'further arguments'}), but its rule {type(hook).__name__} runs it again "
            "with the input alone: the maps would be wrong. Have the model apply what the argument does "
            "outside of this module, or use rules that leave it out"
        )


def _is_same(value: object, default: object) -> bool:
    # Tensors and arrays compare entry by entry, and none of them is a default.
    return value is default or (isinstance(value, bool | int | float | str) and value == default)
