"""The image tower of open_clip's CLIP and CoCa models."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .transformer_attention import attend, multihead_attention
from .transformer_family import Edits, Family, inherits
from .transformer_parts import ContributionSum, PositionSum, PrefixTokens, TokenPool


def _block(edits: Edits, m: Any) -> None:
    if hasattr(m, "ln_1_kv"):
        raise ValueError(
            "a ResidualAttentionBlock with is_cross_attention=True is part of a decoder: cross-attention "
            "and causal decoders are not supported, use Integrated Gradients or another method without "
            "rules there"
        )
    edits.part(m, "sum_attention", ContributionSum())
    edits.part(m, "sum_mlp", ContributionSum())

    def forward(q_x: Tensor, attn_mask: Tensor | None = None, **_: object) -> Tensor:
        y = m.ln_1(q_x)
        x = m.canonical_sum_attention(q_x, m.ls_1(attend(m.attn, y, y, attn_mask)))
        return m.canonical_sum_mlp(x, m.ls_2(m.mlp(m.ln_2(x))))

    edits.forward(m, forward)


def _attentional_pooler(edits: Edits, m: Any) -> None:
    """Learned queries that gather from the tokens."""

    def forward(x: Tensor) -> Tensor:
        query = m.ln_q(m.query.detach()).detach()
        return attend(m.attn, query.expand(len(x), -1, -1), m.ln_k(x))

    edits.forward(m, forward)


def _blocks(edits: Edits, m: Any) -> None:
    if not m.batch_first:
        raise ValueError(
            "open_clip's Transformer has a canonical form here with batch_first=True; create it so"
        )
    edits.attribute(m, "grad_checkpointing", False)  # its second forward pass would run outside of the rules


def _network(edits: Edits, m: Any) -> None:
    if m.output_tokens:
        raise ValueError(
            "this image tower returns pooled features and tokens, and relevance starts at one tensor; set "
            "output_tokens to False"
        )
    edits.part(m, "prefix", PrefixTokens())
    edits.part(m, "position", PositionSum())
    edits.part(m, "pool", TokenPool("avg"))
    if m.proj is not None:
        edits.weight_slices(m, m.proj.T, None, proj=m.proj.shape[1])

    def embed(x: Tensor) -> Tensor:
        x = m.conv1(x).flatten(2).transpose(1, 2)
        x = m.canonical_prefix(x, m.class_embedding.view(1, 1, -1).to(x.dtype))
        return m.ln_pre(m.patch_dropout(m.canonical_position(x, m.positional_embedding.to(x.dtype))))

    def global_pool(x: Tensor) -> tuple[Tensor, Tensor]:
        if m.pool_type == "avg":
            return m.canonical_pool(x[:, 1:]), x[:, 1:]
        return (x[:, 0], x[:, 1:]) if m.pool_type == "tok" else (x, x)

    def forward(x: Tensor) -> Tensor:
        pooled, _ = m._pool(m.transformer(embed(x)))
        return pooled if m.proj is None else m.canonical_proj(pooled)

    edits.attribute(m, "_global_pool", global_pool)
    edits.forward(m, forward)


FAMILY = Family(
    name="open_clip's VisionTransformer (the image tower, model.visual)",
    library="open_clip",
    is_network=lambda module: inherits(module, "open_clip.transformer", "VisionTransformer"),
    forms={
        "VisionTransformer": _network,
        "Transformer": _blocks,
        "ResidualAttentionBlock": _block,
        "AttentionalPooler": _attentional_pooler,
        "MultiheadAttention": multihead_attention,
    },
    as_they_are=frozenset({"PatchDropout"}),
)
