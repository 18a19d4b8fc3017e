"""Canonical form of timm's normaliser-free networks, on which LRP rules act (Supplementary Note K)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zennit.canonizers import Canonizer
from zennit.layer import Sum

from .lrp import ModuleEdits, passing_forward, registered_copy, scaled, with_operations

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

    keeps_output = True  # see `zennit_drsa.doctor.validate`
    carries_relevance = True  # see `zennit_drsa.canonizers.NetworkCanonizer`

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
            pooling = net.head.global_pool.pool_type
            if pooling not in ("avg", "fastavg", "fast", "max", "fastmax", ""):
                raise ValueError(
                    f"the NFNet pools by {pooling!r}, a sum without a rule; create it with global_pool='avg' "
                    "or 'max'"
                )
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
                    self._explicit_sum(module)
                elif type(module).__name__ == "DropPath":
                    self._edits.attribute(module, "forward", passing_forward(module))
            for activation in activations(net):
                self._edits.attribute(activation, "forward", passing_forward(activation))

    def _explicit_sum(self, block: Any) -> None:
        """Scalings in a block's own code pass relevance, and its shortcut is summed by a module."""
        self._edits.child(block, "canonical_sum", Sum())
        if block.skipinit_gain is not None:  # which is multiplied in place
            self._edits.attribute(block, "alpha", block.alpha * float(block.skipinit_gain.detach()))
            self._edits.attribute(block, "skipinit_gain", None)

        def add(z: Tensor, shortcut: Tensor) -> Any:
            return block.canonical_sum(torch.stack((z, shortcut), dim=-1))

        self._edits.attribute(block, "forward", with_operations(block.forward, mul=scaled, add=add))

    def remove(self) -> None:
        """Restore the model bit for bit."""
        self._edits.remove()


KNOWN_GATES = ("SEModule", "EffectiveSEModule", "EcaModule", "CecaModule", "SqueezeExcite")
"""Attention layers of timm that multiply their input, per channel, by a function of it."""


def find_nfnets(root_module: nn.Module) -> list[Any]:
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


def activations(net: Any) -> list[nn.Module]:
    """Activations on the way from input to logits (those inside of gates are not)."""
    found = [module for name, module in net.stem.named_children() if name.startswith("act")]
    for block in _blocks(net):
        found += [block.act1, block.act2, block.act2b, block.act3]
    return [act for act in (*found, net.final_act) if act is not None]


def orphans(net: Any) -> list[nn.Module]:
    """Activations that do not follow a convolution (Note K, case 3) and attention layers (case 4)."""
    found = [gate for _, gate in gates(net)]
    for block in _blocks(net):
        found += [block.act1] if block.attn is None else [block.act1, block.act3]
    return found if isinstance(net.final_conv, nn.Conv2d) else [*found, net.final_act]


def gates(net: nn.Module) -> list[tuple[str, nn.Module]]:
    """Attention layers (Note K, case 4) with their names."""
    return [
        (f"{block_name}.{name}", gate)
        for block_name, block in net.named_modules()
        if type(block).__name__ == "NormFreeBlock"
        for name in ("attn", "attn_last")
        if (gate := getattr(block, name)) is not None
    ]


def _blocks(net: nn.Module) -> list[Any]:
    return [module for module in net.modules() if type(module).__name__ == "NormFreeBlock"]


def plain_forward(conv: Any) -> Callable[[Tensor], Tensor]:
    """Forward of a folded convolution. It looks its weight up at each call, as rules exchange parameters."""
    if not getattr(conv, "same_pad", False):
        return lambda x: nn.Conv2d.forward(conv, x)
    from timm.layers.padding import pad_same

    return lambda x: nn.Conv2d.forward(conv, pad_same(x, conv.kernel_size, conv.stride, conv.dilation))
