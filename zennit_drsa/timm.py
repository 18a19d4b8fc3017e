"""Canonical form of timm's batch-normalised networks, and of ConvNeXt, for any Zennit composite."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from drsa_core.canonical import (
    ModuleEdits,
    OverDenominator,
    TimesInput,
    passing,
    passing_forward,
    registered_copy,
)
from drsa_core.nfnet import KNOWN_GATES
from torch import Tensor, nn
from zennit.canonizers import Canonizer
from zennit.layer import Sum

FAMILIES = {
    "EfficientNet": "EfficientNet, EfficientNet-Lite, MobileNetV2",
    "MobileNetV3": "MobileNetV3",
    "ResNet": "ResNet, ResNeXt, SE-ResNet",
    "RegNet": "RegNet",
    "DenseNet": "DenseNet",
    "ConvNeXt": "ConvNeXt",
}

_SKIP_BLOCKS = (
    "ConvBnAct",
    "DepthwiseSeparableConv",
    "InvertedResidual",
    "UniversalInvertedResidual",
    "EdgeResidual",
)
# Modules of timm that only call their children one after the other, or concatenate.
_CONTAINERS = (
    *FAMILIES,
    *(
        "RegStage",
        "DenseBlock",
        "DenseLayer",
        "DenseTransition",
        "ConvNeXtStage",
        "Downsample",
        "DownsampleAvg",
    ),
    *(
        "ConvNormAct",
        "Mlp",
        "SelectAdaptivePool2d",
        "ClassifierHead",
        "NormMlpClassifierHead",
        "BatchNormAct2d",
    ),
)
# Layers of timm that are subclasses of a layer which composites know, or through which a gradient is
# relevance.
_LAYERS = ("Linear", "Conv2dSame", "AvgPool2dSame", "MaxPool2dSame", "FastAdaptiveMaxPool")


class TimmCanonizer(Canonizer):  # type: ignore[misc]
    """Bring a convolutional network of timm into a form that Zennit's rules understand, and back.

    The logits stay as they are. In the canonical form

    * batch norms are part of the convolution before them, also where timm's norm holds an activation
      (`BatchNormAct2d`) or its convolution pads (`Conv2dSame`); a norm before an activation that follows no
      convolution (DenseNet) is a 1×1 depthwise convolution of its own;
    * residual sums are explicit: `zennit.layer.Sum`, named `canonical_sum`;
    * squeeze-excite and ECA layers are gates: relevance goes through their input alone;
    * layer scale, drop-path and timm's own activations pass relevance on;
    * layer norms are linear with their standard deviation held constant, under LRP-0.

    Give it to a composite: `EpsilonPlus(canonizers=[TimmCanonizer()])`.

    While the canonizer is applied, the backward pass of the model carries relevance: it is not its gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self._edits = ModuleEdits()

    def apply(self, root_module: nn.Module) -> list[TimmCanonizer]:
        """Canonize every supported network in `root_module`.

        Raises
        ------
        ImportError
            If timm is not installed.
        ValueError
            If there is no such network, if a block has no canonical form, or if a norm has no running
            statistics.
        """
        return [registered_copy(self, root_module)]

    def register(self, root_module: nn.Module) -> None:
        """Apply the changes; `remove` takes them back."""
        for net in _find_networks(root_module):
            gate_parts: set[nn.Module] = set()
            for name, module in net.named_modules():
                if module in gate_parts:
                    continue
                if type(module).__name__ in KNOWN_GATES:
                    gate_parts.update(module.modules())
                    self._pass(module)
                else:
                    self._canonize(name, module)

    def remove(self) -> None:
        """Restore the model bit for bit."""
        self._edits.undo()

    def _canonize(self, name: str, module: nn.Module) -> None:
        kind = type(module).__name__
        self._merge_norms(name, module)
        if kind in _SKIP_BLOCKS:
            if module.has_skip:
                self._sum(module, _skip_forward(module))
                self._edits.attribute(module, "has_skip", False)
        elif kind in _FORWARDS:
            self._sum(module, _FORWARDS[kind](module))
        elif kind in ("LayerNorm", "LayerNorm2d"):
            self._edits.attribute(module, "forward", _layer_norm_forward(module))
        elif kind == "FastAdaptiveAvgPool":
            self._replace_by_avg_pool(module)
        elif kind in ("LayerScale", "LayerScale2d", "DropPath") or _is_timm_activation(module):
            self._pass(module)
        elif isinstance(module, (nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)) or (
            _is_from_timm(module) and kind not in _CONTAINERS + _LAYERS
        ):
            raise ValueError(
                f"{name or 'the model'} is a {kind}, for which TimmCanonizer knows no canonical form; "
                f"supported are the blocks of {', '.join(FAMILIES.values())}, "
                f"with {', '.join(KNOWN_GATES)} as attention"
            )

    def _pass(self, module: nn.Module) -> None:
        self._edits.attribute(module, "forward", passing_forward(module))

    def _sum(self, block: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        self._edits.child(block, "canonical_sum", Sum())
        self._edits.attribute(block, "forward", forward)

    def _merge_norms(self, name: str, parent: nn.Module) -> None:
        """Merge the norms among the children of a module into the convolutions right before them."""
        before: nn.Module | None = None
        for child_name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                scale, shift = _affine(f"{name}.{child_name}".lstrip("."), child)
                if isinstance(before, nn.Conv2d) and before.out_channels == child.num_features:
                    bias = 0 if before.bias is None else before.bias.detach()
                    self._edits.parameter(before, "weight", before.weight * scale.view(-1, 1, 1, 1))
                    self._edits.parameter(before, "bias", bias * scale + shift)
                    self._edits.attribute(child, "forward", MergedNorm(child))
                else:
                    self._edits.child(parent, child_name, _explicit_norm(child, scale, shift))
            before = _last(child)

    def _replace_by_avg_pool(self, pool: nn.Module) -> None:
        # An own module inside, as composites choose rules by type.
        self._edits.child(pool, "canonical_pool", nn.AdaptiveAvgPool2d(1))
        self._edits.attribute(pool, "forward", _avg_pool_forward(pool))


class MergedNorm:
    """Forward of a batch norm that is part of the convolution before it: its activation is left."""

    def __init__(self, norm: nn.Module) -> None:
        self.rest = [getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)]

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.rest:
            x = layer(x)
        return x


def _find_networks(root_module: nn.Module) -> list[nn.Module]:
    try:
        from timm.models import convnext, densenet, efficientnet, mobilenetv3, regnet, resnet
    except ImportError as error:
        raise ImportError(
            "TimmCanonizer is for models of timm: pip install 'captum-zennit-drsa[timm]'"
        ) from error
    classes = (
        *(efficientnet.EfficientNet, mobilenetv3.MobileNetV3, resnet.ResNet),
        *(regnet.RegNet, densenet.DenseNet, convnext.ConvNeXt),
    )
    networks = [module for module in root_module.modules() if isinstance(module, classes)]
    if networks:
        return networks
    hint = ""
    if any(type(module).__name__ == "NormFreeNet" for module in root_module.modules()):
        hint = "; for NFNets see zennit_drsa.NFNetGamma"
    elif type(root_module).__module__.startswith("torchvision."):
        hint = "; for torchvision's models see zennit.torchvision"
    raise ValueError(
        f"there is no network in this {type(root_module).__name__} that TimmCanonizer knows; supported are "
        f"timm's {', '.join(FAMILIES.values())}{hint}"
    )


def _is_from_timm(module: nn.Module) -> bool:
    return type(module).__module__.startswith("timm.")


def _is_timm_activation(module: nn.Module) -> bool:
    return type(module).__module__.startswith("timm.layers.activations")


def _last(module: nn.Module) -> nn.Module:
    """The last layer of a plain sequence (a deep stem), else the module itself."""
    while type(module) is nn.Sequential and len(module):
        module = module[-1]
    return module


def _affine(name: str, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
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


def _skip_forward(block: Any) -> Callable[[Tensor], Tensor]:
    """Forward of a block of the EfficientNet family; its own adds nothing while `has_skip` is false."""
    branch = block.forward
    return lambda x: _add(block, block.drop_path(branch(x)), x)


def _basic_block(block: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        z = block.aa(block.act1(block.drop_block(block.bn1(block.conv1(x)))))
        z = block.bn2(block.conv2(z))
        return block.act2(_resnet_sum(block, z, x))

    return forward


def _bottleneck(block: Any) -> Callable[[Tensor], Tensor]:
    if "regnet" in type(block).__module__:
        return _regnet_bottleneck(block)

    def forward(x: Tensor) -> Tensor:
        z = block.act1(block.bn1(block.conv1(x)))
        z = block.aa(block.act2(block.drop_block(block.bn2(block.conv2(z)))))
        z = block.bn3(block.conv3(z))
        return block.act3(_resnet_sum(block, z, x))

    return forward


def _resnet_sum(block: Any, z: Tensor, x: Tensor) -> Tensor:
    for layer in (block.se, block.drop_path):
        z = z if layer is None else layer(z)
    return _add(block, z, x if block.downsample is None else block.downsample(x))


def _regnet_bottleneck(block: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        z = block.conv3(block.se(block.conv2(block.conv1(x))))
        if block.downsample is not None:
            z = _add(block, block.drop_path(z), block.downsample(x))
        return block.act3(z)

    return forward


def _pre_bottleneck(block: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        x = block.norm1(x)
        z = block.se(block.conv2(block.norm2(block.conv1(x))))
        z = block.conv3(block.norm3(z))
        return z if block.downsample is None else _add(block, block.drop_path(z), block.downsample(x))

    return forward


def _convnext_block(block: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        z = block.conv_dw(x)
        if block.use_conv_mlp:
            z = block.mlp(block.norm(z))
        else:
            z = block.mlp(block.norm(z.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        if block.gamma is not None:
            z = passing(z, lambda value: value * block.gamma.reshape(1, -1, 1, 1))
        return _add(block, block.drop_path(z), block.shortcut(x))

    return forward


_FORWARDS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "BasicBlock": _basic_block,
    "Bottleneck": _bottleneck,
    "PreBottleneck": _pre_bottleneck,
    "ConvNeXtBlock": _convnext_block,
}


def _add(block: Any, z: Tensor, shortcut: Tensor) -> Tensor:
    return block.canonical_sum(torch.stack((z, shortcut), dim=-1))


def _avg_pool_forward(pool: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        channels_last = tuple(pool.dim) == (1, 2)
        pooled = pool.canonical_pool(x.permute(0, 3, 1, 2) if channels_last else x)
        if pool.flatten:
            return pooled.flatten(1)
        return pooled.permute(0, 2, 3, 1) if channels_last else pooled

    return forward


def _layer_norm_forward(norm: Any, threshold: float = 1e-6) -> Callable[[Tensor], Tensor]:
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
