"""`doctor` flags what makes an LRP map wrong, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.model_state import model_state

from .zoo import HIGH, LOW, NFNETS, image, nfnet, normed

from zennit.composites import EpsilonGammaBox, EpsilonPlus  # isort: skip
from zennit.torchvision import ResNetCanonizer  # isort: skip
from zennit_drsa import NFNetGamma, TimmCanonizer, doctor  # isort: skip


def examine(model, composite, x=None):
    before = model_state(model)
    diagnosis = doctor(model, composite, image(64, n=2) if x is None else x, verbose=False)
    assert model_state(model) == before
    return diagnosis


def test_plain_zennit_on_efficientnet_lite_is_flagged(capsys):
    model = normed("tf_efficientnet_lite0")
    diagnosis = examine(model, EpsilonPlus())
    assert not diagnosis.ok
    assert len(diagnosis.unmerged_norms) == 49
    assert len(diagnosis.functional) == 9
    assert diagnosis.functional[0] == "blocks.1.1 (InvertedResidual: add)"
    # A sum without a rule doubles the relevance that the block received.
    block = next(layer for layer in diagnosis.layers if layer.name == "blocks.1.1")
    assert -diagnosis.drift["blocks.1.1"] == pytest.approx(block.received, rel=0.05)
    assert "TimmCanonizer" in str(diagnosis.suggestion)
    assert not capsys.readouterr().out
    doctor(model, EpsilonPlus(), image(64))
    printed = capsys.readouterr().out
    assert "NOT valid" in printed
    assert "| batch norms left unmerged | 49: bn1" in printed


def test_efficientnet_lite_with_the_canonizer_passes():
    x = image(64, n=2)
    composite = EpsilonGammaBox(
        torch.full_like(x, -2.2), torch.full_like(x, 2.7), canonizers=[TimmCanonizer()]
    )
    diagnosis = examine(normed("tf_efficientnet_lite0"), composite, x)
    assert diagnosis.ok, str(diagnosis)
    assert diagnosis.suggestion is None
    # What the input receives, and what was lost on the way, is what was started with.
    whole = diagnosis.layers[0]
    assert whole.name == ""
    lost = (diagnosis.lost_in_layers_with_bias + diagnosis.lost_in_other_layers) * abs(diagnosis.relevance)
    assert whole.handed_down + lost == pytest.approx(diagnosis.relevance, rel=1e-3)


@pytest.mark.parametrize("name", NFNETS)
def test_nfnets_with_their_composite_pass(name):
    diagnosis = examine(nfnet(name), NFNetGamma(LOW, HIGH), image(48))
    assert diagnosis.ok, str(diagnosis)
    assert {layer.rule for layer in diagnosis.layers} >= {"BoundedInput", "GeneralizedGamma", "PassLarge"}


@pytest.mark.parametrize(
    "name", ["efficientnet_b0", "densenet121", "convnext_atto", "regnety_002", "seresnet18"]
)
def test_other_timm_models_pass_with_the_canonizer_only(name):
    model = normed(name)
    assert examine(model, EpsilonPlus(canonizers=[TimmCanonizer()]), image(48)).ok
    assert not examine(model, EpsilonPlus(), image(48)).ok


def test_torchvision_resnet_needs_a_canonizer():
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    resnet = torchvision.models.resnet18(num_classes=10).eval()
    plain = examine(resnet, EpsilonPlus())
    assert not plain.ok
    assert len(plain.unmerged_norms) == 20
    assert "TorchvisionCanonizer" in str(plain.suggestion)
    assert examine(resnet, EpsilonPlus(canonizers=[ResNetCanonizer()])).ok


class Gated(nn.Module):
    """A model with a product, a module without a rule and, if asked for, a division by zero."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.fc = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.LayerNorm(4),
            nn.Linear(4, 3),
        )
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * torch.sigmoid(self.b(x))
        x = self.norm(x)
        if self.broken:
            x = x / (x - x)
        return self.fc(x)


def test_products_and_modules_without_a_rule_are_named():
    torch.manual_seed(0)
    diagnosis = examine(Gated().eval(), EpsilonPlus(), torch.randn(2, 4))
    assert not diagnosis.ok
    assert diagnosis.functional == ["(model) (Gated: mul, sigmoid)"]
    assert diagnosis.without_rule == ["norm (LayerNorm)"]
    assert "zennit.layer.Sum" in str(diagnosis.suggestion)


def test_non_finite_values_are_named():
    torch.manual_seed(0)
    diagnosis = examine(Gated(broken=True).eval(), EpsilonPlus(), torch.randn(2, 4))
    assert not diagnosis.ok
    assert "fc" in diagnosis.non_finite


def test_relevance_in_biases_is_measured_not_flagged():
    torch.manual_seed(0)
    layer = nn.Linear(3, 1)
    nn.init.ones_(layer.weight)
    nn.init.ones_(layer.bias)
    model = nn.Sequential(layer)
    diagnosis = examine(model.eval(), EpsilonPlus(), torch.ones(1, 3))
    assert diagnosis.ok
    assert diagnosis.lost_in_layers_with_bias == pytest.approx(1 / 4, rel=1e-4)  # b / (Σ x w + b)


def test_the_target_is_what_is_explained():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4)).eval(), torch.randn(2, 3)
    diagnosis = doctor(model, EpsilonPlus(), x, target=torch.tensor([1, 2]), verbose=False)
    output = model(x).detach()
    assert diagnosis.relevance == pytest.approx(float(output[0, 1] + output[1, 2]), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((1, EpsilonPlus(), torch.ones(1, 3)), TypeError, "model must be a torch.nn.Module, got int"),
        (
            (nn.Linear(3, 2), "epsilon", torch.ones(1, 3)),
            TypeError,
            "composite must be a Zennit composite, got str",
        ),
        ((nn.Linear(3, 2), EpsilonPlus(), [1.0]), TypeError, "input must be a floating-point tensor"),
        ((nn.Linear(3, 2), EpsilonPlus(), torch.ones(0, 3)), ValueError, "at least one example"),
        ((nn.Linear(3, 2), EpsilonPlus(), torch.ones(3)), ValueError, r"shape \(N, classes\), got \(2,\)"),
    ],
)
def test_bad_input_is_named(arguments, error, match):
    with pytest.raises(error, match=match):
        doctor(*arguments)
