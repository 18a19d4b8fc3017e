"""What `validate` refuses under rules, at the first use of a model: wrong maps without an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm
from zennit.attribution import Gradient
from zennit.canonizers import Canonizer
from zennit.composites import EpsilonGammaBox, EpsilonPlus, LayerMapComposite, NameMapComposite
from zennit.core import Composite, Hook
from zennit.rules import Epsilon, Norm, Pass, ZPlus

from tests.model_state import model_state
from tests.toys import small_input, small_model, subspaces, vectors
from zennit_drsa import (
    ConvNetGamma,
    DisentangledAttributor,
    DisentangledComposite,
    SubspaceFilter,
    VGGGamma,
    doctor,
)
from zennit_drsa._zennit import runs_with_input_alone
from zennit_drsa.doctor import validate
from zennit_drsa.rules import GeneralizedGamma, PixelBox, PositiveGamma, ZeroRule

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated", "ignore:.*negative inputs")
TARGET = torch.eye(5, dtype=torch.float64)[[1, 4]]


def of_linear(rule: Hook) -> Composite:
    return LayerMapComposite([(nn.ReLU, Pass()), (nn.Linear, rule)])


class Doubling(Canonizer):  # type: ignore[misc]
    """A canonizer that does not suit the model: it changes what the model computes."""

    def apply(self, root_module: Any) -> list[Canonizer]:
        instance = Doubling()
        instance.head, instance.weight = root_module.head, root_module.head.weight.data
        instance.register()
        return [instance]

    def register(self) -> None:
        self.head.weight.data = 2 * self.weight

    def remove(self) -> None:
        self.head.weight.data = self.weight


def test_canonizers_that_change_the_output():
    model, input = small_model(), small_input()
    before = model_state(model)
    composite = EpsilonPlus(canonizers=[Doubling()])
    run = DisentangledAttributor(Gradient(model, composite), "pool", subspaces(6))
    for _ in range(2):  # a model that was refused is refused again
        with pytest.raises(ValueError, match=r"changes the model's output by .*canonizers: Doubling\)"):
            run(input, TARGET)
    assert model_state(model) == before
    run.validated = True  # as switched off by a user who knows better
    assert run(input, TARGET)[1].shape == (2, 3, 3, 8, 8)
    assert model_state(model) == before


@pytest.mark.parametrize(
    "rule",
    [Epsilon(), ZPlus(), GeneralizedGamma(0.25), PositiveGamma(0.25), ZeroRule()],
    ids=lambda rule: type(rule).__name__,
)
def test_a_layer_inside_of_a_module_with_a_rule(rule):
    """Between the modules inside there are gradients, which would be filtered as if they were relevance."""
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)), nn.Linear(3, 2)).double()
    composite = NameMapComposite([(["0", "1"], rule)])
    x, start = torch.rand(2, 6, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    message = rf"'0\.0' is inside of 0 \(Sequential\), whose rule {type(rule).__name__} is for the whole"
    with Gradient(model, DisentangledComposite(composite, "0.0", subspaces(4), 0)) as attributor:
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                attributor(x, start)
    with pytest.raises(ValueError, match=message):
        DisentangledAttributor(Gradient(model, composite), "0.0", subspaces(4))(x, start)
    with pytest.raises(ValueError, match=message):
        validate(model, composite, "0.0", x)
    _, maps = DisentangledAttributor(Gradient(model, composite), "0", subspaces(3))(x, start)
    assert maps.shape == (2, 3, 6)


# ---------------------------------------------------------------------- arguments of a module


class Scaled(nn.Linear):
    """A linear layer with a further argument."""

    def forward(self, input: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(input if scale is None else input * scale)


class WithScale(nn.Module):
    """The further argument of `below` is left out, has its default, or is given by its place or name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below, self.act, self.head, self.how = Scaled(6, 8), nn.ReLU(), nn.Linear(8, 5), how
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.linspace(0.1, 3, 6).expand_as(x)
        call = {
            "not": lambda: self.below(x),
            "default": lambda: self.below(input=x, scale=None),
            "place": lambda: self.below(x, scale),
            "name": lambda: self.below(x, scale=scale),
        }[self.how]
        scores: Tensor = self.head(self.act(call()))
        return scores


def maps_with_scale(how: str, rule: Hook) -> Tensor:
    run = DisentangledAttributor(Gradient(WithScale(how), of_linear(rule)), "act", subspaces(8))
    return run.explain(vectors(), 1).maps


@pytest.mark.parametrize("rule", [Epsilon, PositiveGamma, lambda: PixelBox(-9.0, 9.0)])
def test_further_arguments_that_a_rule_would_leave_out(rule):
    assert torch.equal(maps_with_scale("default", rule()), maps_with_scale("not", rule()))
    for how in ("place", "name"):
        if not runs_with_input_alone(rule()):  # Zennit 1.0.0 hands all arguments on, and is right
            expected = maps_with_scale(how, ZeroRule())  # Epsilon with ε = 0
            torch.testing.assert_close(maps_with_scale(how, rule()), expected, rtol=1e-4, atol=1e-5)
            continue
        with pytest.raises(ValueError, match=r"'below' \(Scaled\) is called with more .* \(scale\), but its"):
            maps_with_scale(how, rule())
    # Rules that take the gradient of the layer serve further arguments.
    assert torch.equal(*(maps_with_scale(how, ZeroRule()) for how in ("place", "name")))


def test_keywords_without_the_first_argument():
    class Only(nn.ReLU):
        def forward(self, *, values: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(values)

    class Model(WithScale):
        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.head(self.act(values=self.below(x)))
            return scores

    model = Model("not")
    model.act = Only()
    run = DisentangledAttributor(Gradient(model, EpsilonPlus()), "below", subspaces(8))
    with pytest.raises(ValueError, match=r"Only is called with the keywords values only"):
        run.explain(vectors(), 1)
    plain = DisentangledAttributor(Gradient(model), "below", subspaces(8))
    assert plain.explain(vectors(), 1).maps.shape == (3, 3, 6)


# ---------------------------------------------------------------------- weights that are no parameters


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
    "VGGGamma": lambda: VGGGamma((0.5,), low=0.0, high=1.0),
    "EpsilonPlus": EpsilonPlus,
    "EpsilonGammaBox": lambda: EpsilonGammaBox(0.0, 1.0),
}


def network(middle: nn.Conv2d | None = None) -> Any:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Conv2d(6, 5, 1))
    if middle is not None:
        middle.load_state_dict(model[2].state_dict())
        model[2] = middle
    return model.eval()


def images() -> Tensor:
    return torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def conv_maps(model: nn.Module, composite: Any) -> Tensor:
    run = DisentangledAttributor(Gradient(model, composite), "1", subspaces(6, 2))
    return run.explain(images(), (1, 0, 0)).maps


@pytest.mark.parametrize("composite", COMPOSITES)
@pytest.mark.parametrize("derived", DERIVED)
def test_rules_that_exchange_parameters_of_derived_weights(derived, composite):
    model = network()
    for layer in (model[0], model[2]):
        DERIVED[derived](layer)
    before = model_state(model)
    with pytest.raises(ValueError, match=r"the weight of .* is no parameter.* Explain a copy"):
        conv_maps(model, COMPOSITES[composite]())
    assert model_state(model) == before


def test_rules_that_exchange_none_serve_derived_weights():
    derived, plain = network(), network()
    parametrizations.weight_norm(derived[2])
    as_it_is = LayerMapComposite([(nn.ReLU, Pass()), (nn.AdaptiveAvgPool2d, Norm()), (nn.Conv2d, Epsilon())])
    # Making the weight once or in every pass may round differently.
    torch.testing.assert_close(conv_maps(derived, as_it_is), conv_maps(plain, as_it_is))


class Standardised(nn.Conv2d):
    """A convolution that standardises its weight in every pass, as in BiT."""

    def standard(self) -> Tensor:
        w = self.weight
        return (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.conv2d(input, self.standard(), self.bias)


class Padded(nn.Conv2d):
    """One with code of its own that uses the weight."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(input, (1, 1, 1, 1)))


@pytest.mark.parametrize("composite", COMPOSITES)
def test_layers_that_make_other_weights(composite):
    model = network(Standardised(6, 6, 3))
    before = model_state(model)
    with pytest.raises(ValueError, match=r"layer '2' \(Standardised\) does not use its parameters"):
        conv_maps(model, COMPOSITES[composite]())
    assert model_state(model) == before
    found = doctor(nn.Sequential(*model, nn.Flatten()), COMPOSITES[composite](), images(), verbose=False)
    assert found.derived == ["2 (Standardised)"]
    assert not found.ok
    padded, plain = network(Padded(6, 6, 3)), network(nn.Conv2d(6, 6, 3, padding=1))
    torch.testing.assert_close(
        conv_maps(padded, COMPOSITES[composite]()), conv_maps(plain, COMPOSITES[composite]())
    )


def test_rules_without_other_weights_serve_standardised_layers():
    model, plain = network(Standardised(6, 6, 3)), network()
    plain[2].weight = nn.Parameter(model[2].standard().detach())
    torch.testing.assert_close(conv_maps(model, ConvNetGamma(0.0)), conv_maps(plain, ConvNetGamma(0.0)))


# ---------------------------------------------------------------------- what is not on the way


def test_validation_runs_once_for_a_model():
    model, runs = small_model(), []
    model.stem[0].register_forward_hook(lambda *_: runs.append(1))
    run = DisentangledAttributor(Gradient(model, EpsilonPlus()), "pool", subspaces(6))
    run(small_input(), TARGET)
    runs.clear()
    run(small_input(), TARGET)
    assert len(runs) == 1
    runs.clear()
    DisentangledAttributor(Gradient(model, EpsilonPlus()), "pool", subspaces(6), validated=True)(
        small_input(), TARGET
    )
    assert len(runs) == 1


def test_a_filter_by_itself_is_validated():
    composite = EpsilonPlus(canonizers=[SubspaceFilter("1", subspaces(6, 2), 0)])
    with pytest.raises(ValueError, match="does not use its parameters"):
        Gradient(network(Standardised(6, 6, 3)), composite)(images(), lambda output: output)
