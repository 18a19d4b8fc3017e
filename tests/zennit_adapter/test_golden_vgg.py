"""`VGGGamma` and the K maps against arrays of the authors' program, and the rules against their formulas."""

from __future__ import annotations

import pytest
import torch
from drsa_core import Subspaces
from torch import Tensor
from torchvision.models import VGG, vgg16
from zennit.attribution import Gradient

from tests.golden import load
from zennit_drsa import DisentangledAttributor, VGGGamma, collect
from zennit_drsa.family_composites import IMAGENET_MEAN, IMAGENET_STD

LAYER = "features.22"  # Conv4_3 after ReLU
TOLERANCE = 1e-4  # of the array's maximum, in float32


def golden_model(biased: bool) -> VGG:
    torch.manual_seed(0)
    model = vgg16(weights=None).eval()
    if biased:
        generator = torch.Generator().manual_seed(7)
        for module in model.modules():
            if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
                assert module.bias is not None
                module.bias.data.copy_(0.1 * torch.randn(module.bias.shape, generator=generator))
    return model


def golden_input(seed: int) -> Tensor:
    torch.manual_seed(seed)
    mean, std = torch.tensor(IMAGENET_MEAN).view(3, 1, 1), torch.tensor(IMAGENET_STD).view(3, 1, 1)
    return (torch.rand(3, 64, 64) - mean) / std


def assert_close(ours: Tensor, golden: Tensor) -> None:
    assert (ours - golden).abs().max() <= TOLERANCE * golden.abs().max()


@pytest.mark.parametrize("name", ["vgg16_plain", "vgg16_biased"])
def test_heatmaps_contexts_and_concepts_of_the_authors_program(name):
    arrays, meta = load(name)
    basis = torch.as_tensor(load("vgg16_U")[0]["U"])
    subspaces = Subspaces(basis, [128] * 4)
    model = golden_model(biased=name == "vgg16_biased")
    inputs = torch.stack([golden_input(case["input_seed"]) for case in meta["cases"]])
    targets = torch.tensor([case["target"] for case in meta["cases"]])
    one_hot = torch.nn.functional.one_hot(targets, 1000)

    def attr_output(output: Tensor) -> Tensor:
        return one_hot * output.detach()

    plain = Gradient(model, VGGGamma())
    output, heatmap = plain(inputs, attr_output)
    attributor = DisentangledAttributor(plain, LAYER, subspaces)
    _, maps = attributor(inputs, attr_output)
    concepts = attributor.concept_relevance(inputs, attr_output)
    pairs = collect(model, VGGGamma(), LAYER, [inputs], targets, positions=None, progress=False)
    a, c = (t.reshape(2, 64, 512).movedim(2, 1).reshape(2, 512, 8, 8) for t in pairs)
    for i in range(2):
        expected = {key: torch.as_tensor(arrays[f"{key}_{i}"]) for key in ("logits", "heatmap", "act", "ctx")}
        assert_close(output[i].detach(), expected["logits"])
        assert_close(heatmap[i], expected["heatmap"])
        assert_close(a[i], expected["act"])
        # The program keeps gradients on inactive neurons, where the paper's context is zero.
        assert_close(c[i], expected["ctx"] * (expected["act"] != 0))
        assert_close(concepts[i], torch.as_tensor(arrays[f"R_k_ctxmasked_{i}"]))
        assert_close(maps[i], torch.as_tensor(arrays[f"heatmaps_k_ctxmasked_{i}"]))
