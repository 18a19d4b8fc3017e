"""Relevance that does not reach the input: what position embeddings, learned tokens and biases keep.

Every module without children hands down at its input what it received at its output, but for what it keeps.
Summed over those that have a rule, and with what reaches the input, that is the score, unless relevance got
lost in code that has none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

BIASES = "biases and stabilisers"


class CanonicalPart(nn.Module):
    """A module that a canonizer adds and that carries relevance by itself; it has no children.

    Attributes
    ----------
    keeps : str
        What the relevance that it does not hand down belongs to.
    """

    keeps: str = BIASES

    def rule(self) -> str | None:
        """How it carries relevance, where there is more than one way; part of a `Provenance`."""
        return None


class RelevanceTaps(ABC):
    """Sees the relevance at the inputs and outputs of modules, outside of the hooks of their rules."""

    @abstractmethod
    def note(self, module: nn.Module, relevance: Tensor, at_output: bool) -> None:
        """Called in backward passes, once for each input and output tensor of a module."""

    @contextmanager
    def measured(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Watch forward passes made in this context, and their backward passes."""
        handles = []
        try:
            for module in modules:
                handles += [
                    module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True),
                    module.register_forward_hook(self.behind, with_kwargs=True),
                ]
            yield
        finally:
            for handle in handles:
                handle.remove()

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Copy inputs, so that what other users of a tensor return is not counted here."""

        def tapped(x: Tensor) -> Tensor:
            if not x.requires_grad:
                return x
            x = x.clone()
            x.register_hook(lambda relevance: self.note(module, relevance, False))
            return x

        return map_tensors(tapped, args), map_tensors(tapped, kwargs)

    def behind(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Tap outputs, unless no input carries relevance: then the module is no part of its way."""
        if any(x.requires_grad for x in tensors_in((args, kwargs))):
            for x in tensors_in(output):
                if x.requires_grad:
                    x.register_hook(lambda relevance: self.note(module, relevance, True))


class KeptRelevance(RelevanceTaps):
    """What is kept in a backward pass, by what keeps it, for each of N examples.

    Measure the modules that have a rule: what others lose is kept by nothing, and is to be missed in the sum.
    """

    def __init__(self, n_examples: int) -> None:
        self._n_examples = n_examples
        self._by_label: dict[str, Tensor] = {}

    def by_label(self) -> dict[str, Tensor]:
        """Relevance (N,) by what keeps it."""
        return dict(self._by_label)

    def note(self, module: nn.Module, relevance: Tensor, at_output: bool) -> None:
        """Count what a module without children received and did not hand down."""
        if next(module.children(), None) is not None:
            return
        # Tokens may be in windows: all of the first example come first, then all of the second.
        sums = relevance.detach().double().reshape(self._n_examples, -1).sum(1)
        label = getattr(module, "keeps", BIASES)
        self._by_label[label] = self._by_label.get(label, 0.0) + (sums if at_output else -sums)


def keeps_relevance(model: nn.Module) -> bool:
    """Whether there is a `CanonicalPart` in the model, so that it is to be counted what is kept."""
    return any(isinstance(module, CanonicalPart) for module in model.modules())


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same lists, tuples and dictionaries, with a function applied to the tensors in them."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) is dict:
        return {key: map_tensors(function, part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(function, part) for part in value)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in what a module takes or returns."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]
