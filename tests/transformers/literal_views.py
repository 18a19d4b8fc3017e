"""The weights of vision transformers of other libraries, under the names that `literal.explain` reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def joined(*layers: Any) -> SimpleNamespace:
    """Linear layers one above another."""
    biases = [layer.bias for layer in layers]
    return SimpleNamespace(
        weight=torch.cat([layer.weight for layer in layers]),
        bias=None if None in biases else torch.cat(biases),
    )


def attention(qkv: Any, proj: Any, n_heads: int) -> SimpleNamespace:
    """Attention without norms of queries and keys."""
    return SimpleNamespace(qkv=qkv, proj=proj, num_heads=n_heads, q_norm=None, k_norm=None)


def multihead(m: Any) -> SimpleNamespace:
    """`nn.MultiheadAttention`."""
    return attention(SimpleNamespace(weight=m.in_proj_weight, bias=m.in_proj_bias), m.out_proj, m.num_heads)


def mlp(fc1: Any, act: Any, fc2: Any) -> SimpleNamespace:
    """Two layers and an activation."""
    return SimpleNamespace(fc1=fc1, act=act, fc2=fc2)


def vision(patches: Any, blocks: list[Any], **parts: Any) -> SimpleNamespace:
    """A ViT with a class token; `patches` is the convolution."""
    side = 16 // patches.kernel_size[0]
    embed = SimpleNamespace(patch_size=patches.kernel_size, grid_size=(side, side), proj=patches)
    defaults = {
        "reg_token": None,
        "num_prefix_tokens": 1,
        "no_embed_class": False,
        "norm_pre": None,
        "fc_norm": None,
        "attn_pool": None,
        "global_pool": "token",
    }
    return SimpleNamespace(patch_embed=embed, blocks=blocks, **(defaults | parts))


def torchvision_vit(m: Any) -> SimpleNamespace:
    """torchvision's `VisionTransformer`."""
    blocks = [
        SimpleNamespace(
            norm1=b.ln_1,
            attn=multihead(b.self_attention),
            ls1=None,
            norm2=b.ln_2,
            mlp=mlp(b.mlp[0], b.mlp[1], b.mlp[3]),
            ls2=None,
        )
        for b in m.encoder.layers
    ]
    return vision(
        m.conv_proj,
        blocks,
        cls_token=m.class_token,
        pos_embed=m.encoder.pos_embedding,
        norm=m.encoder.ln,
        head=m.heads.head,
    )


def huggingface_vit(m: Any) -> SimpleNamespace:
    """`ViTForImageClassification` in a `TransformersModel`."""
    vit = m.model.vit
    blocks = [
        SimpleNamespace(
            norm1=b.layernorm_before,
            attn=attention(
                joined(b.attention.q_proj, b.attention.k_proj, b.attention.v_proj),
                b.attention.o_proj,
                b.attention.num_attention_heads,
            ),
            ls1=None,
            norm2=b.layernorm_after,
            mlp=mlp(b.mlp.fc1, b.mlp.activation_fn, b.mlp.fc2),
            ls2=None,
        )
        for b in vit.layers
    ]
    return vision(
        vit.embeddings.patch_embeddings.projection,
        blocks,
        cls_token=vit.embeddings.cls_token,
        pos_embed=vit.embeddings.position_embeddings,
        norm=vit.layernorm,
        head=m.model.classifier,
    )


def openclip_tower(m: Any) -> SimpleNamespace:
    """open_clip's `VisionTransformer` with a class token or average pooling."""
    blocks = [
        SimpleNamespace(
            norm1=b.ln_1,
            attn=multihead(b.attn),
            ls1=b.ls_1,
            norm2=b.ln_2,
            mlp=mlp(b.mlp.c_fc, b.mlp.gelu, b.mlp.c_proj),
            ls2=b.ls_2,
        )
        for b in m.transformer.resblocks
    ]
    return vision(
        m.conv1,
        blocks,
        cls_token=m.class_embedding.view(1, 1, -1),
        pos_embed=m.positional_embedding[None],
        norm_pre=m.ln_pre,
        norm=None if m.final_ln_after_pool else m.ln_post,
        fc_norm=m.ln_post if m.final_ln_after_pool else None,
        global_pool={"tok": "token", "avg": "avg"}[m.pool_type],
        head=SimpleNamespace(weight=m.proj.T, bias=None),
    )
