"""Canonical form of torchvision's convolutional networks that Zennit itself does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drsa_core.lrp import passing
from torch import Tensor, nn
from torch.nn import functional as F
from zennit.canonizers import Canonizer

from ..canonizer import NetworkCanonizer, add, kind
from ..families import canonizer

FAMILIES = {
    "ConvNeXt": "convnext",
    "DenseNet": "densenet",
    "EfficientNet": "efficientnet",
    "MNASNet": "mnasnet",
    "MobileNetV2": "mobilenetv2",
    "MobileNetV3": "mobilenetv3",
    "RegNet": "regnet",
    "ShuffleNetV2": "shufflenetv2",
}
"""Supported networks, and the files of torchvision.models in which they are."""


class TorchvisionCanonizer(NetworkCanonizer):
    """Bring a convolutional network of torchvision into a form that Zennit's rules understand, and back.

    For the families in `FAMILIES`; VGG and ResNet have theirs in `zennit.torchvision`. The logits stay as
    they are. In the canonical form

    * batch norms are part of the convolution before them; one that follows no convolution (DenseNet) is a 1×1
      depthwise convolution of its own;
    * residual sums are explicit: `zennit.layer.Sum`, named `canonical_sum`; pooling in a network's own code
      is an `AdaptiveAvgPool2d`, named `canonical_pool`;
    * squeeze-excite layers are gates: relevance goes through their input alone;
    * layer scale passes relevance on;
    * layer norms are linear with their standard deviation held constant, under LRP-0.

    Subclasses of the networks and of their blocks are served too, as long as they inherit `forward`.

    Give it to a composite: `EpsilonPlus(canonizers=[TorchvisionCanonizer()])`.

    While the canonizer is applied, the backward pass of the model carries relevance: it is not its gradient.
    """

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        """Whether there is a network in the model that this canonizer is made for."""
        return bool(_find_networks(model))

    def register(self, root_module: nn.Module) -> None:
        """Apply the changes; `remove` takes them back."""
        networks = _find_networks(root_module)
        if not networks:
            raise ValueError(
                f"there is no network in this {type(root_module).__name__} that TorchvisionCanonizer knows; "
                f"supported are torchvision's {', '.join(FAMILIES)}. For its VGG and ResNet see "
                "zennit.torchvision, for models of timm zennit_drsa.TimmCanonizer"
            )
        for net in networks:
            gate_parts: set[nn.Module] = set()
            for name, module in net.named_modules():
                if module in gate_parts:
                    continue
                if _is(module, "SqueezeExcitation"):
                    gate_parts.update(module.modules())
                    self._pass(module)
                else:
                    self._canonize(name, module)

    def _canonize(self, name: str, module: nn.Module) -> None:
        self._merge_norms(name, module)
        known = kind(module).__name__
        if known in ("LayerNorm", "LayerNorm2d"):
            self._norm(module)
        elif _is(module, *_BLOCKS):
            branch = _BLOCKS[known](module)
            if branch is not None:
                self._sum(module, branch)
        elif _is(module, *_POOLED):
            self._edits.child(module, "canonical_pool", nn.AdaptiveAvgPool2d(1))
            self._forward(module, _pooled_forward(module, _POOLED[known]))


def _find_networks(root_module: nn.Module) -> list[nn.Module]:
    # By name, so that torchvision is not needed to ask.
    places = {(name, f"torchvision.models.{file}") for name, file in FAMILIES.items()}
    return [
        module
        for module in root_module.modules()
        if any((parent.__name__, parent.__module__) in places for parent in type(module).__mro__)
    ]


def _is(module: nn.Module, *names: str) -> bool:
    """Whether a module runs the forward of one of these classes of torchvision."""
    known = kind(module)
    return known.__name__ in names and known.__module__.startswith("torchvision.")


_Forward = Callable[[Tensor], Tensor]


def _block(block: Any) -> _Forward | None:
    # ShuffleNet's block of the same name concatenates.
    if not getattr(block, "use_res_connect", False):
        return None
    # torchvision's MobileNetV2 calls it conv; stochastic depth does nothing in evaluation mode.
    branch = block.conv if hasattr(block, "conv") else block.block
    return lambda x: add(block, branch(x), x)


def _mnasnet_block(block: Any) -> _Forward | None:
    return (lambda x: add(block, block.layers(x), x)) if block.apply_residual else None


def _regnet_block(block: Any) -> _Forward:
    return lambda x: block.activation(add(block, block.f(x), x if block.proj is None else block.proj(x)))


def _convnext_block(block: Any) -> _Forward:
    return lambda x: add(block, passing(block.block(x), lambda value: block.layer_scale * value), x)


_BLOCKS: dict[str, Callable[[Any], _Forward | None]] = {
    "CNBlock": _convnext_block,
    "FusedMBConv": _block,
    "InvertedResidual": _block,
    "MBConv": _block,
    "ResBottleneckBlock": _regnet_block,
    "_InvertedResidual": _mnasnet_block,
}


def _shufflenet_features(net: Any, x: Tensor) -> Tensor:
    for layer in (net.conv1, net.maxpool, net.stage2, net.stage3, net.stage4, net.conv5):
        x = layer(x)
    return x


# Networks that pool in their own code: what is before the pooling, and the name of what is behind it.
_POOLED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "DenseNet": (lambda net, x: F.relu(net.features(x)), "classifier"),
    "MNASNet": (lambda net, x: net.layers(x), "classifier"),
    "MobileNetV2": (lambda net, x: net.features(x), "classifier"),
    "ShuffleNetV2": (_shufflenet_features, "fc"),
}


def _pooled_forward(net: Any, parts: tuple[Callable[[Any, Tensor], Tensor], str]) -> _Forward:
    features, head = parts
    return lambda x: getattr(net, head)(net.canonical_pool(features(net, x)).flatten(1))


def _resnet_canonizer() -> Canonizer:
    from zennit.torchvision import ResNetCanonizer  # needs torchvision

    return ResNetCanonizer()


def _has_torchvision_resnet_blocks(model: nn.Module) -> bool:
    """Zennit writes the forward of torchvision's blocks anew, so that only those suit which inherit it."""
    blocks = [
        module
        for module in model.modules()
        if any(
            parent.__module__ == "torchvision.models.resnet"
            and parent.__name__ in ("BasicBlock", "Bottleneck")
            for parent in type(module).__mro__
        )
    ]
    return bool(blocks) and all(kind(block).__module__ == "torchvision.models.resnet" for block in blocks)


REMEDIES = (
    canonizer("zennit_drsa.TorchvisionCanonizer()", TorchvisionCanonizer, TorchvisionCanonizer.suits),
    canonizer("zennit.torchvision.ResNetCanonizer()", _resnet_canonizer, _has_torchvision_resnet_blocks),
)
