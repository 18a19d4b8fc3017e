"""LRP on a small ViT against arrays that were computed independently, in both readings of attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import golden

from .models import timm

from drsa_core import Subspaces  # isort: skip
from zennit.attribution import Gradient  # isort: skip
from zennit_drsa import DisentangledAttributor, TransformerGamma  # isort: skip


def small_vit() -> Any:
    """The model of the sidecar."""
    torch.manual_seed(0)
    options = {"img_size": 64, "depth": 4, "embed_dim": 48, "num_heads": 3, "num_classes": 10}
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, **options).eval().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            elif "pos_embed" not in name and "cls" not in name:
                parameter.mul_(3.0)
    return model


def close(actual: Tensor, expected: np.ndarray) -> bool:
    return float(np.abs(actual.detach().numpy() - expected).max()) <= 1e-9 * float(np.abs(expected).max())


@pytest.mark.parametrize("source", ["at hand", "sample"])
@pytest.mark.parametrize("reading", ["constant", "attnlrp"])
def test_contexts_maps_and_relevance(reading, source, monkeypatch):
    if source == "sample":
        monkeypatch.setattr(golden, "SHARED", golden.SAMPLE / "nowhere")
    arrays, meta = golden.load("vit_small")
    stride = meta.get("stride", 1)
    model, x = small_vit(), torch.from_numpy(arrays["x"])
    if not close(model(x), arrays["output"]):
        pytest.skip("this release of timm draws other initial weights")
    attributor = DisentangledAttributor(
        Gradient(model, TransformerGamma(0.0, reading)),
        "blocks.2",
        Subspaces(torch.from_numpy(arrays["U"]), [12] * 4),
        channel_dim=-1,
    )
    _, context = attributor.context(x, 7)
    assert close(context, arrays[f"context_{reading}"])
    found = attributor.explain(x, 7)
    assert found.whole is not None
    assert close(found.whole[..., ::stride, ::stride], arrays[f"whole_{reading}"])
    assert close(found.maps[..., ::stride, ::stride], arrays[f"maps_{reading}"])
    assert close(found.concept_relevance, arrays[f"relevance_{reading}"])
