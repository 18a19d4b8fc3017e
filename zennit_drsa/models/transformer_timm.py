"""timm's VisionTransformer: ViT, DeiT, DINOv2 with registers, the image towers of CLIP and SigLIP."""

from __future__ import annotations

from typing import Any

import torch
from drsa_core.lrp import passing
from torch import Tensor

from .transformer_attention import additive, merge_heads, split_heads
from .transformer_family import Edits, Family, inherits
from .transformer_parts import (
    AttentionProduct,
    ContributionSum,
    GateProduct,
    PositionSum,
    PrefixTokens,
    TokenPool,
)

_NETWORKS = ("VisionTransformer", "VisionTransformerDistilled")


# ---------------------------------------------------------------------- attention


def _check_mask(is_causal: bool) -> None:
    if is_causal:
        raise ValueError(
            "is_causal=True makes a causal decoder of the VisionTransformer; TransformerCanonizer is for "
            "encoders, in which each token sees all others. Leave is_causal at False"
        )


def _attention(edits: Edits, m: Any) -> None:
    edits.linear_slices(m, m.qkv, **dict.fromkeys(("query", "key", "value"), m.qkv.out_features // 3))
    edits.part(m, "attention", AttentionProduct(edits.reading, m.scale))
    if getattr(m, "gate", None) is not None:
        edits.part(m, "gate", GateProduct(edits.reading))

    def forward(x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        _check_mask(is_causal)
        source = m.canonical_attention.source(x)
        q = m.q_norm(split_heads(m.canonical_query(source), m.num_heads))
        k = m.k_norm(split_heads(m.canonical_key(source), m.num_heads))
        v = split_heads(m.canonical_value(x), m.num_heads)
        z = m.norm(merge_heads(m.canonical_attention(q, k, v, additive(attn_mask, x))))
        if getattr(m, "gate", None) is not None:
            z = m.canonical_gate(z, passing(m.gate(source), torch.sigmoid))
        return m.proj_drop(m.proj(z))

    edits.forward(m, forward)


def _attention_pool(edits: Edits, m: Any) -> None:
    """`AttentionPoolLatent`: learned queries that gather from the tokens."""
    edits.linear_slices(m, m.kv, **dict.fromkeys(("key", "value"), m.kv.out_features // 2))
    edits.part(m, "attention", AttentionProduct(edits.reading, m.scale))
    edits.part(m, "sum", ContributionSum())
    if m.pos_embed is not None:
        edits.part(m, "position", PositionSum())
    if m.pool == "avg":
        edits.part(m, "pool", TokenPool("avg"))

    def forward(x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if m.pos_embed is not None:
            x = m.canonical_position(x, m.pos_embed.unsqueeze(0))
        latent = m.latent.detach().expand(len(x), -1, -1)
        q = m.q_norm(split_heads(m.q(latent).detach(), m.num_heads)).detach()
        k = m.k_norm(split_heads(m.canonical_key(m.canonical_attention.source(x)), m.num_heads))
        v = split_heads(m.canonical_value(x), m.num_heads)
        z = merge_heads(m.canonical_attention(q, k, v, additive(attn_mask, x)))
        z = m.proj_drop(m.proj(z))
        if m.mlp is not None:
            z = m.canonical_sum(z, m.mlp(m.norm(z)))
        if m.pool == "token":
            return z[:, 0]
        return m.canonical_pool(z) if m.pool == "avg" else z

    edits.forward(m, forward)


# ---------------------------------------------------------------------- blocks


def _two_sums(edits: Edits, m: Any) -> None:
    edits.part(m, "sum_attention", ContributionSum())
    edits.part(m, "sum_mlp", ContributionSum())


def _block(edits: Edits, m: Any) -> None:
    _two_sums(edits, m)

    def forward(x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        z = m.attn(m.norm1(x), attn_mask=attn_mask, is_causal=is_causal)
        x = m.canonical_sum_attention(x, m.drop_path1(m.ls1(z)))
        return m.canonical_sum_mlp(x, m.drop_path2(m.ls2(m.mlp(m.norm2(x)))))

    edits.forward(m, forward)


def _res_post_block(edits: Edits, m: Any) -> None:
    _two_sums(edits, m)

    def forward(x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        z = m.attn(x, attn_mask=attn_mask, is_causal=is_causal)
        x = m.canonical_sum_attention(x, m.drop_path1(m.norm1(z)))
        return m.canonical_sum_mlp(x, m.drop_path2(m.norm2(m.mlp(x))))

    edits.forward(m, forward)


def _parallel_things_block(edits: Edits, m: Any) -> None:
    _two_sums(edits, m)

    def attend(branch: Any, x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        z = branch.attn(branch.norm(x), attn_mask=attn_mask, is_causal=is_causal)
        return branch.drop_path(branch.ls(z))

    def forward(x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        x = m.canonical_sum_attention(x, *(attend(branch, x, attn_mask, is_causal) for branch in m.attns))
        return m.canonical_sum_mlp(x, *(branch(x) for branch in m.ffns))

    edits.forward(m, forward)


def _parallel_scaling_block(edits: Edits, m: Any) -> None:
    """Attention and MLP side by side, with one layer before and one or two behind both."""
    bias = m.in_proj.bias
    hidden, width = m.in_split[0], m.in_split[1]
    if m.mlp_bias is not None:
        bias = torch.cat([m.mlp_bias.detach(), m.mlp_bias.new_zeros(3 * width)])
    edits.weight_slices(m, m.in_proj.weight, bias, mlp=hidden, query=width, key=width, value=width)
    edits.part(m, "attention", AttentionProduct(edits.reading, m.scale))
    edits.part(m, "sum_branches", ContributionSum())
    edits.part(m, "sum", ContributionSum())

    def forward(x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        _check_mask(is_causal)
        y = m.in_norm(x)
        source = m.canonical_attention.source(y)
        q = m.q_norm(split_heads(m.canonical_query(source), m.num_heads))
        k = m.k_norm(split_heads(m.canonical_key(source), m.num_heads))
        v = split_heads(m.canonical_value(y), m.num_heads)
        attended = merge_heads(m.canonical_attention(q, k, v, additive(attn_mask, x)))
        hidden = m.mlp_drop(m.mlp_act(m.canonical_mlp(y)))
        if m.out_proj is not None:
            z = m.out_proj(torch.cat((attended, hidden), dim=-1))
        else:
            z = m.canonical_sum_branches(m.attn_out_proj(attended), m.mlp_out_proj(hidden))
        return m.canonical_sum(x, m.drop_path(m.ls(z)))

    edits.forward(m, forward)


# ---------------------------------------------------------------------- MLPs with a gate


def _glu_mlp(edits: Edits, m: Any) -> None:
    edits.part(m, "gate", GateProduct(edits.reading))

    def forward(x: Tensor) -> Tensor:
        first, second = m.fc1(x).chunk(2, dim=m.chunk_dim)
        signal, gate = (first, m.act(second)) if m.gate_last else (second, m.act(first))
        return m.drop2(m.fc2(m.norm(m.drop1(m.canonical_gate(signal, gate)))))

    edits.forward(m, forward)


def _swiglu(edits: Edits, m: Any) -> None:
    edits.part(m, "gate", GateProduct(edits.reading))

    def forward(x: Tensor) -> Tensor:
        z = m.canonical_gate(m.fc1_x(x), m.act(m.fc1_g(x)))
        return m.drop2(m.fc2(m.norm(m.drop1(z))))

    edits.forward(m, forward)


# ---------------------------------------------------------------------- the network


def _network(edits: Edits, m: Any) -> None:
    if type(m).__name__ not in _NETWORKS:
        raise ValueError(
            f"{type(m).__name__} changes timm's VisionTransformer in ways that TransformerCanonizer does not "
            f"know; supported are {' and '.join(_NETWORKS)} themselves"
        )
    is_distilled = type(m).__name__ == "VisionTransformerDistilled"
    tokens = ("cls_token", "dist_token") if is_distilled else ("cls_token", "reg_token")
    edits.part(m, "prefix", PrefixTokens())
    edits.part(m, "position", PositionSum())
    edits.attribute(m, "_pos_embed", _embed_positions(m, tokens))
    edits.attribute(m, "grad_checkpointing", False)  # its second forward pass would run outside of the rules
    if is_distilled:
        edits.part(m, "mean", TokenPool("avg"))
        edits.attribute(m, "forward_head", _distilled_head(m))
    elif m.attn_pool is None and m.global_pool in ("avg", "max", "avgmax"):
        edits.part(m, "pool", TokenPool(m.global_pool))
        edits.attribute(m, "pool", _pool(m))


def _embed_positions(m: Any, tokens: tuple[str, ...]) -> Any:
    def prefix(x: Tensor) -> Tensor:
        found = [token for name in tokens if (token := getattr(m, name)) is not None]
        return m.canonical_prefix(x, *found) if found else x

    def embed(x: Tensor) -> Tensor:
        position = m.pos_embed
        if m.dynamic_img_size and position is not None:
            from timm.layers import resample_abs_pos_embed

            position = resample_abs_pos_embed(
                position,
                new_size=tuple(x.shape[1:3]),
                old_size=m.patch_embed.grid_size,
                num_prefix_tokens=0 if m.no_embed_class else m.num_prefix_tokens,
            )
        x = x.flatten(1, -2)
        if position is None:
            return prefix(x)
        if m.no_embed_class:
            x = prefix(m.canonical_position(x, position))
        else:
            x = m.canonical_position(prefix(x), position)
        return m.pos_drop(x)

    return embed


def _pool(m: Any) -> Any:
    def pool(x: Tensor, pool_type: str | None = None) -> Tensor:
        if pool_type not in (None, m.global_pool):
            raise ValueError(f"this VisionTransformer pools by {m.global_pool!r}, not by {pool_type!r}")
        return m.canonical_pool(x if m.pool_include_prefix else x[:, m.num_prefix_tokens :])

    return pool


def _distilled_head(m: Any) -> Any:
    def forward_head(x: Tensor, pre_logits: bool = False) -> Tensor:
        first, second = m.head_drop(x[:, 0]), m.head_drop(x[:, 1])
        if not pre_logits:
            first, second = m.head(first), m.head_dist(second)
        return m.canonical_mean(torch.stack((first, second), dim=1))

    return forward_head


FAMILY = Family(
    name="timm's VisionTransformer (ViT, DeiT, DINOv2, the image towers of CLIP and SigLIP)",
    library="timm",
    is_network=lambda module: inherits(module, "timm.models.vision_transformer", "VisionTransformer"),
    forms={
        **dict.fromkeys(_NETWORKS, _network),
        "Block": _block,
        "ResPostBlock": _res_post_block,
        "ParallelThingsBlock": _parallel_things_block,
        "ParallelScalingBlock": _parallel_scaling_block,
        "Attention": _attention,
        "AttentionPoolLatent": _attention_pool,
        "GluMlp": _glu_mlp,
        "SwiGLU": _swiglu,
    },
    as_they_are=frozenset({"PatchEmbed", "Mlp", "PatchDropout"}),
)
