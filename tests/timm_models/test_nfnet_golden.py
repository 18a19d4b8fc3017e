"""NFNet rules against arrays from the authors' program, and from the paper's text where the two differ.

Maps by concept and the negative-gain map carry the program's treatment of biases: `bias="authors"`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from drsa_core import Subspaces, filter_relevance
from drsa_core.lrp import ModuleEdits, passing, passing_forward
from drsa_core.nfnet import folded_weight, plain_forward
from torch import Tensor, nn

from tests import golden

from .zoo import HIGH, LOW, MEAN, STD, explain, perturb, timm

from zennit.layer import Sum  # isort: skip
from zennit_drsa import DisentangledAttributor, NFNetGamma  # isort: skip
from zennit_drsa.rules import BoundedInput, GeneralizedGamma, PassLarge  # isort: skip

TOLERANCE = 1e-4  # of a map's maximum: the arrays are float32


def close(actual: Tensor, expected: np.ndarray, tolerance: float = TOLERANCE) -> bool:
    return float(np.abs(actual.numpy() - expected).max()) <= tolerance * float(np.abs(expected).max())


def small_nfnet(meta: dict[str, Any], negative_gains: bool = False) -> Any:
    torch.manual_seed(0)
    model = timm.create_model("dm_nfnet_f0", pretrained=False, **meta["model_kwargs"]).eval()
    perturb(model, 7, negative_gains)
    if not negative_gains:
        for name, check in meta["weight_checksums"].items():
            assert float(model.get_parameter(name).detach().double().sum()) == pytest.approx(
                check["sum"], rel=1e-5, abs=1e-6
            )
    return model


def small_input(case: dict[str, Any]) -> Tensor:
    torch.manual_seed(case["input_seed"])
    return (torch.rand(3, case["size"], case["size"]) - MEAN) / STD


@pytest.mark.parametrize("index", [0, 1])
def test_heatmap_of_the_paper(index):
    arrays, meta = golden.load("nfnet_small")
    case = meta["cases"][index]
    logits, relevance = explain(small_nfnet(meta), NFNetGamma(LOW, HIGH), small_input(case), case["target"])
    assert close(logits[0], arrays[f"logits_{index}"], 1e-5)
    assert close(relevance[0], arrays[f"heatmap_papermode_{index}"])


@pytest.mark.parametrize(
    ("key", "gamma"),
    [
        ("0", 0.1),
        ("1", 0.1),
        ("gamma0.0_0", 0.0),
        ("gamma0.01_0", 0.01),
        ("gamma1.0_0", 1.0),
        ("neggain_effective_0", 0.1),
    ],
)
def test_heatmap_with_the_authors_biases(key, gamma):
    arrays, meta = golden.load("nfnet_small")
    case = meta["cases"][int(key[-1])]
    model = small_nfnet(meta, negative_gains="neggain" in key)
    composite = NFNetGamma(LOW, HIGH, gamma, bias="authors")
    _, relevance = explain(model, composite, small_input(case), case["target"])
    assert close(relevance[0], arrays[f"heatmap_{key}"])


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("index", [0, 1])
def test_activation_context_and_maps_by_concept(index, stage):
    arrays, meta = golden.load("nfnet_small")
    case, key = meta["cases"][index], f"stage{stage}_{index}"
    model, x = small_nfnet(meta), small_input(case).requires_grad_()
    basis = torch.from_numpy(arrays[f"U_stage{stage}"])
    subspaces = Subspaces(basis, [basis.shape[1] // 4] * 4)
    taken: list[Tensor] = []
    with NFNetGamma(LOW, HIGH, bias="authors").context(model):
        handle = model.get_submodule(f"stages.{stage}").register_forward_hook(
            lambda *args: taken.append(args[2])
        )
        output = model(x)
        handle.remove()
        (a,) = taken
        start = output.detach() * nn.functional.one_hot(torch.tensor(case["target"]), 10)
        (relevance,) = torch.autograd.grad(output, a, start, retain_graph=True)
        parts = filter_relevance(a.detach(), relevance, subspaces)
        maps = [torch.autograd.grad(a, x, part, retain_graph=True)[0][0] for part in parts]
    assert close(a.detach()[0], arrays[f"act_{key}"], 1e-5)
    assert close(relevance[0], arrays[f"act_{key}"] * arrays[f"ctx_{key}"])
    assert close(parts.sum((1, 2, 3, 4)), arrays[f"R_k_{key}"])
    assert close(torch.stack(maps), arrays[f"heatmaps_k_{key}"])


@pytest.mark.parametrize("stage", [1, 2])
def test_maps_of_the_attributor(stage):
    from zennit.attribution import Gradient

    arrays, meta = golden.load("nfnet_small")
    case, model = meta["cases"][0], small_nfnet(meta)
    basis = torch.from_numpy(arrays[f"U_stage{stage}"])
    subspaces = Subspaces(basis, [basis.shape[1] // 4] * 4)
    one_hot = nn.functional.one_hot(torch.tensor(case["target"]), 10)
    composite = NFNetGamma(LOW, HIGH, bias="authors")
    with DisentangledAttributor(Gradient(model, composite), f"stages.{stage}", subspaces) as attributor:
        _, maps = attributor(small_input(case), lambda output: output * one_hot)
    assert close(maps[0].detach(), arrays[f"heatmaps_k_stage{stage}_0"])
    _, whole = explain(model, composite, small_input(case), case["target"])
    assert (maps.sum(1) - whole).abs().max() <= 1e-5 * whole.abs().max()


# ------------------------------------------------------------------ each case alone


def load_parameters(module: nn.Module, arrays: dict[str, Any], key: str) -> nn.Module:
    prefix = f"{key}/param."
    module.load_state_dict(
        {n[len(prefix) :]: torch.from_numpy(v) for n, v in arrays.items() if n.startswith(prefix)}
    )
    return module.double().eval()


def folded(conv: nn.Module) -> nn.Module:
    edits = ModuleEdits()
    edits.parameter(conv, "weight", folded_weight(conv))
    edits.attribute(conv, "forward", plain_forward(conv))
    return conv


def activated(z: Tensor) -> Tensor:
    return 1.7015043497085571 * nn.functional.gelu(z)


def build(key: str, arrays: dict[str, Any]) -> tuple[nn.Module, Any]:
    from timm.layers import ScaledStdConv2dSame, SEModule

    gamma = GeneralizedGamma(0.1, bias="authors")
    if key == "1_conv_act":
        return folded(
            load_parameters(ScaledStdConv2dSame(6, 8, 3, stride=2, groups=2, eps=1e-5), arrays, key)
        ), gamma
    if key == "2_orphan_conv":
        return folded(load_parameters(ScaledStdConv2dSame(6, 10, 1, eps=1e-5), arrays, key)), gamma
    if key == "2_fc":
        return load_parameters(nn.Linear(12, 24), arrays, key), gamma
    if key == "6_zB":
        conv = folded(load_parameters(ScaledStdConv2dSame(3, 8, 3, stride=2, eps=1e-5), arrays, key))
        return conv, BoundedInput(LOW, HIGH, bias="authors")
    if key == "3_orphan_act":
        module: nn.Module = nn.GELU()
        module.forward = lambda z: passing(z, activated)
        return module, PassLarge()
    if key == "4_attention":
        module = load_parameters(SEModule(8, rd_ratio=0.5), arrays, key)
        ModuleEdits().attribute(module, "forward", passing_forward(module))
        return module, PassLarge()
    if key == "7_avgpool2_ceil":
        return nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False), gamma
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1)), gamma


@pytest.mark.parametrize(
    "key",
    [
        "1_conv_act",
        "2_orphan_conv",
        "2_fc",
        "3_orphan_act",
        "4_attention",
        "6_zB",
        "7_avgpool2_ceil",
        "7_globalpool",
    ],
)
def test_each_case_alone(key):
    arrays, _ = golden.load("nfnet_rules")
    module, rule = build(key, arrays)
    with_activation = key in ("1_conv_act", "6_zB")
    a = torch.from_numpy(arrays[f"{key}/a0"]).double().requires_grad_()
    handles = rule.register(module)
    z = module(a)
    handles.remove()
    output = activated(z.detach()) if with_activation else z.detach()
    assert close(output, arrays[f"{key}/out"], 1e-6)
    # R(z) = R(a): the pair of convolution and activation hands the relevance of the activation to the rule.
    (relevance,) = torch.autograd.grad(z, a, output * torch.from_numpy(arrays[f"{key}/grad_out"]))
    assert close(
        relevance, arrays[f"{key}/rel_in0"], 1e-6
    )  # the program ran in float64 and was stored in float32


def test_shortcut_alone():
    arrays, _ = golden.load("nfnet_rules")
    inputs = [torch.from_numpy(arrays[f"5_shortcut/a{i}"]).double().requires_grad_() for i in (0, 1)]
    module = Sum()
    handles = GeneralizedGamma(0.1).register(module)
    output = module(torch.stack(inputs, dim=-1))
    handles.remove()
    start = output.detach() * torch.from_numpy(arrays["5_shortcut/grad_out"])
    for i, relevance in enumerate(torch.autograd.grad(output, inputs, start)):
        assert close(relevance, arrays[f"5_shortcut/rel_in{i}"], 1e-6)
