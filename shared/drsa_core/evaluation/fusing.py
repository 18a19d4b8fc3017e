"""Convolutions and the activations behind them in one operation, on CPUs.

By itself an activation reads and writes all that the convolution has just written. Within the convolution it
costs next to nothing, and the weights are brought into the order of oneDNN once instead of in every pass.

Convolutions that pad by the size of their input ("same", as TensorFlow does it) get more zeros on one side.
A copy of the input with zeros around it costs more than the convolution. Instead the kernel gets a row and a
column of zeros, so that the padding is the same on both sides.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from ._onednn import Activation, Packed, available
from .folding import is_shape

#: What a node calls, or the class of the module that it calls.
ACTIVATIONS: dict[Any, Activation] = {
    nn.ReLU: ("relu", ()),
    torch.relu: ("relu", ()),
    functional.relu: ("relu", ()),
    nn.ReLU6: ("hardtanh", (0.0, 6.0)),
    functional.relu6: ("hardtanh", (0.0, 6.0)),
    nn.SiLU: ("swish", ()),
    functional.silu: ("swish", ()),
    nn.Hardswish: ("hardswish", ()),
    functional.hardswish: ("hardswish", ()),
}


def fuse_activations(folded: fx.GraphModule, images: Tensor) -> fx.GraphModule | None:
    """The network with its convolutions packed, or None where that is not possible.

    Parameters
    ----------
    folded : fx.GraphModule
        As `fold_batch_norms` gives it. It is not changed.
    images : tensor, shape (n, C, H, W)
        With them the convolutions are tried, each of which has to give the same as before. Later images must
        have their height and width, as padding may depend on them.

    Returns
    -------
    fx.GraphModule or None
        None for other devices than CPUs, for other numbers than float32, and without a convolution in two
        dimensions that can be packed.
    """
    if not available() or images.device.type != "cpu" or images.dtype != torch.float32:
        return None
    graph_module = fx.GraphModule(folded, copy.deepcopy(folded.graph))
    _drop_identities(graph_module)
    watch = _Watch(graph_module)
    try:
        watch.run(images)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    for node, packed in watch.packed.items():
        name = f"{node.name}_packed"
        graph_module.add_submodule(name, packed)
        node.target = name
        users = [user for user in node.users if not is_shape(user)]
        activation = ACTIVATIONS.get(_called(graph_module, users[0])) if len(users) == 1 else None
        if activation is not None and users[0].args[:1] == (node,):
            packed.activation = activation
            users[0].replace_all_uses_with(node)
            graph_module.graph.erase_node(users[0])
    if not watch.packed:
        return None
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    return graph_module


class _Watch(fx.Interpreter):
    """Runs a network, and packs each convolution that gives the same when it is packed."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.packed: dict[fx.Node, Packed] = {}

    @torch.no_grad()
    def run_node(self, n: fx.Node) -> Any:
        """Output of a node."""
        output = super().run_node(n)
        if n.op == "call_module":
            module, args = self.module.get_submodule(str(n.target)), self.fetch_args_kwargs_from_env(n)[0]
            if isinstance(module, nn.Conv2d) and len(args) == 1 and args[0].ndim == 4:
                packed = _packed(module, args[0])
                if packed is not None:
                    self.packed[n] = packed
        return output


def _packed(convolution: nn.Conv2d, x: Tensor) -> Packed | None:
    """The convolution packed, with the first padding that gives what the convolution itself gives."""
    if convolution.weight.dtype != torch.float32 or x.dtype != torch.float32:
        return None
    x = x + 1  # behind a ReLU there may be zeros at the border, where padding would not show
    expected = convolution(x)
    for weight, padding in _paddings(convolution, x):
        packed = Packed(convolution, weight, padding, x.shape)
        found = packed(x)
        if found.shape == expected.shape and (found - expected).abs().max() <= 1e-5 * expected.abs().max():
            return packed
    return None


def _paddings(convolution: nn.Conv2d, x: Tensor) -> Iterator[tuple[Tensor, list[int]]]:
    """The convolution's own weight and padding, and those of "same" padding with more zeros at the end."""
    weight = convolution.weight
    if not isinstance(convolution.padding, str):
        yield weight, list(convolution.padding)
    before, after = [], []
    for axis, (stride, step, width) in enumerate(
        zip(convolution.stride, convolution.dilation, convolution.kernel_size, strict=True)
    ):
        size = x.shape[2 + axis]
        missing = max((-(-size // stride) - 1) * stride + step * (width - 1) + 1 - size, 0)
        before.append(missing // 2)
        after.append(missing - missing // 2)
    more = [last - first for first, last in zip(before, after, strict=True)]
    if convolution.dilation == (1, 1):
        yield functional.pad(weight, (more[1], 0, more[0], 0)), after


def _drop_identities(graph_module: fx.GraphModule) -> None:
    """Take out modules that do nothing, which may stand between a convolution and its activation."""
    for node in list(graph_module.graph.nodes):
        if _called(graph_module, node) is nn.Identity and len(node.args) == 1:
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)


def _called(graph_module: fx.GraphModule, node: fx.Node) -> Any:
    """The function that a node calls, or the class of its module."""
    if node.op == "call_module":
        return type(graph_module.get_submodule(str(node.target)))
    return node.target if node.op == "call_function" else None
