"""LRP on vision transformers as timm builds them, written out: slow, without autograd and without hooks.

Every function returns its value and a function from the relevance of that value to those of its inputs.
Contributions u_jk = a_j w_jk are built as tensors, whatever their size. What position embeddings and prefix
tokens keep is counted on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Back = Callable[[Tensor], Any]


def over(numerator: Tensor, denominator: Tensor) -> Tensor:
    """n / d, and 0 where d is 0."""
    return torch.where(denominator == 0, 0.0, numerator / denominator)


def linear(a: Tensor, weight: Tensor, bias: Tensor | None, gamma: float) -> tuple[Tensor, Back]:
    """The generalised rule of Note K, R_j = Σ_k (u_jk + γ u_jk^s) / d_k · R_k, with b as a neuron."""
    u = a[..., :, None] * weight.T
    b = torch.zeros(len(weight), dtype=a.dtype) if bias is None else bias
    z = u.sum(-2) + b

    def of_sign(v: Tensor, sign: Tensor) -> Tensor:
        return torch.where(sign, v.clamp(min=0), v.clamp(max=0))

    def back(relevance: Tensor) -> Tensor:
        numerators = u + gamma * of_sign(u, (z >= 0)[..., None, :])
        d = numerators.sum(-2) + b + gamma * of_sign(b.expand_as(z), z >= 0)
        return (numerators * over(relevance, d)[..., None, :]).sum(-1)

    return z, back


def module(layer: Any, a: Tensor, gamma: float) -> tuple[Tensor, Back]:
    """A linear layer, or the identity."""
    if not hasattr(layer, "weight"):
        return a, lambda relevance: relevance
    return linear(a, layer.weight, layer.bias, gamma)


def pixel_box(x: Tensor, weight: Tensor, bias: Tensor | None, low: float, high: float) -> tuple[Tensor, Back]:
    """z^B (Note A): (x_p w_pj − l w⁺_pj − h w⁻_pj) / d_j · R_j; the denominator has no bias."""
    u = x[..., :, None] * weight.T - low * weight.T.clamp(min=0) - high * weight.T.clamp(max=0)
    z = x @ weight.T + (0 if bias is None else bias)
    return z, lambda relevance: (u * over(relevance, u.sum(-2))[..., None, :]).sum(-1)


def norm(layer: Any, x: Tensor) -> tuple[Tensor, Back]:
    """y = M x + b, where M holds the deviation as a constant. The identity if there is no norm."""
    if not hasattr(layer, "eps"):
        return x, lambda relevance: relevance
    n, is_rms = x.shape[-1], "rms" in type(layer).__name__.lower()
    centre = torch.eye(n, dtype=x.dtype)
    if not is_rms:
        centre = centre - torch.ones(n, n, dtype=x.dtype) / n
    centred = x @ centre.T
    deviation = (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt()
    matrix = layer.weight[:, None] * centre / deviation[..., None]
    y = (matrix @ x[..., None])[..., 0] + (0 if is_rms else layer.bias)
    contributions = matrix * x[..., None, :]
    return y, lambda relevance: (contributions * over(relevance, y)[..., None]).sum(-2)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reading: str,
    q_is_learned: bool,
    bias: Tensor | float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Back]:
    """One head at a time, o_ij = Σ_t A_it v_tj; relevance of q, k and v; a bias takes none."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * torch.einsum("...id,...td->...it", q, k) + bias
    weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
    o = torch.einsum("...it,...tj->...ij", weights, v)

    def back(relevance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = over(relevance, o)
        to_v = v * torch.einsum("...it,...ij->...tj", weights, c)
        if reading == "constant":
            return torch.zeros_like(q), torch.zeros_like(k), to_v
        of_weights = torch.einsum("...ij,...tj->...it", c, v) / 2
        mean = (weights * of_weights).sum(-1, keepdim=True)
        of_logits = scale * weights * (of_weights - mean)
        share = 1.0 if q_is_learned else 0.5
        to_k = share * k * torch.einsum("...it,...id->...td", of_logits, q)
        to_q = (1 - share) * q * torch.einsum("...it,...td->...id", of_logits, k)
        return to_q, to_k, to_v / 2

    return o, back


def heads(x: Tensor, n: int) -> Tensor:
    """(N, T, D) to (N, n, T, D / n)."""
    return x.reshape(*x.shape[:2], n, -1).transpose(1, 2)


def unheads(x: Tensor) -> Tensor:
    """(N, n, T, d) to (N, T, n · d)."""
    return x.transpose(1, 2).reshape(len(x), x.shape[2], -1)


def self_attention(
    m: Any, x: Tensor, reading: str, gamma: float, bias: Tensor | float = 0.0
) -> tuple[Tensor, Back]:
    """timm's `Attention`; q, k and v are rows of one weight."""
    rows = m.qkv.weight.chunk(3)
    biases = (None,) * 3 if m.qkv.bias is None else m.qkv.bias.chunk(3)
    (q0, q_back), (k0, k_back), (v0, v_back) = (
        linear(x, w, b, gamma) for w, b in zip(rows, biases, strict=True)
    )
    q, q_norm = norm(m.q_norm, heads(q0, m.num_heads))
    k, k_norm = norm(m.k_norm, heads(k0, m.num_heads))
    o, attend = attention(q, k, heads(v0, m.num_heads), reading, False, bias)
    z, project = module(m.proj, unheads(o), gamma)

    def back(relevance: Tensor) -> Tensor:
        to_q, to_k, to_v = attend(heads(project(relevance), m.num_heads))
        result: Tensor = q_back(unheads(q_norm(to_q))) + k_back(unheads(k_norm(to_k))) + v_back(unheads(to_v))
        return result

    return z, back


def mlp(m: Any, x: Tensor, reading: str, gamma: float) -> tuple[Tensor, Back]:
    """Two layers and an activation that passes relevance; with a gate for `GluMlp`."""
    hidden, first = module(m.fc1, x, gamma)
    if m.fc2.weight.shape[1] == m.fc1.weight.shape[0]:
        z, second = module(m.fc2, m.act(hidden), gamma)
        return z, lambda relevance: first(second(relevance))
    gate, signal = hidden.chunk(2, -1)  # SwiGLUPacked: act(first half) ⊙ second half
    z, second = module(m.fc2, m.act(gate) * signal, gamma)
    share = 0.0 if reading == "constant" else 0.5

    def back(relevance: Tensor) -> Tensor:
        of_product = second(relevance)
        return first(torch.cat([share * of_product, (1 - share) * of_product], -1))

    return z, back


def residual(x: Tensor, z: Tensor, scale: Any, branch: Back) -> tuple[Tensor, Back]:
    """x + layer scale ⊙ z: each term has relevance by its contribution."""
    scaled = z * scale.gamma if hasattr(scale, "gamma") else z
    total = x + scaled
    return total, lambda r: x * over(r, total) + branch(scaled * over(r, total))


def block(m: Any, x: Tensor, reading: str, gamma: float) -> tuple[Tensor, Back]:
    """timm's `Block`."""
    y, norm1 = norm(m.norm1, x)
    z, attend = self_attention(m.attn, y, reading, gamma)
    x, first = residual(x, z, m.ls1, lambda r: norm1(attend(r)))
    y, norm2 = norm(m.norm2, x)
    z, feed = mlp(m.mlp, y, reading, gamma)
    x, second = residual(x, z, m.ls2, lambda r: norm2(feed(r)))
    return x, lambda r: first(second(r))


def attention_pool(m: Any, x: Tensor, reading: str, gamma: float) -> tuple[Tensor, Back]:
    """`AttentionPoolLatent` with one learned query."""
    q = heads((m.latent @ m.q.weight.T + m.q.bias).expand(len(x), -1, -1), m.num_heads)
    (k_rows, v_rows), (k_bias, v_bias) = m.kv.weight.chunk(2), m.kv.bias.chunk(2)
    (k, k_back), (v, v_back) = linear(x, k_rows, k_bias, gamma), linear(x, v_rows, v_bias, gamma)
    o, attend = attention(q, heads(k, m.num_heads), heads(v, m.num_heads), reading, True)
    z, project = module(m.proj, unheads(o), gamma)
    y, norm_back = norm(m.norm, z)
    fed, feed = mlp(m.mlp, y, reading, gamma)
    total, add = residual(z, fed, None, lambda r: norm_back(feed(r)))

    def back(relevance: Tensor) -> Tensor:
        _, to_k, to_v = attend(heads(project(add(relevance[:, None])), m.num_heads))
        result: Tensor = k_back(unheads(to_k)) + v_back(unheads(to_v))
        return result

    return total[:, 0], back


def pool(m: Any, x: Tensor, reading: str, gamma: float) -> tuple[Tensor, Back]:
    """Class token, mean over patches, or attention pooling."""
    n = m.num_prefix_tokens
    kept = torch.zeros_like(x)

    def at(index: slice | int, relevance: Tensor) -> Tensor:
        placed = kept.clone()
        placed[:, index] = relevance
        return placed

    if m.attn_pool is not None:
        pooled, back = attention_pool(m.attn_pool, x[:, n:], reading, gamma)
        return pooled, lambda r: at(slice(n, None), back(r))
    if m.global_pool == "token":
        return x[:, 0], lambda r: at(0, r)
    total = x[:, n:].sum(1)
    return total / (x.shape[1] - n), lambda r: at(slice(n, None), x[:, n:] * over(r, total)[:, None])


def explain(
    m: Any, x: Tensor, target: int, reading: str, gamma: float, box: tuple[float, float] | None = None
) -> dict[str, Tensor]:
    """Logits, relevance of pixels, of the tokens behind each block, and what positions and prefixes keep."""
    size, (h, w) = m.patch_embed.patch_size[0], m.patch_embed.grid_size
    patches = x.reshape(len(x), 3, h, size, w, size).permute(0, 2, 4, 1, 3, 5).reshape(len(x), h * w, -1)
    weight, bias = m.patch_embed.proj.weight.flatten(1), m.patch_embed.proj.bias
    if box is None:
        tokens, embed = linear(patches, weight, bias, gamma)
    else:
        tokens, embed = pixel_box(patches, weight, bias, *box)
    prefix = [t.expand(len(x), -1, -1) for t in (m.cls_token, m.reg_token) if t is not None]
    n = m.num_prefix_tokens
    before = tokens if m.no_embed_class else torch.cat([*prefix, tokens], 1)
    with_position = before + m.pos_embed
    z = torch.cat([*prefix, with_position], 1) if m.no_embed_class else with_position
    z, norm_pre = norm(m.norm_pre, z)
    backs = []
    for layer in m.blocks:
        z, back = block(layer, z, reading, gamma)
        backs.append(back)
    z, norm_back = norm(m.norm, z)
    z, pool_back = pool(m, z, reading, gamma)
    z, fc_norm = norm(m.fc_norm, z)
    logits, head = module(m.head, z, gamma)

    start = torch.zeros_like(logits)
    start[:, target] = logits[:, target]
    relevance = norm_back(pool_back(fc_norm(head(start))))
    found = {"logits": logits}
    for i in reversed(range(len(backs))):
        found[f"blocks.{i}"] = relevance
        relevance = backs[i](relevance)
    relevance = norm_pre(relevance)
    of_prefix = torch.zeros(len(x), dtype=x.dtype)
    if m.no_embed_class:
        of_prefix, relevance = relevance[:, :n].sum((1, 2)), relevance[:, n:]
    of_position = (m.pos_embed * over(relevance, with_position)).sum((1, 2))
    relevance = before * over(relevance, with_position)
    if not m.no_embed_class:
        of_prefix, relevance = relevance[:, :n].sum((1, 2)), relevance[:, n:]
    pixels = embed(relevance).reshape(len(x), h, w, 3, size, size).permute(0, 3, 1, 4, 2, 5)
    return {
        **found,
        "position embeddings": of_position,
        "prefix tokens": of_prefix,
        "pixels": pixels.reshape(x.shape),
    }
