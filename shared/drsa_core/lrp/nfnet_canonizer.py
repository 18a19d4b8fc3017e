"""Canonical form of timm's normaliser-free networks, on which LRP rules act (Supplementary Note K)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zennit.canonizers import Canonizer
from zennit.layer import Sum

from .canonical import ModuleEdits, passing, passing_forward, registered_copy

FAMILIES = (
    "dm_nfnet_f*, nfnet_f*, nfnet_l0, eca_nfnet_l*, nf_resnet*, nf_seresnet*, nf_ecaresnet*, nf_regnet_b*, "
    "test_nfnet"
)


class NFNetCanonizer(Canonizer):  # type: ignore[misc]
    """Bring a timm NFNet (`NormFreeNet`) into a form that LRP rules understand, and back.

    The logits stay as they are. In the canonical form

    * weight-standardised convolutions are plain ones: `weight` holds gain · standardised weight;
    * activations pass relevance on, and so do α, β, the attention and skip-init gains and drop-path;
    * squeeze-excite and ECA layers are gates: relevance goes through their input z alone;
    * the shortcut of each block is an explicit `zennit.layer.Sum` named `canonical_sum`.

    Everything that is left (convolutions, the linear layer, average pooling, sums) is linear and has a Zennit
    type, so that any composite can be used; `zennit_drsa.NFNetGamma` has the rules of the paper.

    While the canonizer is applied, the backward pass of the model carries relevance: it is not its gradient.
    """

    keeps_output = True  # see `zennit_drsa.composite.GuardedComposite.may_change_output`
    carries_relevance = True  # see `zennit_drsa.canonizer.NetworkCanonizer`

    def __init__(self) -> None:
        super().__init__()
        self._edits = ModuleEdits()

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        """Whether there is an NFNet in the model."""
        try:
            return bool(find_nfnets(model))
        except (ImportError, ValueError):
            return False

    def apply(self, root_module: nn.Module) -> list[NFNetCanonizer]:
        """Canonize every NFNet in `root_module`.

        Raises
        ------
        ImportError
            If timm is not installed.
        ValueError
            If there is no NFNet in the model, or if one has an attention or pooling layer without a rule.
        """
        return [registered_copy(self, root_module)]

    def register(self, root_module: nn.Module) -> None:
        """Apply the changes; `remove` takes them back."""
        for net in find_nfnets(root_module):
            _check_pooling(net)
            inside = {part for _, gate in gates(net) for part in gate.modules()}
            for name, gate in gates(net):
                if type(gate).__name__ not in KNOWN_GATES:
                    raise ValueError(
                        f"the attention layer {name} is a {type(gate).__name__}, for which there is no rule; "
                        f"known are {', '.join(KNOWN_GATES)}, which multiply their input by a gate"
                    )
                self._edits.attribute(gate, "forward", passing_forward(gate))
            for module in net.modules():
                if module in inside:
                    continue
                if type(module).__name__ in ("ScaledStdConv2d", "ScaledStdConv2dSame"):
                    self._edits.parameter(module, "weight", folded_weight(module))
                    self._edits.attribute(module, "forward", plain_forward(module))
                elif type(module).__name__ == "NormFreeBlock":
                    self._edits.child(module, "canonical_sum", Sum())
                    self._edits.attribute(module, "forward", _block_forward(module))
            for activation in activations(net):
                self._edits.attribute(activation, "forward", passing_forward(activation))

    def remove(self) -> None:
        """Restore the model bit for bit."""
        self._edits.undo()


KNOWN_GATES = ("SEModule", "EffectiveSEModule", "EcaModule", "CecaModule", "SqueezeExcite")
"""Attention layers of timm that multiply their input, per channel, by a function of it."""


def find_nfnets(root_module: nn.Module) -> list[nn.Module]:
    """All `NormFreeNet`s in a model."""
    try:
        from timm.models.nfnet import NormFreeNet
    except ImportError as error:
        raise ImportError("NFNets come from timm: pip install 'captum-zennit-drsa[timm]'") from error
    nets = [module for module in root_module.modules() if isinstance(module, NormFreeNet)]
    if not nets:
        raise ValueError(
            f"there is no NFNet in this {type(root_module).__name__}; supported are timm's families "
            f"{FAMILIES}. For timm's batch-normalised models see zennit_drsa.TimmCanonizer"
        )
    return nets


def folded_weight(conv: Any) -> Tensor:
    """Effective weight of a `ScaledStdConv2d`: gain · γ/√fan-in · (w − mean) / √(var + eps), by channel."""
    weight: Tensor = conv.weight
    with torch.no_grad():
        return F.batch_norm(
            weight.reshape(1, len(weight), -1),
            running_mean=None,
            running_var=None,
            weight=(conv.gain * conv.scale).view(-1),
            training=True,
            momentum=0.0,
            eps=conv.eps,
        ).reshape_as(weight)


def activations(net: nn.Module) -> list[nn.Module]:
    """Activations on the way from input to logits (those inside of gates are not)."""
    names = ("act1", "act2", "act2b", "act3")
    found = [module for name, module in net.stem.named_children() if name.startswith("act")]  # type: ignore[union-attr]
    for block in _blocks(net):
        found += [act for name in names if (act := getattr(block, name)) is not None]
    return [*found, net.final_act]  # type: ignore[list-item]


def orphans(net: nn.Module) -> list[nn.Module]:
    """Activations that do not follow a convolution (Note K, case 3) and attention layers (case 4)."""
    found = [gate for _, gate in gates(net)]
    for block in _blocks(net):
        found.append(block.act1)  # type: ignore[arg-type]
        if block.attn is not None:
            found.append(block.act3)  # type: ignore[arg-type]
    if not isinstance(net.final_conv, nn.Conv2d):
        found.append(net.final_act)  # type: ignore[arg-type]
    return found


def _blocks(net: nn.Module) -> list[nn.Module]:
    return [module for module in net.modules() if type(module).__name__ == "NormFreeBlock"]


def gates(net: nn.Module) -> list[tuple[str, nn.Module]]:
    """Attention layers (Note K, case 4) with their names."""
    names = ("attn", "attn_last")
    return [
        (f"{block_name}.{name}", gate)
        for block_name, block in net.named_modules()
        if type(block).__name__ == "NormFreeBlock"
        for name in names
        if (gate := getattr(block, name)) is not None
    ]


def _check_pooling(net: nn.Module) -> None:
    pool_type = net.head.global_pool.pool_type  # type: ignore[union-attr]
    if pool_type not in ("avg", "fastavg", "fast", "max", "fastmax", ""):
        raise ValueError(
            f"the NFNet pools by {pool_type!r}, a sum without a rule; create it with "
            "global_pool='avg' or 'max'"
        )


def plain_forward(conv: nn.Module) -> Callable[[Tensor], Tensor]:
    """Forward of a folded convolution. It looks its weight up at each call, as rules exchange parameters."""
    if not getattr(conv, "same_pad", False):
        return lambda x: nn.Conv2d.forward(conv, x)  # type: ignore[arg-type]
    from timm.layers.padding import pad_same

    return lambda x: nn.Conv2d.forward(
        conv,  # type: ignore[arg-type]
        pad_same(x, conv.kernel_size, conv.stride, conv.dilation),
    )


def _block_forward(block: nn.Module) -> Callable[[Tensor], Tensor]:
    """Forward of a `NormFreeBlock`: its layers as they are, scalings passing relevance, its sum explicit."""

    def attention(gate: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        return passing(gate(z), lambda a: block.attn_gain * a)  # type: ignore[operator]

    def scale_residual(z: Tensor) -> Tensor:
        z = block.drop_path(z)  # type: ignore[operator]
        if block.skipinit_gain is not None:
            z = z * block.skipinit_gain  # type: ignore[operator]
        return z * block.alpha  # type: ignore[operator]

    def forward(x: Tensor) -> Tensor:
        b: Any = block
        a = passing(b.act1(x), lambda value: value * b.beta)
        shortcut = x if b.downsample is None else b.downsample(a)
        z = b.conv2(b.act2(b.conv1(a)))
        if b.conv2b is not None:
            z = b.conv2b(b.act2b(z))
        if b.attn is not None:
            z = attention(b.attn, z)
        z = b.conv3(b.act3(z))
        if b.attn_last is not None:
            z = attention(b.attn_last, z)
        return b.canonical_sum(torch.stack((passing(z, scale_residual), shortcut), dim=-1))

    return forward
