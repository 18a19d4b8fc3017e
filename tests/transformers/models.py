"""Small timm transformers of every kind, with weights that are not trivial."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

timm = pytest.importorskip("timm")
pytest.importorskip("zennit")

from timm.layers import Attention  # noqa: E402, isort: skip

layers, vit = timm.layers, timm.models.vision_transformer


class GatedAttention(Attention):  # type: ignore[misc]
    """timm's attention with a gate; `VisionTransformer` has no option for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, gated=True)


_SMALL: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 2}
# What the literal transcription knows.
WRITTEN_OUT: dict[str, dict[str, Any]] = {
    "ViT": {},
    "DINOv2": {"reg_tokens": 2, "init_values": 0.5, "no_embed_class": True},
    "qk-norm": {"qk_norm": True},
    "average pooling": {"global_pool": "avg", "class_token": False},
    "average without prefix": {"global_pool": "avg", "reg_tokens": 1, "fc_norm": False},
    "SigLIP": {"global_pool": "map", "class_token": False},
    "CLIP": {"pre_norm": True, "act_layer": layers.QuickGELU},
    "SwiGLU packed": {"mlp_layer": layers.SwiGLUPacked},
    "RMS norm": {"norm_layer": layers.RmsNorm},
}
# What it does not: conservation is all that is asked of these.
OTHERS: dict[str, dict[str, Any]] = {
    "ResPostBlock": {"block_fn": vit.ResPostBlock},
    "ParallelScalingBlock": {"block_fn": vit.ParallelScalingBlock, "qk_norm": True},
    "fused ParallelScalingBlock": {"block_fn": partial(vit.ParallelScalingBlock, fuse_out_proj=True)},
    "unbiased ParallelScalingBlock": {"block_fn": vit.ParallelScalingBlock, "qkv_bias": False},
    "ParallelThingsBlock": {"block_fn": vit.ParallelThingsBlock, "init_values": 0.5},
    "SwiGLU": {"mlp_layer": layers.SwiGLU, "scale_mlp_norm": True, "scale_attn_norm": True},
    "gated attention": {"attn_layer": GatedAttention},
    "maximum": {"global_pool": "max"},
    "average and maximum": {"global_pool": "avgmax"},
    "any size": {"dynamic_img_size": True},
    "no position": {"pos_embed": "none"},
}


def perturbed(model: nn.Module, seed: int = 1) -> nn.Module:
    """Larger weights, and biases, tokens and scales that are not trivial (in place), in float64."""
    model = model.eval().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim == 1:
                parameter.add_(0.2 * noise)
            elif any(word in name for word in ("token", "embed", "latent")) and "proj" not in name:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
    return model


def small(name: str = "ViT", **kwargs: Any) -> Any:
    """One of the models above."""
    torch.manual_seed(0)
    options = {**_SMALL, **(WRITTEN_OUT | OTHERS)[name], "num_classes": 5, **kwargs}
    return perturbed(vit.VisionTransformer(**options))


def distilled() -> Any:
    """DeiT with a distillation token and its head."""
    from timm.models.deit import VisionTransformerDistilled

    torch.manual_seed(0)
    return perturbed(VisionTransformerDistilled(**_SMALL, num_classes=5))


def pictures(n: int = 2, size: int = 16) -> Tensor:
    """Images (n, 3, size, size) of noise in [-2, 2]."""
    generator = torch.Generator().manual_seed(3)
    return 4 * torch.rand(n, 3, size, size, generator=generator, dtype=torch.float64) - 2
