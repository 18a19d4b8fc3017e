"""Small transformers of every other library, each with its formulas written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from . import literal, literal_swin, literal_text, literal_views
from .models import perturbed, pictures, timm

from zennit_drsa import TransformersModel  # isort: skip

Found = dict[str, Tensor]
Explain = Callable[[Any, Tensor, int, str, float], Found]


@dataclass(frozen=True)
class Case:
    """A model, its concept layer, and the slow transcription, if there is one.

    `explain` returns `output`, `input` (relevance), `layer` (relevance) and what embeddings and tokens keep.
    """

    build: Callable[[], Any]
    layer: str
    explain: Explain | None = None
    width: int = 12

    def model(self) -> Any:
        """The model in float64."""
        torch.manual_seed(0)
        return self.build()

    def inputs(self, model: Any, n: int = 2) -> Tensor:
        """Pictures, or word embeddings of sentences of several lengths."""
        if not getattr(model, "is_text", False):
            return pictures(n)
        ids, mask = sentences(n)
        return model.embed(ids, mask)


def sentences(n: int = 2) -> tuple[Tensor, Tensor]:
    """Token ids and masks (n, 5); the second sentence has three tokens, padded on its right."""
    ids = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 1, 1], [4, 20, 21, 22, 1]])[:n]
    return ids, torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])[:n]


def _vit(view: Callable[[Any], Any]) -> Explain:
    def explain(model: Any, x: Tensor, target: int, reading: str, gamma: float) -> Found:
        found = literal.explain(view(model), x, target, reading, gamma)
        kept = {name: found[name] for name in ("position embeddings", "prefix tokens")}
        return {"output": found["logits"], "input": found["pixels"], "layer": found["blocks.0"], **kept}

    return explain


def _text(model: Any, x: Tensor, target: int, reading: str, gamma: float) -> Found:
    found = literal_text.explain(model, x, target, reading, gamma)
    return {**found, "layer": found["block 0"]}


def _swin(model: Any, x: Tensor, target: int, reading: str, gamma: float) -> Found:
    found = literal_swin.explain(model, x, target, reading, gamma)
    return {"output": found["logits"], "input": found["pixels"], "layer": found["first block"]}


def _torchvision_vit() -> Any:
    models = pytest.importorskip("torchvision").models
    return perturbed(models.VisionTransformer(16, 4, 2, 2, 12, 24, num_classes=5))


def _torchvision_swin(version: int) -> Any:
    swin = pytest.importorskip("torchvision").models.swin_transformer
    # 8 × 8 tokens in windows of 3 × 3: with padding, and with shifted windows in every second block.
    options: dict[str, Any] = {"patch_size": [2, 2], "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4]}
    if version == 2:
        options |= {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    return perturbed(swin.SwinTransformer(**options, window_size=[3, 3], num_classes=5))


def _timm_swin(**kwargs: Any) -> Any:
    swin = timm.models.swin_transformer.SwinTransformer
    options: dict[str, Any] = {"img_size": 16, "patch_size": 2, "embed_dim": 8, "num_heads": (2, 4)}
    options["window_size"] = 4
    return perturbed(swin(**(options | kwargs), depths=(2, 2), num_classes=5))


def _openclip(**kwargs: Any) -> Any:
    tower = pytest.importorskip("open_clip").transformer.VisionTransformer
    options: dict[str, Any] = {"image_size": 16, "patch_size": 4, "width": 12, "layers": 2, "heads": 2}
    return perturbed(tower(**options, mlp_ratio=2.0, output_dim=8, **kwargs))


def huggingface(name: str, output: str = "logits", **kwargs: Any) -> Any:
    """A model of `transformers` by the name of its class."""
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, name)
    options: dict[str, Any] = {"num_labels": 5}
    if name.startswith("DistilBert"):
        options |= {"dim": 12, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    else:
        options |= {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
        options |= {"intermediate_size": 24}
    if name.startswith("ViT"):
        options |= {"image_size": 16, "patch_size": 4}
    else:
        options |= {"vocab_size": 30, "max_position_embeddings": 16, "pad_token_id": 1}
    return TransformersModel(perturbed(cls(cls.config_class(**(options | kwargs)))), output)


def _text_cases(prefix: str, inner: str, layer: str) -> dict[str, Case]:
    return {
        f"{prefix} logits": Case(
            lambda: huggingface(f"{prefix}ForSequenceClassification"), f"model.{inner}.{layer}", _text
        ),
        f"{prefix} mean": Case(lambda: huggingface(f"{prefix}Model", "mean"), f"model.{layer}", _text),
    }


_OPENCLIP = "transformer.resblocks.0"
CASES: dict[str, Case] = {
    "torchvision ViT": Case(
        _torchvision_vit, "encoder.layers.encoder_layer_0", _vit(literal_views.torchvision_vit)
    ),
    "transformers ViT": Case(
        lambda: huggingface("ViTForImageClassification"),
        "model.vit.layers.0",
        _vit(literal_views.huggingface_vit),
    ),
    **_text_cases("Bert", "bert", "encoder.layer.0"),
    **_text_cases("Roberta", "roberta", "encoder.layer.0"),
    **_text_cases("XLMRoberta", "roberta", "encoder.layer.0"),
    **_text_cases("DistilBert", "distilbert", "transformer.layer.0"),
    "open_clip": Case(_openclip, _OPENCLIP, _vit(literal_views.openclip_tower)),
    "open_clip average": Case(
        lambda: _openclip(pool_type="avg", final_ln_after_pool=True, ls_init_value=0.3, no_ln_pre=True),
        _OPENCLIP,
        _vit(literal_views.openclip_tower),
    ),
    "torchvision Swin": Case(lambda: _torchvision_swin(1), "features.1.0", _swin, 8),
    "torchvision Swin v2": Case(lambda: _torchvision_swin(2), "features.1.0", _swin, 8),
    "timm Swin": Case(_timm_swin, "layers.0.blocks.0", _swin, 8),
}
# Conservation is all that is asked of these.
OTHERS: dict[str, Case] = {
    "open_clip attention pooling": Case(
        lambda: _openclip(attentional_pool=True, attn_pooler_queries=3, attn_pooler_heads=2), _OPENCLIP
    ),
    "transformers ViT pooled": Case(lambda: huggingface("ViTModel", "pooler_output"), "model.layers.0"),
    "transformers ViT mean": Case(lambda: huggingface("ViTModel", "mean"), "model.layers.0"),
    "Bert pooled": Case(lambda: huggingface("BertModel", "pooler_output"), "model.encoder.layer.0"),
    "Bert first": Case(lambda: huggingface("BertModel", "first"), "model.encoder.layer.0"),
    "timm Swin with padding": Case(
        lambda: _timm_swin(global_pool="max", window_size=3), "layers.0.blocks.0", width=8
    ),
}
