"""The ViT of `transformers`: `ViTModel` and `ViTForImageClassification`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .transformer_family import Edits, Family
from .transformer_huggingface import activations, attention, is_model_of, pooled_model, wrapper
from .transformer_parts import ContributionSum, PositionSum, PrefixTokens


def _embeddings(edits: Edits, m: Any) -> None:
    edits.part(m, "prefix", PrefixTokens())
    edits.part(m, "position", PositionSum())
    original = m.forward

    def forward(
        pixel_values: Tensor,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool | None = False,
    ) -> Tensor:
        if bool_masked_pos is not None:
            raise ValueError("patches that a mask replaces have no relevance; leave bool_masked_pos at None")
        height, width = pixel_values.shape[2:]
        tokens = m.canonical_prefix(m.patch_embeddings(pixel_values), m.cls_token)
        if interpolate_pos_encoding:
            position = m.interpolate_pos_encoding(tokens, height, width)
        elif (height, width) != tuple(m.image_size):
            return original(pixel_values)  # which says what is wrong with the size
        else:
            position = m.position_embeddings
        return m.dropout(m.canonical_position(tokens, position))

    edits.forward(m, forward)


def _layer(edits: Edits, m: Any) -> None:
    edits.part(m, "sum_attention", ContributionSum())
    edits.part(m, "sum_mlp", ContributionSum())

    def forward(hidden_states: Tensor, attention_mask: Tensor | None = None, **_: object) -> Tensor:
        attended, _weights = m.attention(m.layernorm_before(hidden_states), attention_mask)
        x = m.canonical_sum_attention(hidden_states, m.dropout(attended))
        return m.canonical_sum_mlp(x, m.dropout(m.mlp(m.layernorm_after(x))))

    edits.forward(m, forward)


FAMILY = Family(
    name="ViT of transformers (ViTModel, ViTForImageClassification)",
    library="transformers",
    is_network=lambda module: is_model_of(module, "vit"),
    forms={
        "TransformersModel": wrapper,
        "ViTModel": pooled_model,
        "ViTEmbeddings": _embeddings,
        "ViTLayer": _layer,
        "ViTAttention": attention("q_proj", "k_proj", "v_proj", "num_attention_heads", "o_proj"),
        **activations(),
    },
    as_they_are=frozenset({"ViTForImageClassification", "ViTPatchEmbeddings", "ViTMLP", "ViTPooler"}),
)
