"""Weights that are no parameters: rules would exchange nothing, or the wrong thing; they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import LRP
from captum.attr._utils.lrp_rules import EpsilonRule, GammaRule
from drsa_core import Subspaces
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, remove_weight_norm, weight_norm
from torch.nn.utils.parametrize import remove_parametrizations
from zennit.attribution import Gradient
from zennit.composites import EpsilonGammaBox, EpsilonPlus, LayerMapComposite
from zennit.rules import Epsilon, Norm, Pass

from captum_drsa import DisentangledAttribution
from tests.model_state import model_state
from zennit_drsa import ConvNetGamma, DisentangledAttributor, VGGGamma, doctor

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")


def as_buffer(layer: nn.Conv2d) -> None:
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight)


DERIVED: dict[str, Any] = {
    "weight norm": parametrizations.weight_norm,
    "weight norm by hooks": weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "buffer": as_buffer,
}
COMPOSITES: dict[str, Any] = {
    "ConvNetGamma": lambda: ConvNetGamma(0.25),
    "ConvNetGamma with a box": lambda: ConvNetGamma(0.25, low=0.0, high=1.0),
    "VGGGamma": lambda: VGGGamma((0.5,), low=0.0, high=1.0),
    "EpsilonPlus": EpsilonPlus,
    "EpsilonGammaBox": lambda: EpsilonGammaBox(0.0, 1.0),
}


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(6, 5, 1),
    ).eval()


def images() -> Tensor:
    return torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def zennit_maps(model: nn.Module, composite: Any) -> Tensor:
    run = DisentangledAttributor(Gradient(model, composite), "1", Subspaces(torch.eye(6), [3, 3]))
    return run.explain(images(), (1, 0, 0)).maps


@pytest.mark.parametrize("composite", COMPOSITES)
@pytest.mark.parametrize("derived", DERIVED)
def test_rules_that_exchange_parameters_refuse_them(derived: str, composite: str) -> None:
    model = network()
    for layer in (model[0], model[2]):
        DERIVED[derived](layer)
    before = model_state(model)
    with pytest.raises(ValueError, match=r"the weight of .* is no parameter.* Explain a copy"):
        zennit_maps(model, COMPOSITES[composite]())
    assert model_state(model) == before


@pytest.mark.parametrize("derived", ["weight norm", "weight norm by hooks", "pruned"])
def test_plain_weights_of_the_same_values_are_explained(derived: str) -> None:
    model = network()
    DERIVED[derived](model[2])
    # Rules that use the layer as it is need no other weights.
    rules = [(nn.ReLU, Pass()), (nn.AdaptiveAvgPool2d, Norm()), (nn.Conv2d, Epsilon())]
    as_it_is = LayerMapComposite(rules)
    before = zennit_maps(model, as_it_is)
    if derived == "weight norm":
        remove_parametrizations(model[2], "weight")
    elif derived == "pruned":
        prune.remove(model[2], "weight")
    else:
        remove_weight_norm(model[2])
    # Making the weight once or in every pass may round differently.
    torch.testing.assert_close(zennit_maps(model, as_it_is), before)
    assert zennit_maps(model, EpsilonPlus()).abs().sum() > 0


class Standardised(nn.Conv2d):
    """A convolution that standardises its weight in every pass, as in BiT."""

    def standard(self) -> Tensor:
        w = self.weight
        return (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.conv2d(input, self.standard(), self.bias)


class Padded(nn.Conv2d):
    """One with code of its own that uses the weight as it is."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(input, (1, 1, 1, 1)))


def with_layer(layer: nn.Conv2d) -> Any:
    model = network()
    layer.load_state_dict(model[2].state_dict())
    model[2] = layer
    return model.eval()


@pytest.mark.parametrize("composite", COMPOSITES)
def test_layers_that_make_other_weights_are_refused(composite: str) -> None:
    model = with_layer(Standardised(6, 6, 3))
    before = model_state(model)
    with pytest.raises(ValueError, match=r"layer '2' \(Standardised\) does not use its parameters"):
        zennit_maps(model, COMPOSITES[composite]())
    assert model_state(model) == before
    found = doctor(nn.Sequential(*model, nn.Flatten()), COMPOSITES[composite](), images(), verbose=False)
    assert found.derived == ["2 (Standardised)"]
    assert not found.ok


@pytest.mark.parametrize("composite", COMPOSITES)
def test_layers_with_code_of_their_own_are_explained(composite: str) -> None:
    padded, plain = with_layer(Padded(6, 6, 3)), with_layer(nn.Conv2d(6, 6, 3, padding=1))
    expected = zennit_maps(plain, COMPOSITES[composite]())
    torch.testing.assert_close(zennit_maps(padded, COMPOSITES[composite]()), expected)


def test_rules_without_other_weights_explain_standardised_layers() -> None:
    model, plain = with_layer(Standardised(6, 6, 3)), with_layer(nn.Conv2d(6, 6, 3))
    plain[2].weight = nn.Parameter(model[2].standard().detach())
    torch.testing.assert_close(zennit_maps(model, ConvNetGamma(0.0)), zennit_maps(plain, ConvNetGamma(0.0)))


@pytest.mark.parametrize("derived", ["weight norm by hooks", "pruned"])
def test_captum(derived: str) -> None:
    """Captum has no rule for the module of a parametrisation, and says so itself."""
    model = network()
    DERIVED[derived](model[2])

    def maps() -> Tensor:
        run = DisentangledAttribution(LRP(model), "1", Subspaces(torch.eye(6), [3, 3]))
        result: Tensor = run.attribute(images(), target=(1, 0, 0))
        return result

    model[2].rule = GammaRule()
    with pytest.raises(ValueError, match="the weight of a Conv2d is no parameter"):
        maps()
    model[2].rule = EpsilonRule()
    assert maps().abs().sum() > 0
