"""timm's SwinTransformer."""

from __future__ import annotations

from typing import Any

from drsa_core.lrp import by_contribution
from torch import Tensor

from .transformer_attention import merge_heads, split_heads, window_bias
from .transformer_family import Edits, Family, inherits, unused
from .transformer_parts import AttentionProduct, ContributionSum


def _attention(edits: Edits, m: Any) -> None:
    edits.linear_slices(m, m.qkv, **dict.fromkeys(("query", "key", "value"), m.qkv.out_features // 3))
    edits.part(m, "attention", AttentionProduct(edits.reading, m.scale))

    def forward(x: Tensor, mask: Tensor | None = None) -> Tensor:
        source = m.canonical_attention.source(x)
        q, k = (split_heads(part(source), m.num_heads) for part in (m.canonical_query, m.canonical_key))
        v = split_heads(m.canonical_value(x), m.num_heads)
        bias = window_bias(m._get_rel_pos_bias().detach(), mask, len(x))
        return m.proj_drop(m.proj(merge_heads(m.canonical_attention(q, k, v, bias))))

    edits.forward(m, forward)


def _block(edits: Edits, m: Any) -> None:
    edits.part(m, "sum_attention", ContributionSum())
    edits.part(m, "sum_mlp", ContributionSum())

    def forward(x: Tensor) -> Tensor:
        x = m.canonical_sum_attention(x, m.drop_path1(m._attn(m.norm1(x))))
        return m.canonical_sum_mlp(x, m.drop_path2(m.mlp(m.norm2(x))))

    edits.forward(m, forward)


def _stage(edits: Edits, m: Any) -> None:
    edits.attribute(m, "grad_checkpointing", False)  # its second forward pass would run outside of the rules


def _pool(edits: Edits, m: Any) -> None:
    original = m.forward
    edits.forward(m, lambda x: by_contribution(original, x))


FAMILY = Family(
    name="timm's SwinTransformer",
    library="timm",
    is_network=lambda module: inherits(module, "timm.models.swin_transformer", "SwinTransformer"),
    forms={
        "WindowAttention": _attention,
        "SwinTransformerBlock": _block,
        "SwinTransformerStage": _stage,
        **dict.fromkeys(("FastAdaptiveAvgPool", "FastAdaptiveMaxPool", "FastAdaptiveAvgMaxPool"), _pool),
        "Softmax": unused,
    },
    as_they_are=frozenset(
        {"SwinTransformer", "PatchEmbed", "PatchMerging", "Mlp", "ClassifierHead", "SelectAdaptivePool2d"}
    ),
)
