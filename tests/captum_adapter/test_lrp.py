"""LRP against a literal backward pass, against Captum's own map, and against Zennit with the same rules."""

from __future__ import annotations

import copy

import pytest
import torch
from captum.attr import LRP, LayerLRP
from captum.attr._utils.lrp_rules import EpsilonRule, GammaRule
from drsa_core import context_from_relevance, filter_relevance
from torch import Tensor, nn

from captum_drsa import DisentangledAttribution, LRPContext
from tests.captum_adapter.networks import conv_net, images, subspaces
from tests.closeness import assert_same
from tests.model_state import model_state

pytestmark = pytest.mark.filterwarnings("ignore:Input Tensor 0 did not already require gradients")


class Net(nn.Module):
    """Two linear layers and a head, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.relu_one = nn.Linear(6, 9), nn.ReLU()
        self.two, self.relu_two = nn.Linear(9, 8), nn.ReLU()
        self.head = nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor):
        return self.head(self.relu_two(self.two(self.relu_one(self.one(x)))))


def propagate(layer: nn.Linear, a: Tensor, relevance: Tensor, gamma: float) -> Tensor:
    """R_j = Σ_k a_j (w_jk + γw⁺_jk) / Σ_0,j (…) R_k (Note A). Captum's rule leaves the bias as it is."""
    w = layer.weight + gamma * layer.weight.clamp(min=0)
    z = w @ a + layer.bias
    result = torch.zeros_like(a)
    for j in range(len(a)):
        for k in range(len(z)):
            result[j] += a[j] * w[k, j] / z[k] * relevance[k]
    return result


def with_rules(model: Net, gamma: float) -> Net:
    for layer in (model.one, model.two):
        layer.rule = GammaRule(gamma)
    model.head.rule = EpsilonRule(1e-12)
    return model


@pytest.mark.parametrize("gamma", [0.0, 0.25])
@pytest.mark.parametrize("layer", ["relu_one", "relu_two"])
def test_filtered_pass_is_the_literal_one(layer: str, gamma: float) -> None:
    model = Net().eval()
    x = torch.rand(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    n_features = {"relu_one": 9, "relu_two": 8}[layer]
    u = subspaces(n_features, dtype=torch.float64)
    da = DisentangledAttribution(LRP(with_rules(model, gamma)), layer, u)
    maps = da.attribute(x, target=2)
    contexts = da.context(x, 2)[1]
    with torch.no_grad():
        for n in range(2):
            one = model.relu_one(model.one(x[n]))
            two = model.relu_two(model.two(one))
            output = model.head(two)
            relevance = torch.where(torch.arange(4) == 2, output, 0)
            at_two = propagate(model.head, two, relevance, 0.0)
            for k, block in enumerate(u.blocks):
                projector = block @ block.T
                if layer == "relu_two":
                    c = torch.where(two != 0, at_two / torch.where(two != 0, two, 1), 0)
                    at_one = propagate(model.two, one, two * (projector @ c), gamma)
                else:
                    whole = propagate(model.two, one, at_two, gamma)
                    c = torch.where(one != 0, whole / torch.where(one != 0, one, 1), 0)
                    at_one = one * (projector @ c)
                expected = propagate(model.one, x[n], at_one, gamma)
                # Captum stabilises denominators by 1e-9.
                torch.testing.assert_close(maps[n, k], expected, rtol=1e-6, atol=1e-9)
                torch.testing.assert_close(contexts[n], c, rtol=1e-6, atol=1e-9)


def conv_rules(model):
    model.features[0].rule = GammaRule(0.5)
    model.features[3].rule = GammaRule(0.25)
    model.top[0].rule = EpsilonRule(1e-6)
    return model


@pytest.mark.parametrize(
    "layer", ["features.1", "features.2", "features.3", "features.4", "features", "top.1", "top"]
)
def test_parts_add_up_to_captums_own_map(layer: str) -> None:
    """Σ_k R_pk = R_p after ReLU, pooling, convolution, for containers; with rules that change the weights."""
    model, x = conv_net(), images()
    n_features = {"features.1": 6, "features.2": 6}.get(layer, 10 if "top" in layer else 8)
    split = DisentangledAttribution(LRP(conv_rules(model)), layer, subspaces(n_features)).attribute(
        x, target=[0, 3]
    )
    whole = LRP(conv_rules(copy.deepcopy(model))).attribute(x, target=[0, 3]).detach()
    assert (split.sum(1) - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_context_is_that_of_layer_lrp() -> None:
    """c ⊙ a is the relevance that LayerLRP gives at the input of the next layer."""
    model, x = conv_net(), images()
    a, c = DisentangledAttribution(LRP(conv_rules(model)), "features.4").context(x, 3)
    torch.testing.assert_close(a, model.features(x).detach())
    reference = conv_rules(copy.deepcopy(model))
    relevance = LayerLRP(reference, reference.top[0]).attribute(x, target=3, attribute_to_layer_input=True)
    relevance = (relevance[0] if isinstance(relevance, tuple) else relevance).detach()
    assert (a * c - relevance).abs().max() <= 1e-5 * relevance.abs().max()
    assert not c[a == 0].any()
    torch.testing.assert_close(c, context_from_relevance(a, relevance), rtol=1e-3, atol=1e-6)


def test_conservation_and_delta() -> None:
    """Without biases Σ_p R_pk = R_k; delta is what is missing, and Σ_k R_k = y."""
    model, x = conv_net(), images()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    da = DisentangledAttribution(LRP(model), "features.4", subspaces(8))
    maps, delta = da.attribute(x, target=1, return_convergence_delta=True)
    relevance = da.concept_relevance(x, 1)
    torch.testing.assert_close(delta, relevance - maps.flatten(2).sum(2), rtol=1e-4, atol=1e-6)
    assert delta.abs().max() <= 1e-4 * relevance.abs().max()
    torch.testing.assert_close(relevance.sum(1), model(x)[:, 1].detach(), rtol=1e-4, atol=1e-6)


def test_difference_of_logits_as_initial_relevance() -> None:
    """LRP is linear in the initial relevance: the maps of y_3 − y_1 are those of y_3 minus those of y_1."""
    model, x = conv_net(), images()
    da = DisentangledAttribution(LRP(conv_rules(model)), "features.4", subspaces(8))
    difference = da.attribute(x, target=lambda y: y[:, 3] - y[:, 1])
    expected = da.attribute(x, target=3) - da.attribute(x, target=1)
    torch.testing.assert_close(difference, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


def test_rules_of_the_user_survive_and_repeated_calls_agree() -> None:
    """Captum takes the user's rules away after a call; here they stay, and so does the result."""
    model, x = conv_rules(conv_net()), images()
    before = model_state(model)
    da = DisentangledAttribution(LRP(model), "features.4", subspaces(8))
    first, second = da.attribute(x, target=1), da.attribute(x, target=1)
    assert_same(first, second)
    assert model_state(model) == before
    assert isinstance(model.features[0].rule, GammaRule)
    assert set(vars(model.features[0].rule)) == set(vars(GammaRule(0.5)))


def test_another_context_than_lrps() -> None:
    """context_method replaces c; the way down stays LRP."""
    model, x = conv_net(), images()
    own = DisentangledAttribution(LRP(model), "features.4", subspaces(8)).attribute(x, target=1)
    same = DisentangledAttribution(
        LRP(model), "features.4", subspaces(8), context_method=LRPContext(LRP(model))
    ).attribute(x, target=1)
    other = DisentangledAttribution(
        LRP(model), "features.4", subspaces(8), context_method="integrated_gradients"
    ).attribute(x, target=1)
    assert_same(own, same)
    assert not torch.allclose(own, other, rtol=1e-2)


def test_layer_lrp_as_context_leaves_the_rules_to_the_maps() -> None:
    """Captum takes the rules off the model after each call, so that the maps were those of its defaults."""
    model = with_rules(Net().eval(), 0.5)
    x = torch.rand(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u = subspaces(8, dtype=torch.float64)
    expected = DisentangledAttribution(LRP(model), "two", u).attribute(x, target=1)
    by_layer = DisentangledAttribution(LRP(model), "two", u, context_method=LayerLRP(model, model.two))
    torch.testing.assert_close(by_layer.attribute(x, target=1), expected)
    assert isinstance(model.one.rule, GammaRule)


def test_relevance_on_inactive_neurons_is_reported() -> None:
    """A rule of the user's that leaves relevance on zero activations: the share that is lost is named."""

    class Flat(EpsilonRule):  # type: ignore[misc]
        """Relevance to all inputs alike, active or not."""

        def _create_backward_hook_input(self, inputs: Tensor):
            return lambda grad: torch.ones_like(grad)

    model, x = conv_net(), images()
    model.top[0].rule = Flat()
    with pytest.warns(UserWarning, match="sits on zero activations"):
        DisentangledAttribution(LRP(model), "features.4", subspaces(8)).attribute(x, target=1)


@pytest.mark.parametrize("gamma", [None, 0.25])
def test_captum_and_zennit_give_the_same_maps_on_vgg11(gamma: float | None) -> None:
    """The same rules and the same virtual layer in two libraries: the K maps agree to 1e-5."""
    pytest.importorskip("zennit")
    torchvision = pytest.importorskip("torchvision")
    from zennit.composites import LayerMapComposite, SpecialFirstLayerMapComposite
    from zennit.rules import Epsilon, Gamma, Pass
    from zennit.types import Activation, AvgPool, Convolution, Linear

    torch.manual_seed(0)
    model = torchvision.models.vgg11(weights=None).eval()
    del model.classifier[3:6]  # 100 million weights that add nothing to the comparison
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # for Zennit
        # The libraries differ in what γ does to biases; there they stay 0, as torchvision has them.
        if gamma is None and getattr(module, "bias", None) is not None:
            module.bias.normal_(0, 0.02)
    x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    u = subspaces(512, 4)
    if gamma is not None:
        for convolution in [m for m in model.features if isinstance(m, nn.Conv2d)][1:]:
            convolution.rule = GammaRule(gamma)  # not the first: Captum's γ is for positive inputs
    maps = DisentangledAttribution(LRP(model), "features.12", u).attribute(x, target=7)

    # Captum's default stabiliser is 1e-9.
    rules = [(Activation, Pass()), (AvgPool, Epsilon(1e-9)), (Linear, Epsilon(1e-9))]
    convolutions = Epsilon(1e-9) if gamma is None else Gamma(gamma, stabilizer=1e-9)
    composite: LayerMapComposite = SpecialFirstLayerMapComposite(
        [(Convolution, convolutions), *rules], [(Convolution, Epsilon(1e-9))]
    )
    pixels = x.clone().requires_grad_()
    found: list[Tensor] = []
    with composite.context(model) as modified:
        handle = model.features[12].register_forward_hook(lambda _, __, output: found.append(output))
        output = modified(pixels)
        handle.remove()
        initial = torch.zeros_like(output)
        initial[:, 7] = output[:, 7].detach()
        (relevance,) = torch.autograd.grad(output, found[0], initial, retain_graph=True)
        filtered = filter_relevance(found[0].detach(), relevance, u)
        expected = torch.stack(
            [torch.autograd.grad(found[0], pixels, part, retain_graph=True)[0] for part in filtered], dim=1
        )
    assert (maps - expected).abs().max() <= 1e-5 * expected.abs().max()
