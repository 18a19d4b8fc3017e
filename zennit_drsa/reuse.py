"""Modules that run more than once in a forward pass, under rules that remember one run alone.

Zennit's `BasicHook` and `ReLUBetaSmooth`, and `GraphRule` and `ZeroRule` here, keep the input of their module
from the forward to the backward pass. A second run overwrites it, and the relevance of the first one would be
computed with the input of the second, without an error. Rules that keep nothing (`Pass`, `ForwardRule`) are
right for any number of runs: many networks share one ReLU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from zennit.core import Hook

from ._zennit import hooks_by_module, hooks_on, keeps_of_forward, puts_identities


class SecondRuns:
    """Calls a function when a module runs again under a rule that forgets its first run.

    What is reused is a matter of the model's code: the first forward pass that builds a graph is watched, and
    the hooks are then taken off.

    Parameters
    ----------
    root : module
        The model, with its rules registered.
    found : function
        Called with the module and its rule before each further run.
    """

    def __init__(self, root: nn.Module, found: Callable[[nn.Module, Hook], None]) -> None:
        self._root, self._found = root, found
        self._ran: set[nn.Module] | None = None  # None outside of forward passes of the whole model
        modules = dict.fromkeys(module for module, _ in hooks_by_module(root))
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            for module in modules
        ]

    def watch(self) -> None:
        """Watch the next forward passes of the model until one has built a graph."""
        self._handles += [
            self._root.register_forward_pre_hook(self.start, prepend=True),
            self._root.register_forward_hook(self.stop, always_call=True),
        ]

    def start(self, *_: Any) -> None:
        """A forward pass of the whole model begins."""
        self._ran = set()

    def stop(self, *_: Any) -> None:
        """It has ended. What runs from now on is a part of the model by itself, or checkpointing."""
        if self._ran:
            self.remove()
        self._ran = None

    def remove(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._ran is None:
            return
        needs_graph = any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values()))
        if needs_graph and not torch.is_grad_enabled() and any(map(puts_identities, hooks_on(module))):
            raise ValueError(
                f"module {_name(self._root, module)!r} runs without gradients inside of the model, where "
                "rules cannot be applied: switch checkpointing off, or set use_reentrant=False in it; or "
                "take the torch.no_grad() away"
            )
        if module in self._ran:
            for hook in hooks_on(module):
                if keeps_of_forward(hook):
                    self._found(module, hook)
        # A run without a graph is not differentiated; it does harm if it comes after one with a graph.
        if needs_graph and torch.is_grad_enabled():
            self._ran.add(module)


def refused_second_runs(root: nn.Module) -> SecondRuns:
    """Has second runs refused, with an error that names the module."""

    def refuse(module: nn.Module, hook: Hook) -> None:
        raise ValueError(
            f"module {_name(root, module)!r} ({type(module).__name__}) runs more than once in a forward "
            f"pass, but its rule {type(hook).__name__} remembers the input of one run alone: the maps would "
            "be wrong. Give each use a module of its own, for instance copy.deepcopy(module), which has the "
            "same weights; or use a composite without such a rule there, such as ConvNetGamma, or none "
            "(plain gradients)"
        )

    return SecondRuns(root, refuse)


def _name(root: nn.Module, module: nn.Module) -> str:
    return next(name for name, other in root.named_modules() if other is module)
