"""`TimmCanonizer`: a canonical form of the same function, on which LRP-0 is gradient × input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.model_state import model_state

from .zoo import explain, image, normed, timm, without_biases

from zennit.attribution import Gradient  # isort: skip
from zennit.composites import BetaSmooth, GuidedBackprop  # isort: skip
from zennit.composites import LayerMapComposite, layer_map_base  # isort: skip
from zennit.core import Composite  # isort: skip
from zennit.layer import Sum  # isort: skip
from zennit.rules import Epsilon  # isort: skip
from zennit.types import Convolution  # isort: skip
from zennit_drsa import DisentangledAttributor, DisentangledComposite, NFNetCanonizer  # isort: skip
from zennit_drsa import TimmCanonizer, TransformerCanonizer, TransformerGamma  # isort: skip

# All of the families that are supported, the smallest of each kind of block.
MODELS = {
    "tf_efficientnet_lite0": {},
    "efficientnet_b0": {},
    "tf_efficientnetv2_b0": {},
    "mobilenetv2_100": {},
    "mobilenetv3_small_050": {},
    "mobilenetv4_conv_small": {},
    "resnet18": {},
    "resnet26d": {},
    "seresnet18": {},
    "ecaresnet26t": {},
    "resnext50_32x4d": {"layers": (1, 1, 1, 1)},
    "seresnet50": {"layers": (1, 1, 1, 1)},
    "regnetx_002": {},
    "regnety_002": {},
    "regnetv_040": {},
    "regnetz_005": {},
    "densenet121": {"block_config": (2, 2, 2, 2)},
    "convnext_atto": {},
    "convnext_femto_ols": {},
}
# Here every activation is a ReLU, and no gate multiplies: LRP-0 is gradient × input.
RELU_MODELS = ("resnet18", "resnet26d", "resnext50_32x4d", "regnetx_002", "densenet121")


def lrp_0(epsilon: float = 1e-12) -> LayerMapComposite:
    layers = [*layer_map_base(epsilon), ((Convolution, nn.Linear), Epsilon(epsilon=epsilon))]
    return LayerMapComposite(layers, canonizers=[TimmCanonizer()])


@pytest.mark.parametrize("name", MODELS)
def test_logits_stay_relevance_is_conserved_and_the_model_comes_back(name):
    model, x = normed(name, **MODELS[name]), image(64, n=2)
    before, expected = model_state(model), model(x).detach()
    (instance,) = TimmCanonizer().apply(model)
    logits = model(x).detach()
    instance.remove()
    assert model_state(model) == before
    model, x = model.double(), x.double()
    exact = model(x).detach()
    # Float32 rounds through up to 80 layers: the canonical form is as close to the exact logits as the model
    # itself.
    own_error, error = ((y - exact).abs().max() for y in (expected, logits))
    assert error <= 3 * own_error + 1e-6 * exact.abs().max()
    logits, relevance = explain(without_biases(model), lrp_0(1e-14), x)
    assert (logits - model(x)).abs().max() <= 1e-12 * logits.abs().max()
    error = (relevance.sum((1, 2, 3)) - logits[:, 3]).abs() / logits[:, 3].abs()
    assert error.max() <= 1e-4


@pytest.mark.parametrize("name", RELU_MODELS)
def test_lrp_0_is_gradient_times_input(name):
    model, x = normed(name, **MODELS[name]).double(), image(48).double().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[0, 3], x)
    expected = gradient * x.detach()
    _, relevance = explain(model, lrp_0(1e-14), x.detach())
    assert (relevance - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_squeeze_excite_is_a_gate():
    # Gradient × input with the gates held constant: what LRP-0 is on a ReLU network with gates.
    model, x = normed("seresnet18").double(), image(48).double().requires_grad_()
    gates = [module for module in model.modules() if type(module).__name__ == "SEModule"]
    assert gates

    def constant(module, args, output):
        (z,) = args
        return z * (output / z).detach()

    handles = [gate.register_forward_hook(constant) for gate in gates]
    (gradient,) = torch.autograd.grad(model(x)[0, 3], x)
    for handle in handles:
        handle.remove()
    expected = gradient * x.detach()
    _, relevance = explain(model, lrp_0(1e-14), x.detach())
    assert (relevance - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_layer_norm_is_linear_with_its_deviation_held_constant():
    from drsa_core.lrp import linear_norm
    from timm.layers import LayerNorm, LayerNorm2d

    for norm, shape, dim in ((LayerNorm(6), (2, 4, 6), -1), (LayerNorm2d(6), (2, 6, 3, 3), 1)):
        torch.manual_seed(0)
        norm.double()
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        output = linear_norm(norm)(x)
        assert torch.allclose(output, norm(x), rtol=1e-12)
        start = torch.randn_like(output)
        (relevance,) = torch.autograd.grad(output, x, start)
        # Literally: y_k = Σ_j x_j w_jk + b_k with w_jk = (δ_jk − 1/D) weight_k / σ, R_j = Σ_k x_j w_jk / y_k
        # R_k.
        rows = x.detach().movedim(dim, -1)
        sigma = (rows.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        w = (torch.eye(6, dtype=torch.float64) - 1 / 6) * norm.weight.detach()
        ratio = (start / output.detach()).movedim(dim, -1) / sigma
        expected = (rows * (ratio @ w.T)).movedim(-1, dim)
        assert torch.allclose(relevance, expected, rtol=1e-9, atol=1e-12)


def test_densenet_norms_without_a_convolution_before_them_become_explicit():
    model = normed("densenet121", **MODELS["densenet121"])
    first = model.get_submodule("features.denseblock1.denselayer1.norm1")
    (instance,) = TimmCanonizer().apply(model)
    explicit = model.get_submodule("features.denseblock1.denselayer1.norm1")
    assert isinstance(explicit.get_submodule("affine"), nn.Conv2d)
    instance.remove()
    assert model.get_submodule("features.denseblock1.denselayer1.norm1") is first


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_model_comes_back_after_an_error_while_canonizing(error, monkeypatch):
    model = normed("resnet18")
    before, calls = model_state(model), []

    def fail(*args):
        calls.append(args)
        if len(calls) == 5:
            raise error
        return original(*args)

    original = TimmCanonizer._sum
    monkeypatch.setattr(TimmCanonizer, "_sum", fail)
    with pytest.raises(error):
        TimmCanonizer().apply(model)
    assert len(calls) == 5
    assert model_state(model) == before


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("test_vit", "no network in this VisionTransformer.*EfficientNet"),
        ("test_nfnet", "NFNetGamma"),
        ("resnet50_gn", "bn1 is a GroupNorm"),
        ("efficientnet_cc_b0_4e", r"blocks\.4\.0 is a CondConvResidual"),
        ("convnextv2_atto", r"stages\.0\.blocks\.0\.mlp is a GlobalResponseNormMlp"),
        ("skresnet18", r"layer1\.0 is a SelectiveKernelBasic"),
        ("resnetblur18", r"maxpool\.1 is a BlurPool2d"),
    ],
)
def test_what_has_no_canonical_form_is_named(name, match):
    model = timm.create_model(name).eval()
    before = model_state(model)
    with pytest.raises(ValueError, match=match):
        TimmCanonizer().apply(model)
    assert model_state(model) == before


def test_an_unknown_attention_layer_is_named():
    model = timm.create_model("resnet18", block_args={"attn_layer": "gc"}).eval()
    with pytest.raises(ValueError, match=r"layer1\.0\.se is a GlobalContext.*SEModule"):
        TimmCanonizer().apply(model)


def test_subclasses_that_inherit_forward_are_canonized_like_their_parents():
    class OwnBlock(timm.models.resnet.BasicBlock):  # type: ignore[misc]
        pass

    class OwnNet(timm.models.resnet.ResNet):  # type: ignore[misc]
        pass

    model = OwnNet(OwnBlock, (1, 1, 1, 1), num_classes=10).eval()
    assert TimmCanonizer.suits(model)
    (instance,) = TimmCanonizer().apply(model)
    sums = sum(isinstance(module, Sum) for module in model.modules())
    instance.remove()
    assert sums == 4


@pytest.mark.parametrize(
    ("name", "canonizer", "layer", "dim"),
    [
        ("test_efficientnet", TimmCanonizer, "conv_stem", 1),
        ("test_nfnet", NFNetCanonizer, "stem", 1),
        ("test_vit", TransformerCanonizer, "blocks.1", -1),
    ],
)
@pytest.mark.parametrize("rules", [Composite, GuidedBackprop, BetaSmooth])
def test_gradients_need_a_model_whose_backward_pass_is_one(name, canonizer, layer, dim, rules):
    model, x = timm.create_model(name, num_classes=5).eval(), image(160)
    before = model_state(model)
    run = DisentangledAttributor(Gradient(model, rules(canonizers=[canonizer()])), layer, channel_dim=dim)
    with pytest.raises(ValueError, match=f"{canonizer.__name__} makes modules .* hand relevance on"):
        run.context(x, 1)
    filtered = DisentangledComposite(rules(canonizers=[canonizer()]), layer, None, channel_dim=dim)
    with pytest.raises(ValueError, match="Leave the canonizer out"):
        filtered.register(model)
    assert model_state(model) == before


def test_a_canonizer_that_leaves_gradients_as_they_are_goes_with_them():
    model, x = timm.create_model("test_resnet", num_classes=5).eval(), image(160)
    canonized = DisentangledAttributor(Gradient(model, BetaSmooth(canonizers=[TimmCanonizer()])), "layer1")
    plain = DisentangledAttributor(Gradient(model, BetaSmooth()), "layer1")
    torch.testing.assert_close(canonized.context(x, 1)[1], plain.context(x, 1)[1], rtol=1e-3, atol=1e-6)


def test_inactive_rules_do_not_carry_relevance():
    model, x = timm.create_model("test_vit", num_classes=5).eval(), image(160)
    run = DisentangledAttributor(Gradient(model, TransformerGamma()), "blocks.1", channel_dim=-1)
    with run:
        run.context(x, 1)
        with run.inactive(), pytest.raises(ValueError, match="no rule that carries relevance is active"):
            run.context(x, 1)
