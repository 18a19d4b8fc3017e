"""`TorchvisionCanonizer`: a canonical form of the same function, on which LRP-0 is gradient × input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.model_state import model_state

from .zoo import explain, image, without_biases

tv = pytest.importorskip("torchvision").models

from zennit.attribution import Gradient  # noqa: E402
from zennit.composites import EpsilonPlus, LayerMapComposite, layer_map_base  # noqa: E402
from zennit.rules import Epsilon  # noqa: E402
from zennit.types import Convolution  # noqa: E402

from zennit_drsa import DisentangledAttributor, TorchvisionCanonizer  # noqa: E402


class OwnDenseNet(tv.DenseNet):  # type: ignore[misc,name-defined]
    pass


def convnext() -> nn.Module:
    setting = tv.convnext.CNBlockConfig
    return tv.ConvNeXt([setting(16, 32, 1), setting(32, None, 1)], layer_scale=0.5, num_classes=10)


MODELS = {
    "convnext": convnext,
    "densenet": lambda: tv.DenseNet(8, (2, 2, 2, 2), 16, num_classes=10),
    "densenet subclass": lambda: OwnDenseNet(8, (2, 2), 16, num_classes=10),
    "efficientnet_b0": lambda: tv.efficientnet_b0(num_classes=10),
    "efficientnet_v2_s": lambda: tv.efficientnet_v2_s(num_classes=10),
    "mnasnet": lambda: tv.mnasnet0_5(num_classes=10),
    "mobilenet_v2": lambda: tv.mobilenet_v2(width_mult=0.35, num_classes=10),
    "mobilenet_v3": lambda: tv.mobilenet_v3_small(num_classes=10),
    "regnet_x": lambda: tv.regnet_x_400mf(num_classes=10),
    "regnet_y": lambda: tv.regnet_y_400mf(num_classes=10),
    "shufflenet": lambda: tv.shufflenet_v2_x0_5(num_classes=10),
}
# Here every activation is a ReLU, and no gate multiplies: LRP-0 is gradient × input.
RELU_MODELS = ("densenet", "densenet subclass", "mnasnet", "regnet_x", "shufflenet")


def network(name: str) -> nn.Module:
    """In double precision, with statistics and weights that are not trivial."""
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    with torch.no_grad():
        for key, tensor in (*model.named_buffers(), *model.named_parameters()):
            if key.endswith(("running_mean", "bias")):
                tensor.copy_(0.1 * torch.randn(tensor.shape))
            elif key.endswith("running_var") or (key.endswith("weight") and tensor.ndim == 1):
                tensor.copy_(0.5 + torch.rand(tensor.shape))
    return model


# EfficientNet's logits are 1e-12 without biases; the loss is proportional to the stabiliser.
def lrp_0(epsilon: float = 1e-24) -> LayerMapComposite:
    layers = [*layer_map_base(epsilon), ((Convolution, nn.Linear), Epsilon(epsilon=epsilon))]
    return LayerMapComposite(layers, canonizers=[TorchvisionCanonizer()])


@pytest.mark.parametrize("name", MODELS)
def test_logits_stay_relevance_is_conserved_and_the_model_comes_back(name):
    model, x = network(name), image(64, n=2).double()
    assert TorchvisionCanonizer.suits(model)
    before, expected = model_state(model), model(x).detach()
    (instance,) = TorchvisionCanonizer().apply(model)
    logits = model(x).detach()
    instance.remove()
    assert model_state(model) == before
    # The order of additions differs: rounding of float64 through some 100 layers.
    assert (logits - expected).abs().max() <= 1e-11 * expected.abs().max()
    logits, relevance = explain(without_biases(model), lrp_0(), x)
    error = (relevance.sum((1, 2, 3)) - logits[:, 3]).abs() / logits[:, 3].abs()
    # Without biases, relevance is lost to stabilisers only.
    assert error.max() <= 1e-4


@pytest.mark.parametrize("name", RELU_MODELS)
def test_lrp_0_is_gradient_times_input(name):
    model, x = network(name), image(64).double().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[0, 3], x)
    expected = gradient * x.detach()
    _, relevance = explain(model, lrp_0(), x.detach())
    assert (relevance - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_other_networks_are_named():
    model = tv.vgg11()
    assert not TorchvisionCanonizer.suits(model)
    with pytest.raises(ValueError, match=r"VGG that TorchvisionCanonizer knows.*VGGGamma"):
        TorchvisionCanonizer().apply(model)


def test_batch_statistics_cannot_be_merged():
    model = network("mnasnet").train()
    before = model_state(model)
    with pytest.raises(ValueError, match=r"batch norm layers\.1 .*model\.eval\(\)"):
        TorchvisionCanonizer().apply(model)
    assert model_state(model) == before


@pytest.mark.parametrize(
    ("canonizers", "dtype", "tolerance"),
    [([TorchvisionCanonizer()], torch.float32, 1e-4), ([], torch.float64, 1e-9)],
    ids=["explicit sums", "double precision"],
)
def test_contexts_at_a_layer_without_activation_do_not_depend_on_the_batch(canonizers, dtype, tolerance):
    """The output of a bottleneck of MobileNetV2 may be anywhere near zero, and c = R ⊘ a divides by it."""
    torch.manual_seed(1)
    model = tv.mobilenet_v2(num_classes=10).to(dtype).eval()
    x = image(64, n=4).to(dtype)
    attributor = DisentangledAttributor(Gradient(model, EpsilonPlus(canonizers=canonizers)), "features.5")
    together, alone = attributor.context(x, 3)[1], attributor.context(x[:1], 3)[1]
    assert (together[:1] - alone).abs().max() <= tolerance * together.abs().max()
