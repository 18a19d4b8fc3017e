"""A copy of a network in which batch norms are folded into the convolutions before them.

In eval mode a batch norm multiplies each channel by a number and adds another. Behind a convolution both can
go into its weight and bias: w ← s w and b ← s (b − μ) + β with s = γ / √(σ² + ε). Outputs are the same up to
rounding, and a pass over the activations is saved (`tests/benchmarks/bench_flipping.py` says what it gains).

What the network does with the output of a convolution is read from its graph (`torch.fx`), which cannot be
drawn for networks whose path depends on the data; those are left as they are.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.nn.utils.parametrize import is_parametrized

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Tracer(fx.Tracer):
    """Draws the graph down to convolutions; a subclass may pad by the size of its input, for instance."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one node."""
        return isinstance(m, CONVOLUTIONS) or super().is_leaf_module(m, module_qualified_name)


def fold_batch_norms(model: nn.Module) -> fx.GraphModule | None:
    """The network with fewer batch norms, or None if none can be folded.

    Parameters
    ----------
    model : nn.Module
        In eval mode. It is not changed. The copy shares its parameters, apart from those that are folded.

    Returns
    -------
    fx.GraphModule or None
        None without batch norms behind convolutions, with hooks (which a graph leaves out), and for networks
        that `torch.fx` cannot trace.

    Notes
    -----
    For the moment in which the graph is drawn `torch.fx` takes over the calls of all modules of the process;
    other threads must not run networks meanwhile.
    """
    modules = list(model.modules())
    if any(module._forward_hooks or module._forward_pre_hooks for module in modules):
        return None
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules):
        return None
    # A forward function may keep what it is given: the graph is drawn from a copy, which shares the tensors.
    tensors = chain(model.parameters(), model.buffers())
    try:
        drawn = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        graph_module = fx.GraphModule(drawn, Tracer().trace(drawn))
    except Exception:  # whatever a forward function raises when it is given a proxy
        return None
    folded = 0
    for node in list(graph_module.graph.nodes):
        folded += _fold(graph_module, node)
    if not folded:
        return None
    graph_module.graph.eliminate_dead_code()
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    return graph_module


def _fold(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Fold one node into the convolution before it, if it is a batch norm and nothing else uses that."""
    found = _batch_norm(graph_module, node)
    if found is None:
        return False
    before, statistics = found
    if before.op != "call_module" or any(user is not node and not is_shape(user) for user in before.users):
        return False
    replaced = _folded(graph_module.get_submodule(str(before.target)), statistics)
    if replaced is None:
        return False
    name = f"{before.name}_and_{node.name}"
    graph_module.add_submodule(name, replaced)
    before.target = name
    node.replace_all_uses_with(before)
    graph_module.graph.erase_node(node)
    return True


def _folded(convolution: nn.Module, statistics: dict[str, Any]) -> nn.Module | None:
    """A new convolution, as the old one may run elsewhere as well; None if it does not do the same.

    A subclass may do more to its weight than to convolve with it. So both are tried on noise.
    """
    if not isinstance(convolution, CONVOLUTIONS) or is_parametrized(convolution):
        return None
    result = copy.deepcopy(convolution)
    weight = convolution.weight
    # Small, as there are many; larger kernels get what they need without padding.
    extents = zip(convolution.dilation, convolution.kernel_size, strict=True)
    size = (1, convolution.in_channels, *(max(8, step * (width - 1) + 1) for step, width in extents))
    noise = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        with torch.no_grad():
            result.weight, result.bias = fuse_conv_bn_weights(weight, convolution.bias, **statistics)
            mean, variance, eps, scale, shift = statistics.values()
            expected = nn.functional.batch_norm(convolution(noise), mean, variance, scale, shift, eps=eps)
            error = (result(noise) - expected).abs().max()
    except (RuntimeError, TypeError, ValueError):  # such as arguments of its own
        return None
    return result if error <= 1e-4 * expected.abs().max() else None


def _batch_norm(graph_module: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, dict[str, Any]] | None:
    """Input of a batch norm in eval mode, and its part of `fuse_conv_bn_weights`; None for other nodes."""
    if node.op == "call_module":
        module = graph_module.get_submodule(str(node.target))
        if not isinstance(module, BATCH_NORMS) or module.training:
            return None
        tensors = [module.running_mean, module.running_var, module.weight, module.bias]
        eps, before = module.eps, node.args[0]
    elif node.op == "call_function" and node.target is nn.functional.batch_norm:
        normal = node.normalized_arguments(graph_module, normalize_to_only_use_kwargs=True)
        if normal is None or normal.kwargs["training"]:
            return None
        names = ("running_mean", "running_var", "weight", "bias")
        tensors = [_tensor(graph_module, normal.kwargs[name]) for name in names]
        eps, before = normal.kwargs["eps"], normal.kwargs["input"]
    else:
        return None
    mean, variance, weight, bias = tensors
    if mean is None or variance is None or not isinstance(before, fx.Node):
        return None  # without running statistics a batch norm depends on the batch
    return before, {"bn_rm": mean, "bn_rv": variance, "bn_eps": eps, "bn_w": weight, "bn_b": bias}


def is_shape(node: fx.Node) -> bool:
    """Whether a node asks for what a batch norm does not change, such as the number of axes."""
    return node.target is getattr and node.args[1] in ("ndim", "shape", "dtype", "device")


def _tensor(graph_module: fx.GraphModule, value: object) -> Tensor | None:
    """The parameter or buffer that a node stands for."""
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return None
    owner, _, name = str(value.target).rpartition(".")
    found = getattr(graph_module.get_submodule(owner), name)
    return found if isinstance(found, Tensor) else None
