"""Which operations of a model's own code relevance crosses without a rule, read from the autograd graph.

Without a rule, autograd's derivative is applied to relevance as if it were a gradient. That is right only for
operations that move, copy or select values: each output is one of the inputs, so that its relevance belongs
to that input, and relevance on copies adds up. Everything else needs a rule: a mean spreads relevance evenly
instead of by contribution, a sum gives all of it to every summand, a product scales it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

MOVES = {
    *("alias", "as_strided", "channel_shuffle", "clone", "detach", "diagonal", "expand", "flip", "movedim"),
    *("permute", "pixel_shuffle", "pixel_unshuffle", "repeat", "reshape", "reshape_alias", "roll", "rot90"),
    *("squeeze", "swapaxes", "t", "to_copy", "transpose", "unfold", "unsafe_view", "unsqueeze", "view"),
    *("cat", "stack", "split", "split_with_sizes", "unbind", "unsafe_split", "unsafe_split_with_sizes"),
    *("gather", "im2col", "index", "index_select", "masked_fill", "masked_select", "narrow", "select"),
    *("slice", "take", "tril", "triu", "where"),
    *("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d"),
    *("replication_pad1d", "replication_pad2d", "replication_pad3d"),
}
"""Operations that move, copy or drop values."""

SELECTIONS = {
    *("amax", "amin", "max", "maximum", "min", "minimum", "sort", "topk"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("max_pool2d_with_indices", "max_pool3d_with_indices", "mkldnn_max_pool2d", "max_pool2d"),
}
"""Operations that choose among values: the winner takes all relevance."""

MASKS = {"relu", "threshold"}
"""Operations that set values to zero, on which there is no relevance, and keep the others."""

# Their own operations are made to carry relevance; whether they conserve it is measured.
_LIBRARIES = ("zennit", "zennit_drsa", "drsa_core")

FINE = MOVES | SELECTIONS | MASKS


def operation(node: Node) -> str:
    """The name of a node's operation, as in torch: `MaxPool2DWithIndicesBackward0` is
    `max_pool2d_with_indices`."""
    name = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])
    name = re.sub(r"(?<=\d)D(?=[A-Z]|$)", "d", name)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def carries_relevance(node: Node) -> bool:
    """Whether the node's derivative hands relevance down as a rule would."""
    function = getattr(node, "_forward_cls", None)  # of an operation written in Python
    if function is not None and function.__module__.partition(".")[0] in _LIBRARIES:
        return True
    name = operation(node)
    carriers = [parent is not None for parent, _ in node.next_functions]
    if name in ("add", "sub"):
        # A constant is a bias. The second summand comes with the factor alpha, −1 in a difference.
        return sum(carriers) == 1 and carriers[0]
    if name in ("clamp", "clamp_min"):
        # From below it is a mask; from above, it takes the relevance of the strongest neurons.
        return getattr(node, "_saved_max", None) is None
    return name in FINE


class OperationTrace:
    """Who made which node of the graph: filled by hooks of all modules while the model runs."""

    def __init__(self) -> None:
        self._running: list[tuple[nn.Module, set[Node]]] = []
        self._owners: dict[Node, tuple[nn.Module, ...]] = {}

    def enter(self, module: nn.Module, inputs: Iterable[Tensor]) -> None:
        """A module starts; what made its inputs is not its own."""
        self._running.append((module, {x.grad_fn for x in inputs if x.grad_fn is not None}))

    def leave(self, outputs: Iterable[Tensor]) -> None:
        """A module ends; what is new between its inputs and outputs, its own code has made."""
        callers = tuple(module for module, _ in self._running)
        _, given = self._running.pop()
        for node in walk(outputs, given):
            self._owners.setdefault(node, callers)  # the modules inside have ended before

    def lossy(self, output: Tensor) -> Iterator[tuple[tuple[nn.Module, ...], str]]:
        """Operations on the way to `output` that carry no relevance, with the modules that were running.

        The outermost module comes first; an operation outside of all modules has none.
        """
        for node in walk([output]):
            if not carries_relevance(node):
                yield self._owners.get(node, ()), operation(node)


def walk(outputs: Iterable[Tensor], end: Collection[Node] = ()) -> list[Node]:
    """The nodes behind some tensors as far as those in `end`, without these and without leaves."""
    found: dict[Node, None] = {}
    waiting = [x.grad_fn for x in outputs if x.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in found or node in end or not node.next_functions:
            continue
        found[node] = None
        waiting += [parent for parent, _ in node.next_functions if parent is not None]
    return list(found)


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in what a module takes or returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)
