"""timm's VisionTransformer (ViT, DeiT, DINOv2, the image towers of CLIP and SigLIP) and SwinTransformer."""

from __future__ import annotations

from typing import Any

import torch
from drsa_core.lrp import by_contribution
from torch import Tensor

from ..kept import BIASES
from .canonizer import Family, inherits
from .parts import (
    AttentionProduct,
    Edits,
    GateProduct,
    Pool,
    PositionSum,
    add,
    attention,
    positions,
    sums,
    unused,
)

_NETWORKS = ("VisionTransformer", "VisionTransformerDistilled")
_POOLS = {
    "avg": lambda x: x.mean(1),
    "max": lambda x: x.amax(1),
    "avgmax": lambda x: 0.5 * (x.amax(1) + x.mean(1)),
}


def _network(edits: Edits, m: Any) -> None:
    if type(m).__name__ not in _NETWORKS:
        raise ValueError(
            f"{type(m).__name__} changes timm's VisionTransformer in ways that TransformerCanonizer does not "
            f"know; supported are {' and '.join(_NETWORKS)} themselves"
        )
    positions(edits, m, "_pos_embed")
    edits.attribute(m, "grad_checkpointing", False)  # its second forward pass would run outside of the rules
    if type(m).__name__ == "VisionTransformerDistilled":
        edits.part(m, "mean", Pool(_POOLS["avg"]))
        edits.attribute(m, "forward_head", _distilled_head(m))
    elif m.attn_pool is None and m.global_pool in _POOLS:
        edits.part(m, "pool", Pool(_POOLS[m.global_pool]))
        edits.attribute(m, "pool", _pool(m))


def _pool(m: Any) -> Any:
    def pool(x: Tensor, pool_type: str | None = None) -> Tensor:
        if pool_type not in (None, m.global_pool):
            raise ValueError(f"this VisionTransformer pools by {m.global_pool!r}, not by {pool_type!r}")
        result: Tensor = m.canonical_pool(x if m.pool_include_prefix else x[:, m.num_prefix_tokens :])
        return result

    return pool


def _distilled_head(m: Any) -> Any:
    def forward_head(x: Tensor, pre_logits: bool = False) -> Tensor:
        first, second = m.head_drop(x[:, 0]), m.head_drop(x[:, 1])
        if not pre_logits:
            first, second = m.head(first), m.head_dist(second)
        result: Tensor = m.canonical_mean(torch.stack((first, second), dim=1))
        return result

    return forward_head


def _attention_pool(edits: Edits, m: Any) -> None:
    """`AttentionPoolLatent`: learned queries, which take no relevance, gather from the tokens."""
    edits.attribute(m, "fused_attn", True)
    product = edits.part(m, "attention", AttentionProduct(edits.reading))
    position, pool = edits.part(m, "position", PositionSum()), edits.part(m, "pool", Pool(torch.mean))

    def added(x: Tensor, y: Tensor) -> Tensor:
        is_position = m.pos_embed is not None and y.data_ptr() == m.pos_embed.data_ptr()
        result: Tensor = position(x, y) if is_position else add(x, y)
        return result

    edits.operations(m, attention=lambda q, k, v, **k_: product(q.detach(), k, v, **k_), add=added, mean=pool)


def _parallel_scaling_block(edits: Edits, m: Any) -> None:
    """Attention and MLP side by side, with one layer before and one or two behind both."""
    edits.attribute(m, "fused_attn", True)
    product = edits.part(m, "attention", AttentionProduct(edits.reading))
    bias = edits.part(m, "bias", PositionSum(BIASES))
    edits.operations(m, attention=product, add=lambda x, y: bias(x, y) if y is m.mlp_bias else add(x, y))


def _glu_mlp(edits: Edits, m: Any) -> None:
    gate = edits.part(m, "gate", GateProduct(edits.reading))
    edits.operations(m, mul=lambda a, b: gate(a, b) if m.gate_last else gate(b, a))


def _swiglu(edits: Edits, m: Any) -> None:
    gate = edits.part(m, "gate", GateProduct(edits.reading))
    edits.operations(m, mul=lambda a, b: gate(b, a))


VIT = Family(
    name="timm's VisionTransformer (ViT, DeiT, DINOv2, the image towers of CLIP and SigLIP)",
    library="timm",
    is_network=inherits("timm.models.vision_transformer", "VisionTransformer"),
    forms={
        **dict.fromkeys(_NETWORKS, _network),
        **dict.fromkeys(("Block", "ResPostBlock", "ParallelThingsBlock"), sums),
        "ParallelScalingBlock": _parallel_scaling_block,
        "Attention": attention,
        "AttentionPoolLatent": _attention_pool,
        "GluMlp": _glu_mlp,
        "SwiGLU": _swiglu,
    },
    unchanged=("PatchEmbed", "Mlp", "PatchDropout"),
)


def _stage(edits: Edits, m: Any) -> None:
    edits.attribute(m, "grad_checkpointing", False)  # its second forward pass would run outside of the rules


def _swin_pool(edits: Edits, m: Any) -> None:
    original = m.forward
    edits.forward(m, lambda x: by_contribution(original, x))


SWIN = Family(
    name="timm's SwinTransformer",
    library="timm",
    is_network=inherits("timm.models.swin_transformer", "SwinTransformer"),
    forms={
        "WindowAttention": attention,
        "SwinTransformerBlock": sums,
        "SwinTransformerStage": _stage,
        **dict.fromkeys(("FastAdaptiveAvgPool", "FastAdaptiveMaxPool", "FastAdaptiveAvgMaxPool"), _swin_pool),
        "Softmax": unused,
    },
    unchanged=(
        "SwinTransformer",
        "PatchEmbed",
        "PatchMerging",
        "Mlp",
        "ClassifierHead",
        "SelectAdaptivePool2d",
    ),
)
