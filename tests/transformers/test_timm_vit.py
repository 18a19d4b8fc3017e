"""`TransformerGamma` on timm's VisionTransformer: against the formulas, and what adds up to what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model_state import model_state

from . import literal
from .models import OTHERS, WRITTEN_OUT, distilled, pictures, small

from drsa_core import Explanation, Subspaces  # isort: skip
from zennit.attribution import Gradient  # isort: skip
from zennit.composites import EpsilonPlus  # isort: skip
from zennit_drsa import (  # isort: skip
    DisentangledAttributor,
    TransformerCanonizer,
    TransformerGamma,
    doctor,
)

READINGS = ("constant", "attnlrp")


def subspaces(n_features: int = 12, k: int = 4, dtype: torch.dtype = torch.float64) -> Subspaces:
    generator = torch.Generator().manual_seed(5)
    basis = torch.linalg.qr(torch.randn(n_features, n_features, generator=generator, dtype=torch.float64))[0]
    return Subspaces(basis.to(dtype), [n_features // k] * k)


def explained(model: Any, composite: Any, x: Tensor, layer: str = "blocks.0") -> Explanation:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    concepts = subspaces(model.embed_dim, dtype=dtype)
    attributor = DisentangledAttributor(Gradient(model, composite), layer, concepts, channel_dim=-1)
    return attributor.explain(x, 3)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> bool:
    return float((actual - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("gamma", [0.0, 0.3])
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_every_formula_written_out(name, gamma, reading):
    model, x = small(name), pictures()
    with torch.no_grad():
        expected = literal.explain(model, x, 3, reading, gamma)
        assert close(model(x), expected["logits"])
    composite = TransformerGamma(gamma, reading)
    found = explained(model, composite, x)
    assert found.whole is not None
    assert close(found.whole, expected["pixels"])
    # R = a ⊙ c at the layer.
    a, c = DisentangledAttributor(Gradient(model, composite), "blocks.0", channel_dim=-1).context(x, 3)
    assert close(a * c, expected["blocks.0"])
    assert found.absorbed is not None
    score = expected["logits"][:, 3]
    for share in ("position embeddings", "prefix tokens"):
        kept = found.absorbed.get(share, torch.zeros(len(x), dtype=torch.float64))
        assert float((kept - expected[share]).abs().max()) <= 1e-9 * float(score.abs().max())


@pytest.mark.parametrize("name", ["ViT", "CLIP"])
def test_pixels_in_bounds(name):
    model, x = small(name), pictures()
    with torch.no_grad():
        expected = literal.explain(model, x, 3, "constant", 0.1, box=(-2.0, 2.0))
    for bounds in ({"low": -2.0, "high": 2.0}, {"mean": [0.5] * 3, "std": [0.25] * 3}):
        found = explained(model, TransformerGamma(0.1, "constant", **bounds), x)
        assert found.whole is not None
        assert close(found.whole, expected["pixels"])


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("name", [*WRITTEN_OUT, *OTHERS, "distilled"])
def test_all_shares_are_the_score_and_the_model_comes_back(name, reading):
    model, x = distilled() if name == "distilled" else small(name), pictures()
    before, output = model_state(model), model(x).detach()
    certificate = explained(model, TransformerGamma(0.1, reading), x).certificate()
    assert model_state(model) == before
    assert torch.equal(model(x).detach(), output)
    assert certificate.unaccounted is not None
    assert certificate.unaccounted <= 1e-10
    assert certificate.maps_to_whole is not None
    assert certificate.maps_to_whole <= 1e-10
    assert certificate.around_the_layer == 0
    assert certificate.absorbed is not None
    assert certificate.share_of_score is not None
    assert certificate.share_of_score + sum(certificate.absorbed.values()) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_maps_add_up_in_float32_for_every_batch_size(n, reading):
    model, x = small("DINOv2").float(), pictures(n).float()
    found = explained(model, TransformerGamma(0.1, reading), x, "blocks.1")
    certificate = found.certificate()
    assert certificate.maps_to_whole is not None
    assert certificate.maps_to_whole <= 1e-5
    assert certificate.unaccounted is not None
    assert certificate.unaccounted <= 1e-4
    # An image alone is the same image in a batch.
    alone = explained(model, TransformerGamma(0.1, reading), x[:1], "blocks.1")
    assert close(found.maps[:1], alone.maps, 1e-4)


def test_readings_of_attention_have_their_own_provenance():
    model, x = small(), pictures()
    methods = {explained(model, TransformerGamma(0.1, reading), x).provenance.method for reading in READINGS}
    assert len(methods) == 2
    assert all(any(f"attention={reading}" in str(method) for method in methods) for reading in READINGS)


def test_fused_attention_is_opened():
    model, x = small(), pictures()
    fused = explained(model, TransformerGamma(), x).maps
    for block in model.blocks:
        block.attn.fused_attn = not block.attn.fused_attn
    assert torch.equal(explained(model, TransformerGamma(), x).maps, fused)


@pytest.mark.parametrize("layer", ["blocks.0.mlp.act", "blocks.1.norm2"])
def test_a_layer_inside_a_block_holds_relevance_too(layer):
    """a ⊙ c is what a backward pass under the rules brings to the layer."""
    model, x = small(), pictures()
    attributor = DisentangledAttributor(Gradient(model, TransformerGamma()), layer, channel_dim=-1)
    with pytest.warns(UserWarning, match="around"):
        a, c = attributor.context(x, 3)
    outputs: list[Tensor] = []
    with TransformerGamma().context(model):
        handle = model.get_submodule(layer).register_forward_hook(lambda *call: outputs.append(call[2]))
        logits = model(x.requires_grad_())
        start = logits.detach() * torch.eye(5, dtype=torch.float64)[3]
        (relevance,) = torch.autograd.grad(logits, outputs[0], start)
        handle.remove()
    assert close(a, outputs[0].detach())
    assert close(a * c, relevance)


def test_gamma_by_name_and_above_the_layer():
    model, x = small(), pictures()
    depth = explained(model, TransformerGamma({"": 0.3, "blocks.1": 0.0, "norm": 0, "head": 0.0}), x).maps
    above = explained(model, TransformerGamma(0.3, layer="blocks.0"), x).maps
    assert close(depth, above)
    everywhere = explained(model, TransformerGamma(0.3), x).maps
    assert not close(above, everywhere, 1e-3)
    assert close(
        explained(model, TransformerGamma(0.3, layer="blocks.0", gamma_above=0.3), x).maps, everywhere
    )


def test_zennits_own_rules_on_the_canonical_form():
    model, x = small(), pictures()
    epsilon = explained(model, EpsilonPlus(epsilon=1e-12, canonizers=[TransformerCanonizer()]), x)
    ours = explained(model, TransformerGamma(0.0), x)
    # Linear layers under ε → 0 are LRP-0; the convolution has another rule, so compare above it.
    assert close(epsilon.concept_relevance, ours.concept_relevance, 1e-6)


def test_doctor_passes_with_the_canonizer_and_says_so_without():
    model, x = small("DINOv2"), pictures()
    for reading in READINGS:
        diagnosis = doctor(model, TransformerGamma(0.1, reading), x, verbose=False)
        assert diagnosis.ok, str(diagnosis)
        assert {"position embeddings", "prefix tokens"} <= diagnosis.kept.keys()
        assert ("softmax" in diagnosis.kept) == (reading == "attnlrp")
        assert "share kept by position embeddings" in str(diagnosis)
    before = model_state(model)
    diagnosis = doctor(model, EpsilonPlus(), x, verbose=False)
    assert not diagnosis.ok
    assert diagnosis.suggestion is not None
    assert "TransformerGamma" in diagnosis.suggestion
    assert model_state(model) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reading", READINGS)
def test_half_precision_is_finite_and_close(dtype, reading):
    model, x = small().float(), pictures().float()
    whole = explained(model, TransformerGamma(0.1, reading), x).whole
    assert whole is not None
    model, x = model.to(dtype), x.to(dtype)
    start = torch.eye(5, dtype=dtype)[[3]]
    with Gradient(model, TransformerGamma(0.1, reading)) as attributor:
        _, relevance = attributor(x, lambda output: output.detach() * start)
    assert relevance.dtype == dtype
    assert torch.isfinite(relevance).all()
    found = explained(model, TransformerGamma(0.1, reading), x)
    assert torch.isfinite(found.maps).all()
    total = found.maps.float().sum(1)
    assert torch.cosine_similarity(total.flatten(), relevance.float().flatten(), dim=0) >= 0.98
    # bfloat16 has 8 bits; some fifty roundings lie between the logit and a pixel.
    similarity = torch.cosine_similarity(relevance.float().flatten(), whole.flatten(), dim=0)
    assert float(similarity) >= 0.98
