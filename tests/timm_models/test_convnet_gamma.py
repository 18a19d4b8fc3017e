"""`ConvNetGamma` and what it shares with the other γ composites: rules per layer, bounds, γ above it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision.models import resnet18
from zennit.attribution import Gradient
from zennit.canonizers import SequentialMergeBatchNorm
from zennit.composites import COMPOSITES, EpsilonGammaBox, MixedComposite, NameMapComposite
from zennit.core import Composite, Hook
from zennit.rules import Epsilon, Gamma

from tests.model_state import model_state
from tests.timm_models.zoo import HIGH, LOW, MEAN, STD, nfnet
from tests.toys import randomise_batch_norm, subspaces
from zennit_drsa import (
    ConvNetGamma,
    DisentangledAttributor,
    NFNetGamma,
    TimmCanonizer,
    TorchvisionCanonizer,
    VGGGamma,
    doctor,
)
from zennit_drsa._zennit import hooks_on
from zennit_drsa.rules import BoundedInput, GeneralizedGamma, PixelBox, PositiveGamma, ZeroRule

CHANNELS: dict[str, Any] = {"mean": MEAN.flatten().tolist(), "std": STD.flatten().tolist()}


def gammas_on(model: nn.Module, composite: Composite) -> dict[str, float | str]:
    """γ of the rule on each linear layer, "zB" for the rule with bounds."""
    found: dict[str, float | str] = {}
    with composite.context(model):
        for name, module in model.named_modules():
            for hook in hooks_on(module):
                if isinstance(hook, PositiveGamma | GeneralizedGamma):
                    found[name] = hook.gamma
                elif isinstance(hook, ZeroRule):
                    found[name] = 0.0
                elif isinstance(hook, PixelBox | BoundedInput):
                    found[name] = "zB"
    return found


def small_resnet() -> nn.Module:
    torch.manual_seed(0)
    return randomise_batch_norm(resnet18(weights=None, num_classes=10)).double().eval()


def efficientnet() -> nn.Module:
    torch.manual_seed(0)
    return randomise_batch_norm(timm.create_model("efficientnet_lite0", num_classes=10)).double().eval()


def pixels(size: int = 48) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.rand(2, 3, size, size, generator=generator) - MEAN).div(STD).double()


def test_rules_of_every_layer_of_a_resnet():
    """The layers of ResNet-18, written out: z^B first, γ up to layer3, 0 above it and in the head."""
    found = gammas_on(small_resnet(), ConvNetGamma(0.25, **CHANNELS, layer="layer3"))
    lower = ["layer1.0.conv1", "layer1.0.conv2", "layer1.1.conv1", "layer1.1.conv2"]
    for stage in ("layer2", "layer3"):
        lower += [f"{stage}.0.conv1", f"{stage}.0.conv2", f"{stage}.0.downsample.0"]
        lower += [f"{stage}.1.conv1", f"{stage}.1.conv2"]
    upper = ["layer4.0.conv1", "layer4.0.conv2", "layer4.0.downsample.0", "layer4.1.conv1", "layer4.1.conv2"]
    assert found == {
        "conv1": "zB",
        **dict.fromkeys(lower, 0.25),
        **dict.fromkeys(upper, 0.0),
        "fc": 0.0,
    }


def test_gamma_by_depth_and_the_longest_name_counts():
    gammas = {"": 0.5, "layer2": 0.25, "layer2.1": 0.2, "layer3": 0.1}
    model = small_resnet()
    found = gammas_on(model, ConvNetGamma(gammas, layer="layer3", gamma_above=0.05))
    assert found["conv1"] == 0.5  # without bounds the first layer is as the others
    assert found["layer1.1.conv2"] == 0.5
    assert found["layer2.0.conv2"] == 0.25
    assert found["layer2.1.conv1"] == 0.2
    assert found["layer3.1.conv2"] == 0.1
    assert {found[name] for name in found if name.startswith("layer4")} == {0.05}
    assert found["fc"] == 0.0
    by_module = gammas_on(model, ConvNetGamma(gammas, layer=model.get_submodule("layer3"), gamma_above=0.05))
    assert by_module == found


def test_gamma_above_in_an_nfnet():
    found = gammas_on(nfnet(), NFNetGamma(LOW, HIGH, 0.1, layer="stages.1"))
    below = {name for name, gamma in found.items() if gamma == 0.1}
    above = {name for name, gamma in found.items() if gamma == 0.0}
    assert {name for name in found if name.startswith(("stages.2", "stages.3", "final", "head"))} == above
    assert {name for name in found if name.startswith(("stem", "stages.0", "stages.1"))} == below | {
        "stem.conv1"
    }
    assert found["stem.conv1"] == "zB"


@pytest.mark.parametrize("network", ["resnet18", "efficientnet_lite0"])
@pytest.mark.parametrize("layer", [None, "deep"])
def test_maps_are_those_of_zennits_rules(network, layer):
    """The same rules from Zennit: EpsilonGammaBox, and LRP-ε in the convolutions above the layer."""
    model = small_resnet() if network == "resnet18" else efficientnet()
    canonizer = TorchvisionCanonizer() if network == "resnet18" else TimmCanonizer()
    behind: tuple[str, ...]
    name, behind = "layer2", ("layer3", "layer4")
    if network != "resnet18":
        name, behind = "blocks.4", ("blocks.5", "blocks.6", "conv_head")
    reference: Composite = EpsilonGammaBox(LOW.double(), HIGH.double(), gamma=0.25, canonizers=[canonizer])
    if layer is not None:
        convolutions = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
        above = [n for n in convolutions if n.startswith(behind)]
        reference = MixedComposite([NameMapComposite([(above, Epsilon(1e-6))]), reference])
    ours = ConvNetGamma(0.25, low=LOW, high=HIGH, layer=None if layer is None else name)
    x, before = pixels(), model_state(model)
    relevance = Gradient(model, ours)(x, lambda y: y.detach())[1]
    assert model_state(model) == before
    expected = Gradient(model, reference)(x, lambda y: y.detach())[1]
    # float64; what differs is rounding, and where a ReLU's output and its relevance are zero.
    torch.testing.assert_close(relevance, expected, rtol=1e-6, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize("stabilizer", [1e-9, 1e-2])
@pytest.mark.parametrize("gamma", [0.0, 0.3])
def test_the_generalised_rule_with_a_stabilizer_is_zennits_gamma(gamma, stabilizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1)).double()
    a, r = torch.randn(2, 4, 5, 5).double(), torch.randn(2, 6, 5, 5).double()

    def relevance(rule: Hook) -> Tensor:
        return Gradient(model, NameMapComposite([(["0"], rule)]))(a, r)[1]

    ours = relevance(GeneralizedGamma(gamma, threshold=0.0, stabilizer=stabilizer))
    theirs = relevance(Gamma(gamma, stabilizer=stabilizer) if gamma else Epsilon(stabilizer))
    torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(ours, relevance(GeneralizedGamma(gamma, threshold=0.5)))


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_lite0", "mobilenetv3_small_050"])
def test_the_canonizer_of_the_family_is_found(name):
    torch.manual_seed(0)
    model = randomise_batch_norm(timm.create_model(name, num_classes=10)).double().eval()
    diagnosis = doctor(model, ConvNetGamma(0.25, **CHANNELS), pixels(64), verbose=False)
    assert diagnosis.ok, str(diagnosis)


def test_a_network_of_no_family_has_its_batch_norms_merged():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = randomise_batch_norm(nn.Sequential(*layers, nn.Linear(4, 2))).double().eval()
    x = pixels(8)
    ours = Gradient(model, ConvNetGamma(0.25, **CHANNELS))(x)[1]
    theirs = EpsilonGammaBox(LOW.double(), HIGH.double(), canonizers=[SequentialMergeBatchNorm()])
    torch.testing.assert_close(ours, Gradient(model, theirs)(x)[1])


@pytest.mark.parametrize(
    "composite", [lambda **b: VGGGamma(**b), lambda **b: NFNetGamma(**b), lambda **b: ConvNetGamma(**b)]
)
def test_bounds_are_taken_alike(composite):
    def first(built: Composite) -> tuple[Tensor, Tensor]:
        rule = built._first if hasattr(built, "_first") else built.first_rule
        return torch.as_tensor(rule.low), torch.as_tensor(rule.high)

    for bound, expected in zip(first(composite(**CHANNELS)), (LOW, HIGH), strict=True):
        torch.testing.assert_close(bound.float(), expected)
    for bound, expected in zip(first(composite(low=LOW, high=HIGH)), (LOW, HIGH), strict=True):
        assert bound is expected
    assert [float(bound) for bound in first(composite(low=-1.0, high=2.0))] == [-1.0, 2.0]
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"low": LOW}, "one is missing"),
        ({"low": LOW, "high": HIGH, **CHANNELS}, "not as both"),
        ({"low": HIGH, "high": LOW}, "exchanged"),
        ({"mean": (0.5,), "std": (0.0,)}, "std be positive"),
        ({"mean": (0.5, 0.5), "std": (1.0,)}, "one entry per input channel"),
    ]
    for wrong, message in mistakes:
        with pytest.raises(ValueError, match=message):
            composite(**wrong)


@pytest.mark.parametrize(
    "shape", [(7,), (3, 5, 5), (4, 5, 5)], ids=["signals", "three_frames", "four_frames"]
)
@pytest.mark.parametrize("composite", [ConvNetGamma, VGGGamma])
def test_mean_and_std_are_those_of_channels_whatever_the_number_of_axes(composite, shape):
    torch.manual_seed(0)
    convolution = {1: nn.Conv1d, 3: nn.Conv3d}[len(shape)](3, 4, 3)
    model = nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)).eval()
    mean, std = (t.view(1, 3, *[1] * len(shape)) for t in (MEAN, STD))
    x = (torch.rand(2, 3, *shape) - mean) / std
    model(x)
    maps = [
        Gradient(model, rules)(x.clone(), torch.eye(5)[[1, 2]])[1]
        for rules in (
            composite(mean=MEAN.flatten(), std=STD.flatten()),
            composite(low=(0 - mean) / std, high=(1 - mean) / std),
        )
    ]
    torch.testing.assert_close(*maps, rtol=1e-4, atol=1e-6)


def test_mistakes_are_named():
    assert COMPOSITES["convnet_gamma"] is ConvNetGamma
    with pytest.raises(ValueError, match="needs the bounds"):
        NFNetGamma()
    for composite in (VGGGamma, ConvNetGamma):
        with pytest.raises(ValueError, match=r"gamma_above=0\.1 needs the concept layer"):
            composite(gamma_above=0.1)
        with pytest.raises(ValueError, match="gamma_above must be finite and at least 0"):
            composite(layer="layer3", gamma_above=-1.0)
    with pytest.raises(ValueError, match="entry for the whole model"):
        ConvNetGamma({"layer1": 0.1})
    with pytest.raises(ValueError, match=r"gamma\['layer1'\] must be finite"):
        ConvNetGamma({"": 0.1, "layer1": float("nan")})
    model = small_resnet()
    with pytest.raises(ValueError, match="gamma names layer9, which this ResNet does not have"):
        ConvNetGamma({"": 0.1, "layer9": 0.2}).register(model)
    with pytest.raises(ValueError, match="layer9"):
        ConvNetGamma(layer="layer9").register(model)


@pytest.mark.parametrize(
    "composite",
    [
        lambda: ConvNetGamma(0.25, low=0.0, high=1.0, canonizers=[]),
        lambda: VGGGamma(low=0.0, high=1.0),
        lambda: NameMapComposite([(["0"], BoundedInput(0.0, 1.0))]),
    ],
)
def test_inputs_outside_of_the_box_are_warned_about(composite):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)).eval()
    x = torch.rand(2, 3, 8, 8)
    x[0, 0, 0, 0], x[0, 0, 0, 1] = -1e-8, 1 + 1e-7  # rounding
    run = DisentangledAttributor(Gradient(model, composite()), "1", subspaces(4), tolerance=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.explain(x, 0)
    with pytest.warns(UserWarning, match=r"ranges from .* to 100 and leaves \[low, high\]"):
        run.explain(x * 100, 0)
    with pytest.warns(UserWarning, match=r"ranges from -0\.5.* leaves \[low, high\]"):
        run.explain(x - 0.5, 0)
