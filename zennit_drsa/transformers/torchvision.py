"""torchvision's VisionTransformer, and its SwinTransformer of both versions."""

from __future__ import annotations

import math
from typing import Any

import torch
from drsa_core.lrp import passing
from torch import Tensor
from torch.nn import functional as F

from .canonizer import Family, inherits
from .parts import (
    AttentionProduct,
    Edits,
    Pool,
    add,
    multihead_attention,
    pass_relevance,
    positions,
    split_heads,
    sums,
    unused,
)


def _block(edits: Edits, m: Any) -> None:
    def forward(input: Tensor) -> Tensor:
        x = m.ln_1(input)
        x = add(input, m.dropout(m.self_attention.forward(x, x)))
        return add(x, m.mlp(m.ln_2(x)))

    edits.forward(m, forward)


VIT = Family(
    name="torchvision's VisionTransformer",
    library="torchvision",
    is_network=inherits("torchvision.models.vision_transformer", "VisionTransformer"),
    forms={
        "VisionTransformer": positions,
        "Encoder": positions,
        "EncoderBlock": _block,
        "MultiheadAttention": multihead_attention,
    },
)


def _attention(edits: Edits, m: Any) -> None:
    edits.part(m, "attention", AttentionProduct(edits.reading))
    edits.forward(m, lambda x: _attend(m, x, lambda q, k: (q, k), None))


def _attention_v2(edits: Edits, m: Any) -> None:
    """Cosine attention: queries and keys are normed, with their lengths held constant; keys have no bias."""
    if m.qkv.bias is not None:
        query, _, value = m.qkv.bias.detach().chunk(3)
        edits.parameter(m.qkv, "bias", torch.cat((query, torch.zeros_like(query), value)))
    edits.part(m, "attention", AttentionProduct(edits.reading))
    factor = m.logit_scale.detach().clamp(max=math.log(100.0)).exp()

    def normed(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q = passing(q, lambda value: F.normalize(value, dim=-1) * factor)
        return q, passing(k, lambda value: F.normalize(value, dim=-1))

    edits.forward(m, lambda x: _attend(m, x, normed, 1.0))


def _attend(m: Any, x: Tensor, normed: Any, scale: float | None) -> Tensor:
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
    q, k, v = (split_heads(part, m.num_heads) for part in m.qkv(tokens).chunk(3, dim=-1))
    bias = m.get_relative_position_bias().detach()
    if any(shift):
        # The windows of one example come after one another.
        bias = bias + _shift_mask(x, window, shift).unsqueeze(1).repeat(n, 1, 1, 1)
    z = m.canonical_attention(*normed(q, k), v, bias, scale=scale)
    z = m.proj(z.transpose(1, 2).flatten(2))
    z = z.unflatten(0, (n, rows, columns)).unflatten(3, (window[0], window[1])).transpose(2, 3)
    z = z.flatten(3, 4).flatten(1, 2)
    return torch.roll(z, (shift[0], shift[1]), (1, 2))[:, :height, :width].contiguous()


def _shift_mask(x: Tensor, window: list[int], shift: list[int]) -> Tensor:
    """−100 between tokens (w, T, T) that the shift has brought into one window from opposite borders."""
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
    edits.part(m, "pool", Pool(torch.mean))
    edits.forward(m, lambda x: m.head(m.canonical_pool(m.norm(m.features(x)), dim=(1, 2))))


SWIN = Family(
    name="torchvision's SwinTransformer (v1 and v2)",
    library="torchvision",
    is_network=inherits("torchvision.models.swin_transformer", "SwinTransformer"),
    forms={
        "SwinTransformer": _network,
        "SwinTransformerBlock": sums,
        "SwinTransformerBlockV2": sums,
        "ShiftedWindowAttention": _attention,
        "ShiftedWindowAttentionV2": _attention_v2,
        "StochasticDepth": pass_relevance,
        "AdaptiveAvgPool2d": unused,
        "Flatten": unused,
    },
    unchanged=("PatchMerging", "PatchMergingV2", "Permute"),
)
