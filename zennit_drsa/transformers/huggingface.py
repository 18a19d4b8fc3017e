"""Models of Hugging Face's `transformers`: ViT and text encoders, as functions of one tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from drsa_core.lrp import passing
from torch import Tensor, nn

from .canonizer import Family
from .parts import Edits, Form, Pool, PositionSum, attention, pass_relevance, positions, sums

_OUTPUTS = ("logits", "pooler_output", "first", "mean")


class TransformersModel(nn.Module):
    """A model of `transformers` as a function from one tensor to another, which is what attributors take.

    An image model takes pixels (N, C, H, W). A text model takes the word embeddings (N, T, E) of its tokens,
    as token ids have no relevance; `embed` looks them up. Concept maps of text are then (N, K, T, E), and
    (N, K, T) summed over E. A token whose embedding is zero is padding: no other token sees it. So sentences
    of several lengths may be in one batch, whatever its order, and each is explained as it is alone. If there
    is nothing but zeros, all tokens are seen. Noise makes words of padding (`SmoothGrad` refuses it), and so
    do baselines that are not zero there.

    Parameters
    ----------
    model : PreTrainedModel
    output : {"logits", "pooler_output", "first", "mean"}
        What to return: logits, the pooled output, or of the last hidden state the first token or the mean
        over tokens that are not padding.
    token_type_ids : tensor of int, shape (T,), optional
        Which sentence each token belongs to, the same in all examples. Default: the first.

    Examples
    --------
    Here a small encoder with random weights; `AutoModel.from_pretrained(name)` brings one that has learned.

    >>> from transformers import BertConfig, BertModel
    >>> sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    >>> model = TransformersModel(BertModel(BertConfig(vocab_size=50, **sizes)).eval(), "mean")
    >>> x = model.embed(torch.tensor([[1, 7, 9], [1, 8, 3]]))  # input_ids of a tokenizer
    >>> attributor = Gradient(model, TransformerGamma())
    >>> attributor = DisentangledAttributor(attributor, "model.encoder.layer.0", channel_dim=-1)
    >>> attributor = attributor.fit([x], target=3, solver=DRSA(2, random_state=0))
    >>> tuple(attributor.explain(x, target=3).maps.shape)  # (N, K, T, E)
    (2, 2, 3, 16)
    """

    def __init__(
        self, model: nn.Module, output: str = "logits", token_type_ids: Tensor | None = None
    ) -> None:
        super().__init__()
        if not hasattr(model, "main_input_name") or not hasattr(model, "config"):
            raise TypeError(f"model must be a model of transformers, got {type(model).__name__}")
        if output not in _OUTPUTS:
            raise ValueError(f"output must be one of {', '.join(_OUTPUTS)}, got {output!r}")
        takes: object = model.main_input_name
        if takes not in ("pixel_values", "input_ids"):
            raise ValueError(
                f"{type(model).__name__} takes {takes}; supported are models of pixel_values and of input_ids"
            )
        self.model, self.output = model, output
        self.training = model.training
        self.is_text = takes == "input_ids"
        if token_type_ids is not None and (not self.is_text or token_type_ids.ndim != 1):
            raise ValueError(
                "token_type_ids must be of shape (T,) and for a text model, got "
                f"{tuple(token_type_ids.shape)} for {type(model).__name__}"
            )
        self.register_buffer("token_type_ids", token_type_ids, persistent=False)

    @property
    def zero_is_padding(self) -> bool:
        """Whether tokens whose embedding is zero are padding; methods that add noise ask."""
        return self.is_text

    def embed(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: object) -> Tensor:
        """Word embeddings (N, T, E) of token ids (N, T), zero where the mask (N, T) is.

        What else a tokenizer gives is not used; see `token_type_ids` above.
        """
        if not self.is_text:
            raise ValueError(f"{type(self.model).__name__} takes pixels and has no word embeddings")
        if attention_mask is not None and self.output != "mean" and not bool(attention_mask[:, 0].all()):
            raise ValueError(
                f"the first token of a sentence is padding, but output={self.output!r} is made from it; set "
                "tokenizer.padding_side = 'right'"
            )
        model: Any = self.model
        with torch.no_grad():
            x: Tensor = model.get_input_embeddings()(input_ids)
            if attention_mask is not None:
                x = torch.where(attention_mask.bool().unsqueeze(-1), x, 0)
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if bool((seen.bool() & ~(x != 0).any(-1)).any()):
            raise ValueError(
                "the embedding of a token that is not padding is zero, by which padding is known here; pass "
                "attention_mask, as the tokenizer returns it"
            )
        return x.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Pixels (N, C, H, W) or word embeddings (N, T, E) to a tensor with N rows."""
        if not self.is_text:
            found = self.model(pixel_values=x, return_dict=True)
            present = None
        else:
            present = _present(x)
            inputs = {"inputs_embeds": x, "attention_mask": present.long(), **self._ids(x, present)}
            found = self.model(**inputs, return_dict=True)
        if self.output in ("logits", "pooler_output"):
            value = getattr(found, self.output, None)
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{type(self.model).__name__} returns no {self.output}; pass output= one of "
                    f"{', '.join(_OUTPUTS)}"
                )
            return value
        hidden: Tensor = found.last_hidden_state
        if self.output == "first":
            return hidden[:, 0]
        weights = hidden.new_ones(hidden.shape[:2]) if present is None else present.to(hidden.dtype)
        return self._pool(hidden, weights / weights.sum(1, keepdim=True))

    def _pool(self, hidden: Tensor, weights: Tensor) -> Tensor:
        return (hidden * weights.unsqueeze(-1)).sum(1)

    def _ids(self, x: Tensor, present: Tensor) -> dict[str, Tensor]:
        """Token types if there are any; and positions for RoBERTa, which counts without padding."""
        ids: dict[str, Tensor] = {}
        if isinstance(self.token_type_ids, Tensor):
            ids["token_type_ids"] = self.token_type_ids.expand(x.shape[:2])
        model: Any = self.model
        padding = getattr(getattr(model.base_model, "embeddings", None), "padding_idx", None)
        if padding is not None:
            ids["position_ids"] = present.long().cumsum(1) * present + padding
        return ids


def _present(x: Tensor) -> Tensor:
    """Which tokens (N, T) of embeddings (N, T, E) are not padding."""
    if x.ndim != 3:
        raise ValueError(
            f"a text model takes word embeddings (N, T, E), got {tuple(x.shape)}; see TransformersModel.embed"
        )
    present = (x.detach() != 0).any(-1)
    return present | ~present.any(1, keepdim=True)


# ---------------------------------------------------------------------- forms


def _wrapper(edits: Edits, m: Any) -> None:
    """`TransformersModel`: the mean over tokens hands relevance down by contribution."""
    edits.attribute(m, "_pool", edits.part(m, "pool", Pool(m._pool)))


def _pooled_model(edits: Edits, m: Any) -> None:
    """A model that returns hidden states and what it pools from them.

    The hidden states become a copy: relevance of the pooled output passes through the original, and would be
    counted at both.
    """
    original = m.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if m.pooler is not None and hasattr(found, "last_hidden_state"):
            found.last_hidden_state = found.last_hidden_state.clone()
        return found

    edits.forward(m, forward)


def _attention(edits: Edits, m: Any) -> None:
    name, how = type(m).__name__, m.config._attn_implementation
    if getattr(m.config, "is_decoder", False) or getattr(m, "is_causal", False):
        raise ValueError(
            f"{name} is part of a decoder (config.is_decoder): cross-attention and causal decoders are not "
            "supported, use Integrated Gradients or another method without rules there"
        )
    if how not in ("eager", "sdpa"):
        raise ValueError(
            f"{name} attends by {how!r}, which cannot be opened; load the model with "
            "attn_implementation='sdpa' or 'eager', or call model.set_attn_implementation('sdpa')"
        )
    config = copy.copy(m.config)
    config._attn_implementation = "sdpa"
    edits.attribute(m, "config", config)
    attention(edits, m)


def _text_embeddings(edits: Edits, m: Any) -> None:
    """Word embeddings, which are the input and hand relevance on, plus those of types and positions."""
    types = edits.part(m, "types", PositionSum("type embeddings"))
    position = edits.part(m, "position", PositionSum())
    look_up = m.token_type_embeddings.forward

    def marked(ids: Tensor) -> Tensor:
        found: Any = look_up(ids).detach()
        found.is_of_types = True
        return found

    edits.forward(m.token_type_embeddings, marked)
    edits.operations(m, add=lambda x, y: types(x, y) if hasattr(y, "is_of_types") else position(x, y))


def _classification_head(edits: Edits, m: Any) -> None:
    edits.operations(m, tanh=lambda z: passing(z, torch.tanh))


def _is_model_of(*names: str) -> Callable[[nn.Module], bool]:
    """Whether a module is a model of `transformers.models.<name>`, by itself or as `TransformersModel`."""

    def is_model(module: nn.Module) -> bool:
        if isinstance(module, TransformersModel):
            module = module.model
        return any(
            cls.__module__ == f"transformers.models.{name}.modeling_{name}"
            and cls.__name__.endswith("PreTrainedModel")
            for cls in type(module).__mro__
            for name in names
        )

    return is_model


# ---------------------------------------------------------------------- tables

_SHARED: dict[str, Form] = {
    "TransformersModel": _wrapper,
    **dict.fromkeys(
        (
            *("GELUActivation", "NewGELUActivation", "FastGELUActivation", "QuickGELUActivation"),
            *("AccurateGELUActivation", "ClippedGELUActivation", "SiLUActivation", "MishActivation"),
        ),
        pass_relevance,
    ),
}
_LIKE_BERT = ("Bert", "Roberta", "XLMRoberta")
_FORMS_LIKE_BERT: dict[str, Form] = {
    "Model": _pooled_model,
    "Embeddings": _text_embeddings,
    "SelfAttention": _attention,
    "SelfOutput": sums,
    "Output": sums,
    "ClassificationHead": _classification_head,
}
_UNCHANGED_LIKE_BERT = (
    *("Attention", "Layer", "Encoder", "Intermediate", "Pooler"),
    *("ForSequenceClassification", "ForTokenClassification"),
)

VIT = Family(
    name="ViT of transformers (ViTModel, ViTForImageClassification)",
    library="transformers",
    is_network=_is_model_of("vit"),
    forms={
        **_SHARED,
        "ViTModel": _pooled_model,
        "ViTEmbeddings": positions,
        "ViTLayer": sums,
        "ViTAttention": _attention,
    },
    unchanged=("ViTForImageClassification", "ViTPatchEmbeddings", "ViTMLP", "ViTPooler"),
)
TEXT = Family(
    name="text encoders of transformers (BERT with MiniLM, RoBERTa, XLM-RoBERTa, DistilBERT: the models "
    "themselves and those ForSequenceClassification and ForTokenClassification)",
    library="transformers",
    is_network=_is_model_of("bert", "roberta", "xlm_roberta", "distilbert"),
    forms={
        **_SHARED,
        **{prefix + name: form for prefix in _LIKE_BERT for name, form in _FORMS_LIKE_BERT.items()},
        "Embeddings": positions,
        "TransformerBlock": sums,
        "DistilBertSelfAttention": _attention,
    },
    unchanged=(
        *(prefix + name for prefix in _LIKE_BERT for name in _UNCHANGED_LIKE_BERT),
        *("DistilBertModel", "DistilBertForTokenClassification", "DistilBertForSequenceClassification"),
        *("Transformer", "FFN"),
    ),
)
