"""The image tower of open_clip's CLIP and CoCa models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .canonizer import Family, inherits
from .parts import Edits, Pool, multihead_attention, positions, sums


def _block(edits: Edits, m: Any) -> None:
    if hasattr(m, "ln_1_kv"):
        raise ValueError(
            "a ResidualAttentionBlock with is_cross_attention=True is part of a decoder: cross-attention "
            "and causal decoders are not supported, use Integrated Gradients or another method without "
            "rules there"
        )
    edits.attribute(m, "attention", lambda q_x, attn_mask=None, **_: m.attn.forward(q_x, q_x, attn_mask))
    sums(edits, m)


def _attentional_pooler(edits: Edits, m: Any) -> None:
    """Learned queries, which take no relevance, gather from the tokens."""

    def forward(x: Tensor) -> Tensor:
        query = m.ln_q(m.query.detach()).detach()
        result: Tensor = m.attn.forward(query.expand(len(x), -1, -1), m.ln_k(x))
        return result

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
    positions(edits, m, "_embeds")
    edits.operations(m, "_global_pool", mean=edits.part(m, "pool", Pool(torch.mean)))
    if m.proj is not None:
        edits.linear(m, "proj", m.proj.T, None)
        edits.operations(m, matmul=lambda x, _: m.canonical_proj(x))


FAMILY = Family(
    name="open_clip's VisionTransformer (the image tower, model.visual)",
    library="open_clip",
    is_network=inherits("open_clip.transformer", "VisionTransformer"),
    forms={
        "VisionTransformer": _network,
        "Transformer": _blocks,
        "ResidualAttentionBlock": _block,
        "AttentionalPooler": _attentional_pooler,
        "MultiheadAttention": multihead_attention,
    },
    unchanged=("PatchDropout",),
)
