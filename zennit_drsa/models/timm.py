"""Canonical form of timm's batch-normalised networks, and of ConvNeXt, for any Zennit composite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drsa_core.lrp import passing
from drsa_core.lrp.nfnet_canonizer import KNOWN_GATES
from torch import Tensor, nn

from ..canonizer import NetworkCanonizer, add, kind
from ..families import canonizer

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


class TimmCanonizer(NetworkCanonizer):
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

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        """Whether there is a network in the model that this canonizer is made for."""
        try:
            return bool(_find_networks(model))
        except (ImportError, ValueError):
            return False

    def register(self, root_module: nn.Module) -> None:
        """Apply the changes; `remove` takes them back."""
        for net in _find_networks(root_module):
            gate_parts: set[nn.Module] = set()
            for name, module in net.named_modules():
                if module in gate_parts:
                    continue
                if kind(module).__name__ in KNOWN_GATES:
                    gate_parts.update(module.modules())
                    self._pass(module)
                else:
                    self._canonize(name, module)

    def _canonize(self, name: str, module: nn.Module) -> None:
        known = kind(module).__name__
        self._merge_norms(name, module)
        if known in _SKIP_BLOCKS:
            if module.has_skip:
                self._sum(module, _skip_forward(module))
                self._edits.attribute(module, "has_skip", False)
        elif known in _FORWARDS:
            self._sum(module, _FORWARDS[known](module))
        elif known in ("LayerNorm", "LayerNorm2d"):
            self._norm(module)
        elif known == "FastAdaptiveAvgPool":
            self._replace_by_avg_pool(module)
        elif known in ("LayerScale", "LayerScale2d", "DropPath") or _is_timm_activation(module):
            self._pass(module)
        elif isinstance(module, (nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)) or (
            _is_from_timm(module) and known not in _CONTAINERS + _LAYERS
        ):
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__}, for which TimmCanonizer knows no "
                f"canonical form; supported are the blocks of {', '.join(FAMILIES.values())}, "
                f"with {', '.join(KNOWN_GATES)} as attention"
            )

    def _replace_by_avg_pool(self, pool: nn.Module) -> None:
        # An own module inside, as composites choose rules by type.
        self._edits.child(pool, "canonical_pool", nn.AdaptiveAvgPool2d(1))
        self._forward(pool, _avg_pool_forward(pool))


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
        hint = "; for torchvision's models see zennit_drsa.TorchvisionCanonizer and zennit.torchvision"
    raise ValueError(
        f"there is no network in this {type(root_module).__name__} that TimmCanonizer knows; supported are "
        f"timm's {', '.join(FAMILIES.values())}{hint}"
    )


def _is_from_timm(module: nn.Module) -> bool:
    return kind(module).__module__.startswith("timm.")


def _is_timm_activation(module: nn.Module) -> bool:
    return kind(module).__module__.startswith("timm.layers.activations")


def _skip_forward(block: Any) -> Callable[[Tensor], Tensor]:
    """Forward of a block of the EfficientNet family; its own adds nothing while `has_skip` is false."""
    branch = block.forward
    return lambda x: add(block, block.drop_path(branch(x)), x)


def _basic_block(block: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        z = block.aa(block.act1(block.drop_block(block.bn1(block.conv1(x)))))
        z = block.bn2(block.conv2(z))
        return block.act2(_resnet_sum(block, z, x))

    return forward


def _bottleneck(block: Any) -> Callable[[Tensor], Tensor]:
    if "regnet" in kind(block).__module__:
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
    return add(block, z, x if block.downsample is None else block.downsample(x))


def _regnet_bottleneck(block: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        z = block.conv3(block.se(block.conv2(block.conv1(x))))
        if block.downsample is not None:
            z = add(block, block.drop_path(z), block.downsample(x))
        return block.act3(z)

    return forward


def _pre_bottleneck(block: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        x = block.norm1(x)
        z = block.se(block.conv2(block.norm2(block.conv1(x))))
        z = block.conv3(block.norm3(z))
        return z if block.downsample is None else add(block, block.drop_path(z), block.downsample(x))

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
        return add(block, block.drop_path(z), block.shortcut(x))

    return forward


_FORWARDS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "BasicBlock": _basic_block,
    "Bottleneck": _bottleneck,
    "PreBottleneck": _pre_bottleneck,
    "ConvNeXtBlock": _convnext_block,
}


def _avg_pool_forward(pool: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        channels_last = tuple(pool.dim) == (1, 2)
        pooled = pool.canonical_pool(x.permute(0, 3, 1, 2) if channels_last else x)
        if pool.flatten:
            return pooled.flatten(1)
        return pooled.permute(0, 2, 3, 1) if channels_last else pooled

    return forward


REMEDIES = (canonizer("zennit_drsa.TimmCanonizer()", TimmCanonizer, TimmCanonizer.suits),)
