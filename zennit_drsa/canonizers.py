"""Canonical forms of convolutional networks, on which the rules of any Zennit composite act.

* Batch norms are part of the convolution before them, also where timm's norm holds an activation
  (`BatchNormAct2d`); one that follows no convolution (DenseNet) is a 1×1 depthwise convolution.
* Residual sums are explicit: `zennit.layer.Sum`, named `canonical_sum`; pooling in a network's own code is an
  `AdaptiveAvgPool2d`, named `canonical_pool`.
* Squeeze-excite and ECA layers are gates: relevance goes through their input.
* Layer scale, drop-path and timm's own activations pass relevance on.
* Layer norms are linear with their standard deviation held constant, under LRP-0.

The logits stay the same. While a canonizer is applied, the backward pass of the model carries relevance: it
is not its gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from typing import Any, Self, TypeAlias

import torch
from drsa_core.lrp import ModuleEdits, linear_norm, passing_forward, registered_copy, scaled, with_operations
from drsa_core.nfnet import KNOWN_GATES, NFNetCanonizer
from torch import Tensor, nn
from torch.nn import functional as F
from zennit.canonizers import Canonizer
from zennit.layer import Sum
from zennit.types import BatchNorm, ConvolutionTranspose, Linear

Forward: TypeAlias = Callable[[Tensor], Tensor]


class NetworkCanonizer(Canonizer):  # type: ignore[misc]
    """A canonizer that knows the networks of a library, and says which models it suits.

    Subclasses implement `suits` and `register`, with the methods below. Added to `CANONIZERS`, they are
    suggested by `doctor` and used by `ConvNetGamma`.

    Attributes
    ----------
    carries_relevance : bool
        Whether some modules of the canonized model hand relevance on where a gradient would be. Without
        rules that carry relevance, attributors refuse it.
    """

    carries_relevance = False

    def __init__(self) -> None:
        super().__init__()
        self._edits = ModuleEdits()

    @classmethod
    @abstractmethod
    def suits(cls, model: nn.Module) -> bool:
        """Whether the model contains a network that this canonizer is made for."""

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
        self._edits.remove()

    def _forward(self, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        self._edits.attribute(module, "forward", forward)

    def _pass(self, module: nn.Module) -> None:
        """Let relevance pass a module unchanged."""
        self._forward(module, passing_forward(module))
        self.carries_relevance = True

    def _norm(self, module: nn.Module) -> None:
        self._forward(module, linear_norm(module, threshold=1e-6))
        self.carries_relevance = True

    def _sum(self, block: Any) -> None:
        """Have the sums in a block's own code made by its `canonical_sum`; scalings there pass relevance."""
        if any(
            getattr(block, flag, True) is False for flag in ("has_skip", "use_res_connect", "apply_residual")
        ):
            return
        self._edits.child(block, "canonical_sum", Sum())

        def add(x: Tensor, y: Tensor) -> Tensor:
            result: Tensor = block.canonical_sum(torch.stack((x, y), dim=-1))
            return result

        self._forward(block, with_operations(block.forward, add=add, mul=scaled))

    def _pool(self, module: nn.Module, forward: Forward) -> None:
        """Give a module another forward, which pools by its `canonical_pool`."""
        self._edits.child(module, "canonical_pool", nn.AdaptiveAvgPool2d(1))
        self._forward(module, forward)

    def _merge(self, name: str, linear: Any, norm: Any) -> None:
        """Merge a batch norm into the linear layer before it; the norm's own activation is left."""
        scale, shift = affine(name, norm)
        shape = [1] * linear.weight.ndim
        shape[1 if isinstance(linear, ConvolutionTranspose) else 0] = -1
        bias = 0 if linear.bias is None else linear.bias.detach()
        self._edits.parameter(linear, "weight", linear.weight * scale.view(shape))
        self._edits.parameter(linear, "bias", bias * scale + shift)
        self._forward(norm, MergedNorm(norm))

    def _merge_norms(self, name: str, parent: nn.Module) -> None:
        """Merge the norms among the children of a module into the convolutions right before them."""
        before: nn.Module | None = None
        for child_name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d | nn.SyncBatchNorm):
                where = f"{name}.{child_name}".lstrip(".")
                if isinstance(before, nn.Conv2d) and before.out_channels == child.num_features:
                    self._merge(where, before, child)
                else:
                    self._edits.child(parent, child_name, _explicit_norm(where, child))
            before = child
            while type(before) is nn.Sequential and len(before):  # a deep stem
                before = before[-1]


class ChainCanonizer(NetworkCanonizer):
    """Merge batch norms into the linear layers that are defined right before them, in any model."""

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        """Any model, but for networks of torchvision and timm that need more."""
        return next(networks_but(CHAINS, model), None) is None

    def register(self, root_module: nn.Module) -> None:
        """Apply the changes; `remove` takes them back."""
        leaves = [(n, m) for n, m in root_module.named_modules() if next(m.children(), None) is None]
        for (_, linear), (name, norm) in pairwise(leaves):
            if isinstance(linear, Linear) and isinstance(norm, (BatchNorm, nn.SyncBatchNorm)):
                self._merge(name, linear, norm)


CHAINS = ("vgg", "alexnet", "squeezenet", "googlenet")
"""Files of networks in torchvision and timm in which relevance crosses nothing but layers with a rule."""


def networks_but(files: Collection[str], model: nn.Module) -> Iterator[tuple[str, str]]:
    """Name and class of what torchvision or timm define for networks, but for those in these files."""
    for name, module in model.named_modules():
        for parent in type(module).__mro__:
            library, _, rest = parent.__module__.partition(".models.")
            file = rest.partition(".")[0]
            if library in ("torchvision", "timm") and file not in files and not file.startswith("_"):
                yield name, type(module).__name__
                break


def kind(module: nn.Module) -> type[nn.Module]:
    """The class whose `forward` a module runs: a subclass without its own is what it inherits from.

    Networks of timm run in parts, such as `forward_features`: who writes one anew runs other code.
    """
    return next(
        parent
        for parent in type(module).__mro__
        if any(name.startswith("forward") and callable(value) for name, value in vars(parent).items())
    )


class MergedNorm:
    """Forward of a batch norm that is part of the convolution before it: its activation is left."""

    is_merged_norm = True  # see `_zennit.is_merged`

    def __init__(self, norm: nn.Module) -> None:
        self.rest = [getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)]

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.rest:
            x = layer(x)
        return x


def affine(name: str, norm: Any) -> tuple[Tensor, Tensor]:
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


def _explicit_norm(name: str, norm: nn.Module) -> nn.Module:
    """A norm that follows no convolution, as a depthwise 1×1 convolution and the norm's activation."""
    scale, shift = affine(name, norm)
    with torch.device("meta"):
        depthwise = nn.Conv2d(len(scale), len(scale), 1, groups=len(scale))
    depthwise.weight = nn.Parameter(scale.view(-1, 1, 1, 1), requires_grad=False)
    depthwise.bias = nn.Parameter(shift, requires_grad=False)
    rest = [(part, getattr(norm, part)) for part in ("drop", "act") if hasattr(norm, part)]
    return nn.Sequential(OrderedDict([("affine", depthwise), *rest])).train(norm.training)


# ---------------------------------------------------------------------- timm

_TIMM = {
    "convnext": "ConvNeXt",
    "densenet": "DenseNet",
    "efficientnet": "EfficientNet",
    "mobilenetv3": "MobileNetV3",
    "regnet": "RegNet",
    "resnet": "ResNet",
}
_TIMM_KNOWN = "EfficientNet (Lite, too), MobileNetV2 and V3, ResNet, ResNeXt, RegNet, DenseNet, ConvNeXt"
_TIMM_BLOCKS = (
    *(
        "BasicBlock",
        "Bottleneck",
        "PreBottleneck",
        "ConvNeXtBlock",
        "ConvBnAct",
        "DepthwiseSeparableConv",
        "EdgeResidual",
    ),
    *("InvertedResidual", "UniversalInvertedResidual"),
)
# What only calls its children or concatenates, and layers that composites know or that select values.
_TIMM_UNCHANGED = (
    *(
        "RegStage",
        "DenseBlock",
        "DenseLayer",
        "DenseTransition",
        "ConvNeXtStage",
        "Downsample",
        "DownsampleAvg",
    ),
    *("ConvNormAct", "Mlp", "SelectAdaptivePool2d", "ClassifierHead", "NormMlpClassifierHead"),
    *("BatchNormAct2d", "Linear", "Conv2dSame", "AvgPool2dSame", "MaxPool2dSame", "FastAdaptiveMaxPool"),
)


class TimmCanonizer(NetworkCanonizer):
    """Bring a convolutional network of timm into a form that Zennit's rules understand, and back.

    For EfficientNet, EfficientNet-Lite, MobileNetV2 and V3, ResNet, ResNeXt, SE-ResNet, RegNet, DenseNet and
    ConvNeXt. Batch norms are merged, sums are modules, gates and layer scale pass relevance, layer norms are
    linear; the logits stay the same.

    Give it to a composite: `EpsilonPlus(canonizers=[TimmCanonizer()])`. While it is applied, the backward
    pass of the model carries relevance: it is not its gradient.
    """

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        """Whether there is a network in the model that this canonizer is made for."""
        return bool(_networks(model, "timm", _TIMM))

    def register(self, root_module: nn.Module) -> None:
        """Apply the changes; `remove` takes them back."""
        networks = _networks(root_module, "timm", _TIMM)
        if not networks:
            raise ValueError(
                f"there is no network in this {type(root_module).__name__} that TimmCanonizer knows; known "
                f"are timm's {_TIMM_KNOWN}. For NFNets see zennit_drsa.NFNetGamma, for models of torchvision "
                "zennit_drsa.TorchvisionCanonizer"
            )
        for net in networks:
            for name, module in _outside_of_gates(net, KNOWN_GATES):
                self._canonize(name, module)

    def _canonize(self, name: str, module: Any) -> None:
        known, library = kind(module).__name__, kind(module).__module__
        if known in KNOWN_GATES:
            self._pass(module)
            return
        self._merge_norms(name, module)
        if known in _TIMM_BLOCKS:
            self._sum(module)
        elif known in ("LayerNorm", "LayerNorm2d"):
            self._norm(module)
        elif known == "FastAdaptiveAvgPool":
            self._pool(module, _timm_pool(module))
        elif known in ("LayerScale", "LayerScale2d", "DropPath") or library.startswith(
            "timm.layers.activations"
        ):
            self._pass(module)
        elif isinstance(module, (nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)) or (
            library.startswith("timm.") and known not in (*_TIMM_UNCHANGED, *_TIMM.values())
        ):
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__}, for which TimmCanonizer knows no "
                f"canonical form; known are the blocks of {_TIMM_KNOWN}, with {', '.join(KNOWN_GATES)} as "
                "attention"
            )


def _networks(root: nn.Module, library: str, networks: dict[str, str]) -> list[nn.Module]:
    """Networks by file and class, so that their library is not needed to ask."""
    places = {(name, f"{library}.models.{file}") for file, name in networks.items()}
    return [
        module
        for module in root.modules()
        if any((parent.__name__, parent.__module__) in places for parent in type(module).__mro__)
    ]


def _outside_of_gates(net: nn.Module, gates: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a network, of gates only the outermost: what computes a gate gets no relevance."""
    inside: set[nn.Module] = set()
    for name, module in list(net.named_modules()):
        if module not in inside:
            if kind(module).__name__ in gates:
                inside.update(module.modules())
            yield name, module


def _timm_pool(pool: Any) -> Forward:
    def forward(x: Tensor) -> Tensor:
        channels_last = tuple(pool.dim) == (1, 2)
        pooled: Tensor = pool.canonical_pool(x.permute(0, 3, 1, 2) if channels_last else x)
        if pool.flatten:
            return pooled.flatten(1)
        return pooled.permute(0, 2, 3, 1) if channels_last else pooled

    return forward


# ---------------------------------------------------------------------- torchvision

_TORCHVISION = {
    "convnext": "ConvNeXt",
    "densenet": "DenseNet",
    "efficientnet": "EfficientNet",
    "mnasnet": "MNASNet",
    "mobilenetv2": "MobileNetV2",
    "mobilenetv3": "MobileNetV3",
    "regnet": "RegNet",
    "resnet": "ResNet",
    "shufflenetv2": "ShuffleNetV2",
}


class TorchvisionCanonizer(NetworkCanonizer):
    """Bring a convolutional network of torchvision into a form that Zennit's rules understand, and back.

    For ConvNeXt, DenseNet, EfficientNet, MNASNet, MobileNetV2 and V3, RegNet, ResNet and ShuffleNetV2, and
    for subclasses of these and of their blocks that inherit `forward`. The head of this file says what the
    form is; the logits stay the same.

    Give it to a composite: `EpsilonPlus(canonizers=[TorchvisionCanonizer()])`. While it is applied, the
    backward pass of the model carries relevance: it is not its gradient.
    """

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        """Whether there is a network in the model that this canonizer is made for."""
        return bool(_networks(model, "torchvision", _TORCHVISION))

    def register(self, root_module: nn.Module) -> None:
        """Apply the changes; `remove` takes them back."""
        networks = _networks(root_module, "torchvision", _TORCHVISION)
        if not networks:
            raise ValueError(
                f"there is no network in this {type(root_module).__name__} that TorchvisionCanonizer knows; "
                f"supported are torchvision's {', '.join(_TORCHVISION.values())}. For its VGG see "
                "zennit_drsa.VGGGamma, for models of timm zennit_drsa.TimmCanonizer"
            )
        for net in networks:
            for name, module in _outside_of_gates(net, ("SqueezeExcitation",)):
                self._canonize(name, module)

    def _canonize(self, name: str, module: Any) -> None:
        known, library = kind(module).__name__, kind(module).__module__.partition(".")[0]
        if library == "torchvision" and known == "SqueezeExcitation":
            self._pass(module)
            return
        self._merge_norms(name, module)
        if known in ("LayerNorm", "LayerNorm2d"):
            self._norm(module)
        elif library == "torchvision" and known in _TORCHVISION_BLOCKS:
            self._sum(module)
        elif library == "torchvision" and known in _POOLED:
            features, head = _POOLED[known]

            def pooled(x: Tensor) -> Tensor:
                result: Tensor = getattr(module, head)(module.canonical_pool(features(module, x)).flatten(1))
                return result

            self._pool(module, pooled)


def _shufflenet_features(net: Any, x: Tensor) -> Tensor:
    for layer in (net.conv1, net.maxpool, net.stage2, net.stage3, net.stage4, net.conv5):
        x = layer(x)
    return x


_TORCHVISION_BLOCKS = (
    *("BasicBlock", "Bottleneck", "FusedMBConv", "InvertedResidual", "MBConv", "ResBottleneckBlock"),
    *("_InvertedResidual", "CNBlock"),
)
# Networks that pool in their own code: what is before the pooling, and the name of what is behind it.
_POOLED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "DenseNet": (lambda net, x: F.relu(net.features(x)), "classifier"),
    "MNASNet": (lambda net, x: net.layers(x), "classifier"),
    "MobileNetV2": (lambda net, x: net.features(x), "classifier"),
    "ShuffleNetV2": (_shufflenet_features, "fc"),
}

CANONIZERS: list[Any] = [NFNetCanonizer, TimmCanonizer, TorchvisionCanonizer]
"""Canonizers of convolutional networks, of which the first that `suits` a model is used and suggested."""
