"""`VGGGamma`: each rule against its formula, blocks, batch norm, and use as an ordinary Zennit composite."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import alexnet, densenet121, resnet18, vgg11, vgg16
from torchvision.models.resnet import BasicBlock, ResNet
from zennit.attribution import Gradient
from zennit.composites import NameMapComposite
from zennit.core import Hook
from zennit.rules import Epsilon, Pass, ZBox

from tests.model_state import model_state
from tests.toys import subspaces, torchvision_model
from zennit_drsa import DisentangledAttributor, VGGGamma
from zennit_drsa.rules import BoundedInput, PixelBox, PositiveGamma, ZeroRule


def propagate(layer: nn.Module, rule: Hook, input: Tensor, relevance: Tensor):
    model = nn.Sequential(layer)
    return Gradient(model, NameMapComposite([(["0"], rule)]))(input, relevance)[1]


def dense(seed: int = 0) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(seed)
    layer = nn.Linear(5, 4).double()
    return layer, torch.rand(2, 5).double(), torch.randn(2, 4).double()


@pytest.mark.parametrize("gamma", [0.0, 0.1, 0.5])
def test_gamma_rule_by_its_formula(gamma):
    layer, a, r = dense()
    w, b = layer.weight.T, layer.bias
    expected = torch.zeros_like(a)
    for n in range(2):
        for k in range(4):
            modified = [w[j, k] + gamma * max(w[j, k], 0) for j in range(5)]
            z = sum(a[n, j] * modified[j] for j in range(5)) + b[k] + gamma * max(b[k], 0)
            for j in range(5):
                expected[n, j] += (a[n, j] * modified[j] / z * r[n, k]).detach()
    # The stabiliser of 1e-9 is the only difference.
    rules = [PositiveGamma(gamma), *([ZeroRule()] if gamma == 0 else [])]
    for rule in rules:
        torch.testing.assert_close(propagate(layer, rule, a, r), expected, rtol=1e-6, atol=1e-7)


def test_pixel_rule_by_its_formula_and_zennits():
    layer, x, r = dense()
    w = layer.weight.T
    x, low, high = 2 * x - 1, torch.tensor([[-1.0, -1, -2, -1, -1]]), torch.tensor([[1.0, 2, 1, 1, 1]])
    expected = torch.zeros_like(x)
    for n in range(2):
        for j in range(4):
            terms = [
                x[n, i] * w[i, j] - low[0, i] * w[i, j].clamp(min=0) - high[0, i] * w[i, j].clamp(max=0)
                for i in range(5)
            ]
            for i in range(5):
                expected[n, i] += (terms[i] / sum(terms) * r[n, j]).detach()
    ours = propagate(layer, PixelBox(low, high), x, r)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours, propagate(layer, ZBox(low, high, stabilizer=1e-9), x, r))


@pytest.mark.parametrize("rule", [PixelBox(0.0, 1.0), BoundedInput(0.0, 1.0)])
@pytest.mark.parametrize("layer", [nn.ReLU(), nn.AvgPool2d(2), nn.BatchNorm2d(3, affine=False).eval()])
def test_the_pixel_rule_needs_weights(layer, rule):
    x = torch.rand(2, 3, 4, 4)
    with pytest.raises(ValueError, match=f"needs a layer with weights, got {type(layer).__name__}"):
        propagate(layer, rule, x, torch.ones_like(layer(x)))


def test_gamma_by_block():
    model = vgg16(weights=None, init_weights=False, num_classes=2)
    composite, found = VGGGamma(), []
    ctx: dict[str, int] = {}
    for name, module in model.named_modules():
        rule = composite.module_map(ctx, name, module)
        if isinstance(module, nn.MaxPool2d):
            assert rule is None  # winner-take-all
        if isinstance(module, nn.Conv2d | nn.Linear):
            found.append(
                {PixelBox: "zB", ZeroRule: 0.0}.get(type(rule))
                if type(rule) is not PositiveGamma
                else rule.gamma
            )
    assert found == ["zB", 0.5, 0.5, 0.5, *[0.25] * 3, *[0.1] * 3, *[0.0] * 3, *[0.0] * 3]


@pytest.mark.parametrize("network", ["vgg11", "vgg11_bn"])
def test_relevance_is_conserved_without_biases(network):
    """Merged batch norm without shift has no bias either; then Σ R = y, but for the stabilisers."""
    model = torchvision_model(network).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = torch.zeros(module.num_features, dtype=torch.float64)
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter):
            nn.init.zeros_(bias)
    before = model_state(model)
    input = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    output, relevance = Gradient(model, VGGGamma())(input, lambda out: out.detach())
    assert model_state(model) == before
    torch.testing.assert_close(relevance.flatten(1).sum(1), output.sum(1), rtol=1e-4, atol=1e-8)


def test_a_second_forward_pass_is_not_explained_with_the_first_ones_graph():
    layer, a, r = dense()
    model = nn.Sequential(layer)
    attributor = Gradient(model, NameMapComposite([(["0"], PositiveGamma(0.5))]))
    with attributor:
        attributor(a, r)
        second = attributor(2 * a + 1, r)[1]
    torch.testing.assert_close(second, propagate(layer, PositiveGamma(0.5), 2 * a + 1, r))


def test_zero_rule_with_an_in_place_relu_behind_it_and_two_forward_passes():
    """The output is overwritten, and the graph of an earlier pass must not be used."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)).double()
    zennit = NameMapComposite([(["0", "2"], Epsilon(1e-9)), (["1"], Pass())])
    ours = NameMapComposite([(["0", "2"], ZeroRule()), (["1"], Pass())])
    relevance = torch.randn(2, 3).double()
    with Gradient(model, ours) as attributor:
        first = attributor(torch.rand(2, 5).double(), relevance)[1]
        input = torch.rand(2, 5).double()
        second = attributor(input, relevance)[1]
    assert not torch.equal(first, second)
    torch.testing.assert_close(second, Gradient(model, zennit)(input, relevance)[1])


class OwnResNet(ResNet):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    "model",
    [
        lambda: resnet18(num_classes=2),
        lambda: OwnResNet(BasicBlock, [1, 1, 1, 1], num_classes=2),
        lambda: nn.Sequential(resnet18(num_classes=2)),
        lambda: densenet121(num_classes=2),
    ],
    ids=["resnet18", "subclass", "wrapped", "densenet121"],
)
def test_networks_of_another_family_are_refused(model):
    network = model().eval()
    before = model_state(network)
    assert not VGGGamma.suits(network)
    with pytest.raises(ValueError, match=r"VGGGamma is for VGG .*doctor"):
        Gradient(network, VGGGamma())(torch.rand(1, 3, 32, 32), torch.ones(1, 2))
    assert model_state(network) == before
    first = next(name for name, module in network.named_modules() if isinstance(module, nn.Conv2d))
    wrapped = DisentangledAttributor(Gradient(network, VGGGamma()), first, subspaces(64))
    with pytest.raises(ValueError, match=r"VGGGamma is for VGG .*doctor"):
        wrapped(torch.rand(1, 3, 32, 32), torch.ones(1, 2))
    assert model_state(network) == before


def test_negative_inputs_of_the_rule_are_warned_about():
    torch.manual_seed(0)
    x = torch.rand(1, 3, 8, 8)
    for activation in (nn.ReLU(), nn.LeakyReLU(0.3)):
        head = [nn.Flatten(), nn.Linear(96, 3)]
        model = nn.Sequential(nn.Conv2d(3, 6, 3), activation, nn.Conv2d(6, 6, 3), nn.ReLU(), *head).eval()
        run = DisentangledAttributor(Gradient(model, VGGGamma((0.5,), low=0.0, high=1.0)), "3", subspaces(6))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.explain(x, 1)
        is_warned = any("has negative inputs" in str(w.message) for w in caught)
        assert is_warned == isinstance(activation, nn.LeakyReLU)


@pytest.mark.parametrize("factory", [vgg11, alexnet])
def test_chains_are_not_refused(factory):
    assert VGGGamma.suits(factory(num_classes=2))
    assert VGGGamma.suits(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)))
