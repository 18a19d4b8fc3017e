"""torchvision's SwinTransformer, of both versions."""

from __future__ import annotations

import math
from typing import Any

import torch
from drsa_core.lrp import passing
from torch import Tensor
from torch.nn import functional as F

from .transformer_attention import merge_heads, split_heads, window_bias
from .transformer_family import Edits, Family, inherits, unused
from .transformer_parts import AttentionProduct, ContributionSum, TokenPool


def _sums(edits: Edits, m: Any) -> None:
    edits.part(m, "sum_attention", ContributionSum())
    edits.part(m, "sum_mlp", ContributionSum())


def _block(edits: Edits, m: Any) -> None:
    _sums(edits, m)

    def forward(x: Tensor) -> Tensor:
        x = m.canonical_sum_attention(x, m.stochastic_depth(m.attn(m.norm1(x))))
        return m.canonical_sum_mlp(x, m.stochastic_depth(m.mlp(m.norm2(x))))

    edits.forward(m, forward)


def _block_v2(edits: Edits, m: Any) -> None:
    _sums(edits, m)

    def forward(x: Tensor) -> Tensor:
        x = m.canonical_sum_attention(x, m.stochastic_depth(m.norm1(m.attn(x))))
        return m.canonical_sum_mlp(x, m.stochastic_depth(m.norm2(m.mlp(x))))

    edits.forward(m, forward)


def _attention(edits: Edits, m: Any) -> None:
    width = m.qkv.out_features // 3
    edits.linear_slices(m, m.qkv, query=width, key=width, value=width)
    edits.part(m, "attention", AttentionProduct(edits.reading, (width // m.num_heads) ** -0.5))
    edits.forward(m, lambda x: _attend(m, x))


def _attention_v2(edits: Edits, m: Any) -> None:
    """Cosine attention: queries and keys are normed, with their lengths held constant; keys have no bias."""
    width = m.qkv.out_features // 3
    bias = None
    if m.qkv.bias is not None:
        bias = m.qkv.bias.detach().clone()
        bias[width : 2 * width] = 0
    edits.weight_slices(m, m.qkv.weight, bias, query=width, key=width, value=width)
    edits.part(m, "attention", AttentionProduct(edits.reading, 1.0))
    factor = m.logit_scale.detach().clamp(max=math.log(100.0)).exp()

    def unit(z: Tensor) -> Tensor:
        return passing(z, lambda value: F.normalize(value, dim=-1))

    def forward(x: Tensor) -> Tensor:
        return _attend(m, x, lambda q: passing(unit(q), lambda value: value * factor), unit)

    edits.forward(m, forward)


def _same(x: Tensor) -> Tensor:
    return x


def _attend(m: Any, x: Tensor, of_query: Any = _same, of_key: Any = _same) -> Tensor:
    """Attention in windows, shifted or not, of tokens (N, H, W, D)."""
    n, height, width, _ = x.shape
    window = m.window_size
    x = F.pad(x, (0, 0, 0, -width % window[1], 0, -height % window[0]))
    size = x.shape[1:3]
    # Where one window covers everything there is nothing to shift.
    shift = [0 if w >= s else by for w, s, by in zip(window, size, m.shift_size, strict=True)]
    x = torch.roll(x, (-shift[0], -shift[1]), (1, 2))
    rows, columns = size[0] // window[0], size[1] // window[1]
    tokens = x.unflatten(2, (columns, window[1])).unflatten(1, (rows, window[0])).transpose(2, 3)
    tokens = tokens.flatten(3, 4).flatten(0, 2)
    source = m.canonical_attention.source(tokens)
    q = of_query(split_heads(m.canonical_query(source), m.num_heads))
    k = of_key(split_heads(m.canonical_key(source), m.num_heads))
    v = split_heads(m.canonical_value(tokens), m.num_heads)
    relative = m.get_relative_position_bias().detach()
    bias = window_bias(relative, _shift_mask(x, window, shift), len(tokens))
    z = m.proj(merge_heads(m.canonical_attention(q, k, v, bias)))
    z = z.unflatten(0, (n, rows, columns)).unflatten(3, (window[0], window[1])).transpose(2, 3)
    z = z.flatten(3, 4).flatten(1, 2)
    return torch.roll(z, (shift[0], shift[1]), (1, 2))[:, :height, :width].contiguous()


def _shift_mask(x: Tensor, window: list[int], shift: list[int]) -> Tensor | None:
    """−100 between tokens (w, T, T) that the shift has brought into one window from opposite borders."""
    if not any(shift):
        return None
    height, width = x.shape[1:3]
    regions = x.new_zeros(height, width)
    borders = [[slice(0, -w), slice(-w, -by), slice(-by, None)] for w, by in zip(window, shift, strict=True)]
    for i, across in enumerate(borders[0]):
        for j, along in enumerate(borders[1]):
            regions[across, along] = 3 * i + j
    regions = regions.unflatten(1, (-1, window[1])).unflatten(0, (-1, window[0])).transpose(1, 2)
    regions = regions.flatten(2).flatten(0, 1)
    differ = regions.unsqueeze(1) != regions.unsqueeze(2)
    return x.new_zeros(differ.shape).masked_fill_(differ, -100.0)


def _network(edits: Edits, m: Any) -> None:
    edits.part(m, "pool", TokenPool("avg"))
    edits.forward(m, lambda x: m.head(m.canonical_pool(m.norm(m.features(x)).flatten(1, 2))))


FAMILY = Family(
    name="torchvision's SwinTransformer (v1 and v2)",
    library="torchvision",
    is_network=lambda module: inherits(module, "torchvision.models.swin_transformer", "SwinTransformer"),
    forms={
        "SwinTransformer": _network,
        "SwinTransformerBlock": _block,
        "SwinTransformerBlockV2": _block_v2,
        "ShiftedWindowAttention": _attention,
        "ShiftedWindowAttentionV2": _attention_v2,
        "StochasticDepth": lambda edits, m: edits.pass_relevance(m),
        "AdaptiveAvgPool2d": unused,
        "Flatten": unused,
    },
    as_they_are=frozenset({"PatchMerging", "PatchMergingV2", "Permute"}),
)
