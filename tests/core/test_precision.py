"""Autocast is for networks: subspaces, relevance and solvers keep their precision inside of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from captum.attr import InputXGradient
from drsa_core import DRSA, PRCA, Pairs, Subspaces, choose_k, concept_vectors, stability
from drsa_core.checks import full_precision
from drsa_core.refine import ProjectedModel
from torch import Tensor, nn
from zennit.attribution import Gradient
from zennit.composites import EpsilonPlus

from captum_drsa import DisentangledAttribution
from zennit_drsa import DisentangledAttributor


@pytest.fixture
def pairs() -> Pairs:
    generator = torch.Generator().manual_seed(0)
    a, c = torch.rand(160, 8, generator=generator), torch.randn(160, 8, generator=generator)
    return Pairs(a, c, torch.arange(160) // 4)


def blocks() -> Subspaces:
    basis = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))[0]
    return Subspaces(basis, [2, 3, 3])


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def test_what_is_made_in_inference_mode_serves_outside_of_it(pairs: Pairs, tmp_path: Path) -> None:
    """Tensors of inference mode cannot be saved for a backward pass."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    blocks().save(tmp_path / "s.safetensors")
    with torch.inference_mode():
        loaded = Subspaces.load(tmp_path / "s.safetensors")
        made = [loaded, loaded.completed(), PRCA(2).fit(pairs).subspaces_]
        projected = ProjectedModel(model, "0", loaded, [0], pairs.c.mean(0), pairs.a, quantile=0.5)
    x = pairs.a[:5].clone().requires_grad_()
    for subspaces in made:
        basis = subspaces.blocks[0]
        (gradient,) = torch.autograd.grad(subspaces.project(x, 0).sum(), x)
        torch.testing.assert_close(gradient, (basis @ basis.T).sum(0).expand(5, 8))
        assert torch.autograd.grad(subspaces.relevance(x, x).sum(), x)[0].any()
    same = ProjectedModel(model, "0", blocks(), [0], pairs.c.mean(0), pairs.a, quantile=0.5)
    found, expected = (torch.autograd.grad(m(x).sum(), x)[0] for m in (projected, same))
    assert torch.equal(found, expected)


def test_autocast_is_off_inside_and_on_again_after() -> None:
    x = torch.rand(3, 3)
    with autocast():
        with full_precision():
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16
    with full_precision():
        assert (x @ x).dtype == torch.float32


def test_subspaces_do_the_same_inside_of_autocast(pairs: Pairs, tmp_path: Path) -> None:
    def everything() -> list[Tensor]:
        subspaces = blocks()
        subspaces.save(tmp_path / "s.safetensors")
        loaded = Subspaces.load(tmp_path / "s.safetensors")
        dual = Subspaces(subspaces.basis[:, :4] * 2, [4], dual=subspaces.basis[:, :4] / 2).completed()
        image = pairs.a.reshape(10, 16, 8).mT.contiguous()
        return [
            loaded.basis,
            loaded.relevance(pairs.a, pairs.c),
            loaded.project(pairs.a, 1),
            loaded.project_context(image, 1),
            dual.basis,
        ]

    expected = everything()
    with autocast():
        found = everything()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_solvers_do_the_same_inside_of_autocast(pairs: Pairs) -> None:
    def everything() -> list[Tensor]:
        drsa = DRSA(2, random_state=0, n_init=1)
        options: dict[str, Any] = {"n_bootstraps": 2, "n_shuffles": 1, "progress": False}
        chosen = choose_k(pairs, [2], **options)
        return [
            drsa.fit(pairs).subspaces_.basis,
            PRCA(2).fit(pairs).subspaces_.basis,
            stability(pairs, 2, **options).subspaces.basis,
            chosen.candidates[0].index,
        ]

    expected = everything()
    with autocast():
        found = everything()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_half_precision_is_summed_in_float32(pairs: Pairs) -> None:
    subspaces, a, c = blocks(), pairs.a.bfloat16(), pairs.c.bfloat16()
    found = subspaces.relevance(a, c)
    assert found.dtype == torch.float32
    assert torch.equal(found, subspaces.relevance(a.float(), c.float()))
    assert torch.equal(subspaces.project(a, 0), subspaces.project(a.float(), 0).bfloat16())
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(ValueError, match=r"float32 or float64.*got torch\.b?float16"):
            subspaces.to(dtype=dtype)
    assert subspaces.to(dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("backend", ["captum", "zennit"])
def test_wrappers_explain_inside_of_autocast(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)
    ).eval()
    x = torch.rand(4, 3, 8, 8)
    wrapper: Any = (
        DisentangledAttributor(Gradient(model, EpsilonPlus()), "3", blocks())
        if backend == "zennit"
        else DisentangledAttribution(InputXGradient(model), "3", blocks())
    )
    expected = wrapper.concept_relevance(x, 1)
    with autocast():
        found, explanation = wrapper.concept_relevance(x, 1), wrapper.explain(x, 1)
        assert wrapper.fit([x], 1, PRCA(2), random_state=0).subspaces is not None
    assert found.dtype == torch.float32
    # The network itself has rounded to 8 bits.
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03 * float(expected.abs().max()))
    assert explanation.maps.shape == (4, 3, 3, 8, 8)


def test_what_stands_out_does_not_depend_on_autocast(pairs: Pairs) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(8, 2))
    mean = pairs.c.mean(0)
    expected = ProjectedModel(model, "0", blocks(), [0], mean, pairs.a)
    with autocast():
        found = ProjectedModel(model, "0", blocks(), [0], mean, pairs.a)
        assert torch.equal(found.set_back(pairs.a), expected.set_back(pairs.a))
    assert torch.equal(found.thresholds, expected.thresholds)


def test_concept_vectors_are_learned_in_inference_mode(pairs: Pairs) -> None:
    labels = torch.arange(160) % 2
    expected = concept_vectors(pairs.a, labels)
    with torch.inference_mode():
        assert torch.equal(concept_vectors(pairs.a, labels), expected)
        assert torch.equal(concept_vectors(pairs.a * 1, labels * 1), expected)
