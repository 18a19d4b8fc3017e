"""Text encoders of `transformers`: BERT (MiniLM among them), RoBERTa, XLM-RoBERTa and DistilBERT."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from drsa_core.lrp import passing
from torch import Tensor

from .transformer_family import Edits, Family, Form
from .transformer_huggingface import activations, attention, is_model_of, pooled_model, wrapper
from .transformer_parts import ContributionSum, PositionSum

_TYPES = "type embeddings"

# ---------------------------------------------------------------------- BERT and what is built like it


def _embeddings(edits: Edits, m: Any) -> None:
    """Word, type and position embeddings; only the first, which are the input, hand relevance on."""
    edits.part(m, "types", PositionSum(_TYPES))
    edits.part(m, "position", PositionSum())

    def forward(
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values_length: int = 0,
    ) -> Tensor:
        words = m.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = _positions(m, input_ids, words)
        if token_type_ids is None:
            token_type_ids = torch.zeros(words.shape[:2], dtype=torch.long, device=words.device)
        x = m.canonical_types(words, m.token_type_embeddings(token_type_ids))
        return m.dropout(m.LayerNorm(m.canonical_position(x, m.position_embeddings(position_ids))))

    edits.forward(m, forward)


def _positions(m: Any, input_ids: Tensor | None, words: Tensor) -> Tensor:
    padding = getattr(m, "padding_idx", None)  # RoBERTa counts from it
    if padding is None:
        return m.position_ids[:, : words.shape[1]]
    if input_ids is None:
        return m.create_position_ids_from_inputs_embeds(words, padding)
    return m.create_position_ids_from_input_ids(input_ids, padding)


def _normed_sum(edits: Edits, m: Any) -> None:
    """A branch's last layer, the sum with the branch's input, and its norm."""
    edits.part(m, "sum", ContributionSum())

    def forward(hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return m.LayerNorm(m.canonical_sum(input_tensor, m.dropout(m.dense(hidden_states))))

    edits.forward(m, forward)


def _classification_head(edits: Edits, m: Any) -> None:
    def forward(features: Tensor, **_: object) -> Tensor:
        z = m.dense(m.dropout(features[:, 0]))
        return m.out_proj(m.dropout(passing(z, torch.tanh)))

    edits.forward(m, forward)


def _like_bert(prefix: str) -> dict[str, Form]:
    return {
        f"{prefix}Model": pooled_model,
        f"{prefix}Embeddings": _embeddings,
        f"{prefix}SelfAttention": attention("query", "key", "value", "num_attention_heads"),
        f"{prefix}SelfOutput": _normed_sum,
        f"{prefix}Output": _normed_sum,
        f"{prefix}ClassificationHead": _classification_head,
    }


_LIKE_BERT = ("Bert", "Roberta", "XLMRoberta")
_CALL_THEIR_CHILDREN = ("Attention", "Layer", "Encoder", "Intermediate", "Pooler")
_MODELS = ("ForSequenceClassification", "ForTokenClassification")

# ---------------------------------------------------------------------- DistilBERT


def _distil_embeddings(edits: Edits, m: Any) -> None:
    edits.part(m, "position", PositionSum())

    def forward(
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        words = m.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = m.position_ids[:, : words.shape[1]]
        return m.dropout(m.LayerNorm(m.canonical_position(words, m.position_embeddings(position_ids))))

    edits.forward(m, forward)


def _distil_block(edits: Edits, m: Any) -> None:
    edits.part(m, "sum_attention", ContributionSum())
    edits.part(m, "sum_mlp", ContributionSum())

    def forward(hidden_states: Tensor, attention_mask: Tensor | None = None, **_: object) -> Tensor:
        attended, _weights = m.attention(hidden_states, attention_mask)
        x = m.sa_layer_norm(m.canonical_sum_attention(hidden_states, attended))
        return m.output_layer_norm(m.canonical_sum_mlp(x, m.ffn(x)))

    edits.forward(m, forward)


def _distil_classifier(edits: Edits, m: Any) -> None:
    def forward(**inputs: Any) -> SimpleNamespace:
        hidden = m.distilbert(**inputs).last_hidden_state
        pooled = passing(m.pre_classifier(hidden[:, 0]), torch.relu)
        return SimpleNamespace(logits=m.classifier(m.dropout(pooled)))

    edits.attribute(m, "forward", forward)


FAMILY = Family(
    name="text encoders of transformers (BERT with MiniLM, RoBERTa, XLM-RoBERTa, DistilBERT: the models "
    "themselves and those ForSequenceClassification and ForTokenClassification)",
    library="transformers",
    is_network=lambda module: is_model_of(module, "bert", "roberta", "xlm_roberta", "distilbert"),
    forms={
        "TransformersModel": wrapper,
        **{name: form for prefix in _LIKE_BERT for name, form in _like_bert(prefix).items()},
        "Embeddings": _distil_embeddings,
        "TransformerBlock": _distil_block,
        "DistilBertSelfAttention": attention("q_lin", "k_lin", "v_lin", "n_heads", "out_lin"),
        "DistilBertForSequenceClassification": _distil_classifier,
        **activations(),
    },
    as_they_are=frozenset(
        {
            *(prefix + name for prefix in _LIKE_BERT for name in (*_CALL_THEIR_CHILDREN, *_MODELS)),
            *("DistilBertModel", "DistilBertForTokenClassification", "Transformer", "FFN"),
        }
    ),
)
