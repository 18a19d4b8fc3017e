"""Arguments of modules under rules: Zennit's hooks know one input, in the first place."""

from __future__ import annotations

from functools import partial
from inspect import Parameter, signature
from typing import Any

from drsa_core.layer import inputs_in_place
from torch import nn
from torch.utils.hooks import RemovableHandle
from zennit.core import Hook

from ._zennit import hooks_on, runs_with_input_alone


def checked_arguments(root: nn.Module) -> list[RemovableHandle]:
    """Give the modules with rules their input in its place, and refuse further ones that a rule leaves out.

    To be called when the rules are registered.
    """
    ruled = [(name, module) for name, module in root.named_modules() if hooks_on(module)]
    handles = []
    for name, module in ruled:
        for hook in filter(runs_with_input_alone, hooks_on(module)):
            refuse = partial(_refuse_further, name, hook)
            handles.append(module.register_forward_pre_hook(refuse, prepend=True, with_kwargs=True))
    return [*handles, *inputs_in_place(ruled)]  # the last to be prepended is the first to run


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
