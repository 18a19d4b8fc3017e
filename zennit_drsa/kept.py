"""Relevance that does not reach the input: what position embeddings, learned tokens and biases keep.

Every module without children hands down at its input what it received at its output, but for what it keeps.
Summed over those that have a rule, and with what reaches the input, that is the score, unless relevance got
lost in code that has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
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


def keeps_relevance(model: nn.Module) -> bool:
    """Whether there is a `CanonicalPart` in the model, so that it is to be counted what is kept."""
    return any(isinstance(module, CanonicalPart) for module in model.modules())


class KeptRelevance:
    """What is kept in a backward pass, by what keeps it, for each of N examples."""

    def __init__(self, n_examples: int) -> None:
        self._n_examples = n_examples
        self._by_label: dict[str, Tensor] = {}

    def by_label(self) -> dict[str, Tensor]:
        """Relevance (N,) by what keeps it."""
        return dict(self._by_label)

    @contextmanager
    def measured(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Count what modules keep in backward passes of forward passes made in this context.

        Give those that have a rule: what others lose is kept by nothing, and is to be missed in the sum.
        """
        with ExitStack() as stack:
            for module in modules:
                if next(module.children(), None) is None:
                    # First before and last behind the hooks of rules.
                    before = module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
                    stack.callback(before.remove)
                    behind = module.register_forward_hook(self._behind, with_kwargs=True)
                    stack.callback(behind.remove)
            yield

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tapped = {name: self._tapped(module, x) for name, x in keywords.items()}
        return tuple(self._tapped(module, x) for x in args), tapped

    def _tapped(self, module: nn.Module, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.requires_grad:
            return x
        # A copy, so that what other users of x return is not counted here.
        x = x.clone()
        x.register_hook(lambda relevance: self._count(module, relevance, -1.0))
        return x

    def _behind(
        self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        # Where nothing of the input carries relevance, the module is no part of its way.
        carries = any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *keywords.values()))
        if carries and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda relevance: self._count(module, relevance, 1.0))

    def _count(self, module: nn.Module, relevance: Tensor, sign: float) -> None:
        # Tokens may be in windows: all of the first example come first, then all of the second.
        sums = sign * relevance.detach().double().reshape(self._n_examples, -1).sum(1)
        label = getattr(module, "keeps", BIASES)
        before = self._by_label.get(label)
        self._by_label[label] = sums if before is None else before + sums
