"""What attention of several libraries has in common: heads, masks, and torch's `MultiheadAttention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .transformer_family import Edits
from .transformer_parts import AttentionProduct


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """(N, T, D) to (N, heads, T, D / heads)."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(N, heads, T, d) to (N, T, heads · d)."""
    return x.transpose(1, 2).flatten(2)


def additive(mask: Tensor | None, x: Tensor, true_is_seen: bool = True) -> Tensor | None:
    """A mask as it is added to the logits of attention.

    In a boolean mask, true says that a token is seen, or that it is not seen (`nn.MultiheadAttention`).
    """
    if mask is None or mask.is_floating_point():
        return mask
    hidden = ~mask if true_is_seen else mask
    return x.new_zeros(mask.shape).masked_fill_(hidden, float("-inf"))


def multihead_attention(edits: Edits, m: Any) -> None:
    """`nn.MultiheadAttention`, to be called by `attend`."""
    if not m.batch_first or m.bias_k is not None or m.bias_v is not None or m.add_zero_attn:
        raise ValueError(
            "torch's MultiheadAttention has a canonical form here with batch_first=True, and without "
            "add_bias_kv and add_zero_attn; create it so"
        )
    sizes = dict.fromkeys(("query", "key", "value"), m.embed_dim)
    if m.in_proj_weight is not None:
        edits.weight_slices(m, m.in_proj_weight, m.in_proj_bias, **sizes)
    else:  # keys and values of another width
        for i, (name, size) in enumerate(sizes.items()):
            bias = None if m.in_proj_bias is None else m.in_proj_bias[i * size : (i + 1) * size]
            edits.weight_slices(m, getattr(m, f"{name[0]}_proj_weight"), bias, **{name: size})
    edits.part(m, "attention", AttentionProduct(edits.reading, m.head_dim**-0.5))

    def forward(query: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        source = m.canonical_attention.source
        q = split_heads(m.canonical_query(source(query)), m.num_heads)
        k = split_heads(m.canonical_key(source(context)), m.num_heads)
        v = split_heads(m.canonical_value(context), m.num_heads)
        bias = additive(mask, q, true_is_seen=False)
        if bias is not None and bias.ndim == 3:  # (N · heads, T, S)
            bias = bias.unflatten(0, (-1, m.num_heads))
        return m.out_proj(merge_heads(m.canonical_attention(q, k, v, bias)))

    edits.forward(m, forward)


def attend(m: Any, query: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
    """Queries from (N, T, D), keys and values from (N, S, E), by a `MultiheadAttention` in canonical form.

    Its `forward` is called by itself: Zennit's composites count the module among the activations, and their
    rule fails on several inputs.
    """
    result: Tensor = m.forward(query, context, mask)
    return result


def window_bias(relative: Tensor, mask: Tensor | None, n_windows: int) -> Tensor:
    """Relative positions (1, heads, T, T) and the mask (w, T, T) of shifted windows, for all windows.

    The windows of one example come after one another, w of them.
    """
    if mask is None:
        return relative
    return relative + mask.unsqueeze(1).repeat(n_windows // len(mask), 1, 1, 1)
