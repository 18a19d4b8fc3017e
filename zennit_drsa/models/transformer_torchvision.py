"""torchvision's VisionTransformer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .transformer_attention import attend, multihead_attention
from .transformer_family import Edits, Family, inherits
from .transformer_parts import ContributionSum, PositionSum, PrefixTokens


def _block(edits: Edits, m: Any) -> None:
    edits.part(m, "sum_attention", ContributionSum())
    edits.part(m, "sum_mlp", ContributionSum())

    def forward(input: Tensor) -> Tensor:
        x = m.ln_1(input)
        x = m.canonical_sum_attention(input, m.dropout(attend(m.self_attention, x, x)))
        return m.canonical_sum_mlp(x, m.mlp(m.ln_2(x)))

    edits.forward(m, forward)


def _encoder(edits: Edits, m: Any) -> None:
    edits.part(m, "position", PositionSum())
    edits.forward(m, lambda input: m.ln(m.layers(m.dropout(m.canonical_position(input, m.pos_embedding)))))


def _network(edits: Edits, m: Any) -> None:
    edits.part(m, "prefix", PrefixTokens())

    def forward(x: Tensor) -> Tensor:
        tokens = m.canonical_prefix(m._process_input(x), m.class_token)
        return m.heads(m.encoder(tokens)[:, 0])

    edits.forward(m, forward)


FAMILY = Family(
    name="torchvision's VisionTransformer",
    library="torchvision",
    is_network=lambda module: inherits(module, "torchvision.models.vision_transformer", "VisionTransformer"),
    forms={
        "VisionTransformer": _network,
        "Encoder": _encoder,
        "EncoderBlock": _block,
        "MultiheadAttention": multihead_attention,
    },
    as_they_are=frozenset(),
)
