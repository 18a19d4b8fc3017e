"""LRP on Swin transformers of torchvision and timm, written out as in `literal`, one window at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .literal import Back, attention, heads, linear, mlp, norm, over, residual, unheads
from .literal_views import mlp as two_layers


def relative_bias(m: Any, window: tuple[int, int]) -> Tensor:
    """What is added to the logits (heads, T, T) between two places of a window."""
    if hasattr(m, "cpb_mlp"):  # of torchvision's version 2: a function of the offsets, constant here
        result: Tensor = m.get_relative_position_bias()[0]
        return result
    places = [(i, j) for i in range(window[0]) for j in range(window[1])]
    rows = [
        [(a - c + window[0] - 1) * (2 * window[1] - 1) + b - d + window[1] - 1 for c, d in places]
        for a, b in places
    ]
    return m.relative_position_bias_table[torch.tensor(rows)].permute(2, 0, 1)


def in_window(m: Any, x: Tensor, bias: Tensor, reading: str, gamma: float) -> tuple[Tensor, Back]:
    """Attention among the tokens (N, T, D) of one window."""
    weights, biases = m.qkv.weight.chunk(3), list(m.qkv.bias.chunk(3))
    is_cosine = hasattr(m, "logit_scale")
    if is_cosine:
        biases[1] = torch.zeros_like(biases[1])
    (q, q_back), (k, k_back), (v, v_back) = (
        linear(x, w, b, gamma) for w, b in zip(weights, biases, strict=True)
    )
    q, k = heads(q, m.num_heads), heads(k, m.num_heads)
    scale = None
    if is_cosine:  # lengths are constants, so that relevance passes
        q = over(q, q.norm(dim=-1, keepdim=True)) * m.logit_scale.clamp(max=math.log(100)).exp()
        k, scale = over(k, k.norm(dim=-1, keepdim=True)), 1.0  # keys of padding are zero
    o, attend = attention(q, k, heads(v, m.num_heads), reading, False, bias, scale)
    z, project = linear(unheads(o), m.proj.weight, m.proj.bias, gamma)

    def back(relevance: Tensor) -> Tensor:
        to_q, to_k, to_v = attend(heads(project(relevance), m.num_heads))
        result: Tensor = q_back(unheads(to_q)) + k_back(unheads(to_k)) + v_back(unheads(to_v))
        return result

    return z, back


def windows(
    m: Any, x: Tensor, window: tuple[int, int], shift: tuple[int, int], reading: str, gamma: float
) -> tuple[Tensor, Back]:
    """Tokens (N, H, W, D), padded with zeros to whole windows, which wrap around the borders if shifted."""
    n, height, width, d = x.shape
    sizes = [math.ceil(s / w) * w for s, w in zip((height, width), window, strict=True)]
    shift = tuple(0 if w >= s else by for w, s, by in zip(window, sizes, shift, strict=True))  # type: ignore[assignment]
    learned = relative_bias(m, window)
    padded = torch.zeros(n, *sizes, d, dtype=x.dtype)
    padded[:, :height, :width] = x
    result, backs = torch.zeros_like(padded), []

    def region(place: int, axis: int) -> int:
        """Which side of a border a place of the shifted picture is from."""
        size, w, by = sizes[axis], window[axis], shift[axis]
        return 0 if by == 0 or place < size - w else 1 if place < size - by else 2

    for top in range(0, sizes[0], window[0]):
        for left in range(0, sizes[1], window[1]):
            places = [(top + i, left + j) for i in range(window[0]) for j in range(window[1])]
            rows = torch.tensor([(i + shift[0]) % sizes[0] for i, _ in places])
            columns = torch.tensor([(j + shift[1]) % sizes[1] for _, j in places])
            regions = [(region(i, 0), region(j, 1)) for i, j in places]
            apart = torch.tensor([[-100.0 if a != b else 0.0 for b in regions] for a in regions])
            z, of_window = in_window(m, padded[:, rows, columns], learned + apart, reading, gamma)
            result[:, rows, columns] = z
            backs.append((rows, columns, of_window))

    def back(relevance: Tensor) -> Tensor:
        arriving, below = torch.zeros_like(padded), torch.zeros_like(padded)
        arriving[:, :height, :width] = relevance
        for rows, columns, of_window in backs:
            below[:, rows, columns] = of_window(arriving[:, rows, columns])
        return below[:, :height, :width]

    return result[:, :height, :width], back


def block(m: Any, x: Tensor, reading: str, gamma: float) -> tuple[Tensor, Back]:
    """Attention and MLP; in version 2 the norm is the last of a branch."""
    holder = m if hasattr(m, "window_size") else m.attn
    window, shift = holder.window_size, holder.shift_size
    feed_forward = m.mlp if hasattr(m.mlp, "fc1") else two_layers(m.mlp[0], m.mlp[1], m.mlp[3])
    is_second = type(m).__name__.endswith("V2")

    def branch(x: Tensor, layer: Any, run: Any) -> tuple[Tensor, Back]:
        if is_second:
            z, inner = run(x)
            z, outer = norm(layer, z)
        else:
            y, inner = norm(layer, x)
            z, outer = run(y)
        return z, (lambda r: inner(outer(r)))

    z, attend = branch(x, m.norm1, lambda y: windows(m.attn, y, tuple(window), tuple(shift), reading, gamma))
    x, first = residual(x, z, None, attend)
    z, feed = branch(x, m.norm2, lambda y: mlp(feed_forward, y, reading, gamma))
    x, second = residual(x, z, None, feed)
    return x, lambda r: first(second(r))


def merge(m: Any, x: Tensor, gamma: float) -> tuple[Tensor, Back]:
    """Four neighbours become one token."""
    n, height, width, d = x.shape
    padded = torch.zeros(n, height + height % 2, width + width % 2, d, dtype=x.dtype)
    padded[:, :height, :width] = x
    corners = [(0, 0), (1, 0), (0, 1), (1, 1)]
    y = torch.cat([padded[:, i::2, j::2] for i, j in corners], -1)
    if type(m).__name__.endswith("V2"):
        z, inner = linear(y, m.reduction.weight, None, gamma)
        z, outer = norm(m.norm, z)
    else:
        y, inner = norm(m.norm, y)
        z, outer = linear(y, m.reduction.weight, None, gamma)

    def back(relevance: Tensor) -> Tensor:
        below = torch.zeros_like(padded)
        for (i, j), part in zip(corners, inner(outer(relevance)).chunk(4, -1), strict=True):
            below[:, i::2, j::2] = part
        return below[:, :height, :width]

    return z, back


def parts(m: Any) -> tuple[Any, Any, list[Any], Any]:
    """Patch embedding, its norm, blocks and mergings in order, and the last layer."""
    if hasattr(m, "features"):
        return m.features[0][0], m.features[0][2], list(_flat(m.features[1:])), m.head
    steps = [step for stage in m.layers for step in (stage.downsample, *stage.blocks)]
    steps = [step for step in steps if type(step).__name__ != "Identity"]
    return m.patch_embed.proj, m.patch_embed.norm, steps, m.head.fc


def _flat(stages: Any) -> Any:
    for stage in stages:
        if hasattr(stage, "reduction"):
            yield stage
        else:
            yield from stage


def explain(m: Any, x: Tensor, target: int, reading: str, gamma: float) -> dict[str, Tensor]:
    """Logits, relevance of pixels, and of the tokens behind the first block."""
    conv, conv_norm, steps, last = parts(m)
    size = conv.kernel_size[0]
    n, _, height, width = x.shape
    h, w = height // size, width // size
    patches = x.reshape(n, 3, h, size, w, size).permute(0, 2, 4, 1, 3, 5).reshape(n, h, w, -1)
    z, embed = linear(patches, conv.weight.flatten(1), conv.bias, gamma)
    z, embed_norm = norm(conv_norm, z)
    backs = []
    for step in steps:
        z, back = merge(step, z, gamma) if hasattr(step, "reduction") else block(step, z, reading, gamma)
        backs.append(back)
    z, norm_back = norm(m.norm, z)
    total = z.sum((1, 2))
    logits, head = linear(total / (z.shape[1] * z.shape[2]), last.weight, last.bias, gamma)
    start = torch.zeros_like(logits)
    start[:, target] = logits[:, target]
    relevance = norm_back(z * over(head(start), total)[:, None, None])
    for back in reversed(backs[1:]):
        relevance = back(relevance)
    behind_first = relevance
    pixels = embed(embed_norm(backs[0](relevance))).reshape(n, h, w, 3, size, size).permute(0, 3, 1, 4, 2, 5)
    return {"logits": logits, "first block": behind_first, "pixels": pixels.reshape(x.shape)}
