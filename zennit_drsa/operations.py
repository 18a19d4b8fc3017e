"""Which operations of a model's own code relevance crosses without a rule, read from the autograd graph.

Without a rule, autograd's derivative is applied to relevance as if it were a gradient. That is right only for
operations that move, copy or select values: each output is one of the inputs, so that its relevance belongs
to that input, and relevance on copies adds up. Everything else needs a rule: a mean spreads relevance evenly
instead of by contribution, a sum gives all of it to every summand, a product scales it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from .kept import RelevanceTaps, tensors_in

FINE = {
    # Values are moved, copied or dropped.
    *("alias", "as_strided", "channel_shuffle", "clone", "detach", "diagonal", "expand", "flip", "movedim"),
    *("permute", "pixel_shuffle", "pixel_unshuffle", "repeat", "reshape", "reshape_alias", "roll", "rot90"),
    *("squeeze", "swapaxes", "t", "to_copy", "transpose", "unfold", "unsafe_view", "unsqueeze", "view"),
    *("cat", "stack", "split", "split_with_sizes", "unbind", "unsafe_split", "unsafe_split_with_sizes"),
    *("gather", "im2col", "index", "index_select", "masked_fill", "masked_select", "narrow", "select"),
    *("slice", "take", "tril", "triu", "where"),
    *("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d"),
    *("replication_pad1d", "replication_pad2d", "replication_pad3d"),
    # The winner takes all relevance.
    *("amax", "amin", "max", "maximum", "min", "minimum", "sort", "topk"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("max_pool2d_with_indices", "max_pool3d_with_indices", "mkldnn_max_pool2d", "max_pool2d"),
    # Values become zero, on which there is no relevance, or stay.
    *("relu", "threshold"),
}

# Their own operations are made to carry relevance; whether they conserve it is measured.
_LIBRARIES = ("zennit", "zennit_drsa", "drsa_core")


class Watch(RelevanceTaps):
    """Relevance at the outputs and inputs of modules, and whose code made which node of the graph."""

    def __init__(self) -> None:
        self.order: dict[nn.Module, None] = {}
        self.received: Counter[nn.Module] = Counter()
        self.handed_down: Counter[nn.Module] = Counter()
        self.magnitude: Counter[nn.Module] = Counter()
        self.non_finite: set[nn.Module] = set()
        self._running: list[tuple[nn.Module, set[Node]]] = []
        self._owners: dict[Node, tuple[nn.Module, ...]] = {}

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A module starts; what made its inputs is not its own."""
        self.order.setdefault(module)
        inputs = tensors_in((args, kwargs))
        self._running.append((module, {x.grad_fn for x in inputs if x.grad_fn is not None}))
        return super().before(module, args, kwargs)

    def behind(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A module ends; what is new between its inputs and outputs, its own code has made."""
        callers = tuple(running for running, _ in self._running)
        _, given = self._running.pop()
        for node in _nodes_behind(tensors_in(output), given):
            self._owners.setdefault(node, callers)  # the modules inside have ended before
        if not all(bool(x.isfinite().all()) for x in tensors_in(output)):
            self.non_finite.add(module)
        super().behind(module, args, kwargs, output)

    def note(self, module: nn.Module, relevance: Tensor, at_output: bool) -> None:
        """Add relevance up over calls, positions and the batch."""
        counter = self.received if at_output else self.handed_down
        counter[module] += float(relevance.double().sum())  # type: ignore[assignment]
        if at_output:
            self.magnitude[module] += float(relevance.double().abs().sum())  # type: ignore[assignment]
        if not bool(relevance.isfinite().all()):
            self.non_finite.add(module)

    def lossy_operations(
        self, output: Tensor, ruled: Collection[nn.Module], rewritten: Collection[nn.Module]
    ) -> dict[nn.Module | None, set[str]]:
        """Operations on the way to `output` without a rule that they need, by the module whose code they are.

        Those inside of a module with a rule, and in code that a canonizer wrote, are left out.
        """
        found: dict[nn.Module | None, set[str]] = {}
        for node in _nodes_behind([output]):
            running = self._owners.get(node, ())
            owner = running[-1] if running else None
            if not (carries_relevance(node) or owner in rewritten or any(m in ruled for m in running)):
                found.setdefault(owner, set()).add(operation(node))
        return found


def operation(node: Node) -> str:
    """The name of a node's operation, as in torch: `max_pool2d_with_indices`, from
    `MaxPool2DWithIndicesBackward0`."""
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


def _nodes_behind(outputs: Iterable[Tensor], end: Collection[Node] = ()) -> list[Node]:
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
