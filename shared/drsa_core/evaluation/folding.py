"""A copy of a network in which batch norms are folded into the convolutions before them.

In eval mode a batch norm multiplies each channel by a number and adds another. Behind a convolution both can
go into its weight and bias: w ← s w and b ← s (b − μ) + β with s = γ / √(σ² + ε). Outputs are the same up to
rounding, and a pass over the activations is saved. What the network does with the output of a convolution is
read from its graph (`torch.fx`).
"""

from __future__ import annotations

import copy
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.nn.utils.parametrize import is_parametrized

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Tracer(fx.Tracer):
    """Draws the graph down to convolutions; a subclass may pad by the size of its input, for instance."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, CONVOLUTIONS) or super().is_leaf_module(m, module_qualified_name)


def fold_batch_norms(model: nn.Module) -> fx.GraphModule | None:
    """The network with fewer batch norms, or None if none can be folded.

    A convolution that does more than to convolve with its `weight` is not recognised: compare the outputs.

    Parameters
    ----------
    model : nn.Module
        In eval mode. It is not changed. The copy shares its parameters, apart from those that are folded.

    Returns
    -------
    fx.GraphModule or None
        None without batch norms behind convolutions, with hooks (which a graph leaves out), and for networks
        that `torch.fx` cannot trace, such as those whose path depends on the data.
    """
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return None
    # A forward function may keep what it is given: the graph is drawn from a copy, which shares the tensors.
    tensors = chain(model.parameters(), model.buffers())
    try:
        drawn = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        graph_module = fx.GraphModule(drawn, _Tracer().trace(drawn))
    except Exception:  # whatever a forward function raises when it is given a proxy
        return None
    folded = [_fold(graph_module, node) for node in list(graph_module.graph.nodes)]
    if not any(folded):
        return None
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    return graph_module


def _fold(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Fold one node into the convolution before it, if it is a batch norm and nothing else uses that."""
    found = _batch_norm(graph_module, node)
    if found is None:
        return False
    before, statistics = found
    others = [user for user in before.users if user is not node]
    # A batch norm may look at the number of axes, which it does not change.
    if before.op != "call_module" or any(u.target is not getattr or u.args[1] != "ndim" for u in others):
        return False
    convolution = graph_module.get_submodule(str(before.target))
    if not isinstance(convolution, CONVOLUTIONS) or is_parametrized(convolution):
        return False
    folded = copy.deepcopy(convolution)  # the old one may run elsewhere as well
    folded.weight, folded.bias = fuse_conv_bn_weights(convolution.weight, convolution.bias, **statistics)
    name = f"{before.name}_and_{node.name}"
    graph_module.add_submodule(name, folded)
    before.target = name
    node.replace_all_uses_with(before)
    graph_module.graph.erase_node(node)
    return True


def _batch_norm(graph_module: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, dict[str, Any]] | None:
    """Input of a batch norm in eval mode, and its part of `fuse_conv_bn_weights`; None for other nodes."""
    if node.op == "call_module":
        norm: Any = graph_module.get_submodule(str(node.target))
        if not isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) or norm.training:
            return None
        before, eps = node.args[0], norm.eps
        tensors = [norm.running_mean, norm.running_var, norm.weight, norm.bias]
    elif node.op == "call_function" and node.target is nn.functional.batch_norm:  # as in timm's batch norms
        normal = node.normalized_arguments(graph_module, normalize_to_only_use_kwargs=True)
        if normal is None or normal.kwargs["training"]:
            return None
        before, eps = normal.kwargs["input"], normal.kwargs["eps"]
        names = ("running_mean", "running_var", "weight", "bias")
        tensors = [_tensor(graph_module, normal.kwargs[name]) for name in names]
    else:
        return None
    if tensors[0] is None or tensors[1] is None or not isinstance(before, fx.Node):
        return None  # without running statistics a batch norm depends on the batch
    return before, dict(zip(("bn_rm", "bn_rv", "bn_w", "bn_b"), tensors, strict=True), bn_eps=eps)


def _tensor(graph_module: fx.GraphModule, node: object) -> Any:
    """The parameter or buffer that a node stands for."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    return attrgetter(str(node.target))(graph_module)
