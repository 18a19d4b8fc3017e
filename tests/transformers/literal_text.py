"""LRP on text encoders of `transformers`, written out as in `literal`: norms come behind the sums here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .literal import Back, linear, mlp, norm, over, residual, self_attention
from .literal_views import attention, joined
from .literal_views import mlp as two_layers


def bert(base: Any, present: Tensor) -> SimpleNamespace:
    """`BertModel`, `RobertaModel` and `XLMRobertaModel`."""
    e = base.embeddings
    position_ids = torch.arange(present.shape[1]).expand(present.shape)
    if hasattr(e, "padding_idx"):
        position_ids = present.cumsum(1) * present + e.padding_idx
    blocks = [
        SimpleNamespace(
            attn=attention(
                joined(b.attention.self.query, b.attention.self.key, b.attention.self.value),
                b.attention.output.dense,
                b.attention.self.num_attention_heads,
            ),
            norm1=b.attention.output.LayerNorm,
            mlp=two_layers(b.intermediate.dense, b.intermediate.intermediate_act_fn, b.output.dense),
            norm2=b.output.LayerNorm,
        )
        for b in base.encoder.layer
    ]
    return SimpleNamespace(
        types=e.token_type_embeddings.weight[0],
        position=e.position_embeddings.weight[position_ids],
        norm=e.LayerNorm,
        blocks=blocks,
    )


def distilbert(base: Any, present: Tensor) -> SimpleNamespace:
    """`DistilBertModel`."""
    blocks = [
        SimpleNamespace(
            attn=attention(
                joined(b.attention.q_lin, b.attention.k_lin, b.attention.v_lin),
                b.attention.out_lin,
                b.attention.n_heads,
            ),
            norm1=b.sa_layer_norm,
            mlp=two_layers(b.ffn.lin1, b.ffn.activation, b.ffn.lin2),
            norm2=b.output_layer_norm,
        )
        for b in base.transformer.layer
    ]
    return SimpleNamespace(
        types=torch.zeros_like(base.embeddings.LayerNorm.weight),
        position=base.embeddings.position_embeddings.weight[: present.shape[1]].expand(len(present), -1, -1),
        norm=base.embeddings.LayerNorm,
        blocks=blocks,
    )


def block(m: Any, x: Tensor, reading: str, gamma: float, bias: Tensor) -> tuple[Tensor, Back]:
    """Attention and MLP, each with a sum and a norm behind it."""
    z, attend = self_attention(m.attn, x, reading, gamma, bias)
    x, first = residual(x, z, None, attend)
    x, norm1 = norm(m.norm1, x)
    z, feed = mlp(m.mlp, x, reading, gamma)
    x, second = residual(x, z, None, feed)
    x, norm2 = norm(m.norm2, x)
    return x, lambda r: first(norm1(second(norm2(r))))


def head(model: Any, x: Tensor, present: Tensor, gamma: float) -> tuple[Tensor, Back]:
    """The mean over tokens, or two layers on the first token with tanh, in DistilBERT ReLU, between them."""
    if model.output == "mean":
        weights = present.to(x.dtype)
        weighted = x * (weights / weights.sum(1, keepdim=True))[..., None]
        pooled = weighted.sum(1)
        return pooled, lambda r: weighted * over(r, pooled)[:, None]
    m = model.model
    name = type(m).__name__
    first, activation, last = {
        "BertForSequenceClassification": lambda: (m.bert.pooler.dense, torch.tanh, m.classifier),
        "RobertaForSequenceClassification": lambda: (m.classifier.dense, torch.tanh, m.classifier.out_proj),
        "XLMRobertaForSequenceClassification": lambda: (
            m.classifier.dense,
            torch.tanh,
            m.classifier.out_proj,
        ),
        "DistilBertForSequenceClassification": lambda: (m.pre_classifier, torch.relu, m.classifier),
    }[name]()
    z, lower = linear(x[:, 0], first.weight, first.bias, gamma)
    logits, upper = linear(activation(z), last.weight, last.bias, gamma)

    def back(relevance: Tensor) -> Tensor:
        placed = torch.zeros_like(x)
        placed[:, 0] = lower(upper(relevance))
        return placed

    return logits, back


def explain(model: Any, x: Tensor, target: int, reading: str, gamma: float) -> dict[str, Tensor]:
    """Outputs, relevance of word embeddings, of tokens behind each block, and what embeddings keep."""
    present = (x != 0).any(-1)
    base = model.model.base_model
    m = distilbert(base, present) if "Distil" in type(base).__name__ else bert(base, present)
    bias = torch.zeros(present.shape, dtype=x.dtype).masked_fill(~present, float("-inf"))[:, None, None]
    total = x + m.types + m.position
    z, norm_back = norm(m.norm, total)
    backs = []
    for layer in m.blocks:
        z, back = block(layer, z, reading, gamma, bias)
        backs.append(back)
    output, head_back = head(model, z, present, gamma)
    start = torch.zeros_like(output)
    start[:, target] = output[:, target]
    relevance = head_back(start)
    found = {"output": output}
    for i in reversed(range(len(backs))):
        found[f"block {i}"] = relevance
        relevance = backs[i](relevance)
    relevance = norm_back(relevance)
    return {
        **found,
        "type embeddings": (m.types * over(relevance, total)).sum((1, 2)),
        "position embeddings": (m.position * over(relevance, total)).sum((1, 2)),
        "input": x * over(relevance, total),
    }
