"""What the canonizers of convolutional networks share: norms, sums, gates and scalings in canonical form."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Self

import torch
from drsa_core.lrp import (
    ModuleEdits,
    OverDenominator,
    TimesInput,
    passing_forward,
    registered_copy,
)
from torch import Tensor, nn
from zennit.canonizers import Canonizer
from zennit.layer import Sum


class NetworkCanonizer(Canonizer):  # type: ignore[misc]
    """A canonizer that knows the networks of a library, and says which models it suits.

    Subclasses say which networks they know and how a module becomes canonical.

    Attributes
    ----------
    carries_relevance : bool
        Whether the backward pass of the canonized model is not its gradient: some of its modules hand
        relevance on. Without rules that carry relevance, attributors refuse it.
    """

    carries_relevance = False

    def __init__(self) -> None:
        super().__init__()
        self._edits = ModuleEdits()

    @classmethod
    @abstractmethod
    def suits(cls, model: nn.Module) -> bool:
        """Whether the model contains a network that this canonizer is made for; `doctor` asks."""

    @abstractmethod
    def register(self, root_module: nn.Module) -> None:
        """Apply the changes; `remove` takes them back."""

    def apply(self, root_module: nn.Module) -> list[Self]:
        """Canonize every supported network in `root_module`; after an error it is as before.

        Raises
        ------
        ImportError
            If the library of the networks is not installed.
        ValueError
            If there is no such network, if a block has no canonical form, or if a norm has no running
            statistics.
        """
        return [registered_copy(self, root_module)]

    def remove(self) -> None:
        """Restore the model bit for bit."""
        self._edits.undo()

    def _forward(self, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        self._edits.attribute(module, "forward", forward)

    def _pass(self, module: nn.Module) -> None:
        self._forward(module, passing_forward(module))
        self.carries_relevance = True

    def _norm(self, module: nn.Module) -> None:
        self._forward(module, layer_norm_forward(module))
        self.carries_relevance = True

    def _sum(self, block: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        self._edits.child(block, "canonical_sum", Sum())
        self._forward(block, forward)

    def _merge_norms(self, name: str, parent: nn.Module) -> None:
        """Merge the norms among the children of a module into the convolutions right before them."""
        before: nn.Module | None = None
        for child_name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d | nn.SyncBatchNorm):
                scale, shift = affine(f"{name}.{child_name}".lstrip("."), child)
                if isinstance(before, nn.Conv2d) and before.out_channels == child.num_features:
                    bias = 0 if before.bias is None else before.bias.detach()
                    self._edits.parameter(before, "weight", before.weight * scale.view(-1, 1, 1, 1))
                    self._edits.parameter(before, "bias", bias * scale + shift)
                    self._forward(child, MergedNorm(child))
                else:
                    self._edits.child(parent, child_name, _explicit_norm(child, scale, shift))
            before = _last(child)


def kind(module: nn.Module) -> type[nn.Module]:
    """The class whose `forward` a module runs: a subclass without its own is what it inherits from.

    Networks of timm run in parts, such as `forward_features`: who writes one anew runs code of their own.
    """
    return next(
        parent
        for parent in type(module).__mro__
        if any(name.startswith("forward") and callable(value) for name, value in vars(parent).items())
    )


def is_merged(norm: Any, statistics: int | None) -> bool:
    """Whether a batch norm is part of the layer before it.

    Either a canonizer from here has merged it, or Zennit has made it an identity, which exchanges the running
    statistics that were at the address `statistics`.
    """
    if isinstance(vars(norm).get("forward"), MergedNorm):
        return True
    if norm.running_var is None or norm.running_var.data_ptr() == statistics:
        return False
    values = [(norm.running_var, 1), (norm.weight, 1), (norm.running_mean, 0), (norm.bias, 0)]
    return all(tensor is None or bool(torch.all(tensor == value)) for tensor, value in values)


class MergedNorm:
    """Forward of a batch norm that is part of the convolution before it: its activation is left."""

    def __init__(self, norm: nn.Module) -> None:
        self.rest = [getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)]

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.rest:
            x = layer(x)
        return x


def _last(module: nn.Module) -> nn.Module:
    """The last layer of a plain sequence (a deep stem), else the module itself."""
    while type(module) is nn.Sequential and len(module):
        module = module[-1]
    return module


def affine(name: str, norm: nn.modules.batchnorm._BatchNorm) -> tuple[Tensor, Tensor]:
    """Scale and shift of a batch norm in evaluation mode."""
    if norm.training or norm.running_mean is None or norm.running_var is None:
        raise ValueError(
            f"the batch norm {name} normalises by the statistics of the batch, which LRP cannot merge; "
            "call model.eval(), and use norms that track running statistics"
        )
    scale = (norm.running_var + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach()
    shift = -norm.running_mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach()


def _explicit_norm(norm: nn.Module, scale: Tensor, shift: Tensor) -> nn.Module:
    """A norm that follows no convolution, as a depthwise 1×1 convolution and the norm's activation."""
    channels = len(scale)
    with torch.device("meta"):
        affine = nn.Conv2d(channels, channels, 1, groups=channels)
    affine.weight = nn.Parameter(scale.view(-1, 1, 1, 1), requires_grad=False)
    affine.bias = nn.Parameter(shift, requires_grad=False)
    layers = [("affine", affine)]
    layers += [(name, getattr(norm, name)) for name in ("drop", "act") if hasattr(norm, name)]
    return nn.Sequential(OrderedDict(layers)).train(norm.training)


def add(block: Any, z: Tensor, shortcut: Tensor) -> Tensor:
    """The sum of a residual block, by the module that `NetworkCanonizer._sum` gave it."""
    return block.canonical_sum(torch.stack((z, shortcut), dim=-1))


def layer_norm_forward(norm: Any, threshold: float = 1e-6) -> Callable[[Tensor], Tensor]:
    """Layer norm with its standard deviation held constant, a linear map, under LRP-0."""
    original = norm.forward
    dim = 1 if type(norm).__name__ == "LayerNorm2d" else -1

    def forward(x: Tensor) -> Tensor:
        if not x.requires_grad:
            return original(x)
        a = TimesInput.apply(x, x.detach())
        inverse = (x.detach().var(dim, keepdim=True, unbiased=False) + norm.eps).rsqrt()
        shape = (-1, 1, 1) if dim == 1 else (-1,)
        y = (a - a.mean(dim, keepdim=True)) * inverse
        y = y if norm.weight is None else y * norm.weight.detach().view(shape)
        y = y if norm.bias is None else y + norm.bias.detach().view(shape)
        return OverDenominator.apply(y, original(x.detach()), threshold)

    return forward
