"""An image explained alone equals the same image in a batch: real architectures at reduced size.

Weights are random, and so are the statistics and gains of every norm. Layers whose output comes from a batch
norm are among the layers of every family that has one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from drsa_core import Subspaces
from torch import Tensor, nn

pytest.importorskip("captum")
pytest.importorskip("zennit")
pytest.importorskip("timm")

import timm
from captum.attr import LRP, DeepLift, FeatureAblation, InputXGradient, IntegratedGradients, Saliency
from torchvision.models import DenseNet, MobileNetV2, resnet18, vgg11_bn
from zennit import attribution as zennit_attribution
from zennit.canonizers import SequentialMergeBatchNorm
from zennit.composites import BetaSmooth, DeconvNet, EpsilonPlus, GuidedBackprop
from zennit.torchvision import ResNetCanonizer, VGGCanonizer

from captum_drsa import DisentangledAttribution, IntegratedGradientsContext
from zennit_drsa import DisentangledAttributor, TimmCanonizer

pytestmark = pytest.mark.filterwarnings("ignore")  # what warnings say is tested elsewhere

N_CLASSES = 5
# float64: a batch may be summed in another order, which costs some of sixteen digits in twenty layers.
TOLERANCE = 1e-9


def _vgg() -> nn.Module:
    model = vgg11_bn(weights=None, init_weights=False, num_classes=N_CLASSES)
    model.avgpool, model.classifier = nn.AdaptiveAvgPool2d(1), nn.Sequential(nn.Linear(512, N_CLASSES))
    # The last blocks are the widest ones and show nothing that the first do not.
    model.features = model.features[:14]
    model.classifier[0] = nn.Linear(256, N_CLASSES)
    return model


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: resnet18(weights=None, num_classes=N_CLASSES),
    "densenet": lambda: DenseNet(8, (2, 2), 16, num_classes=N_CLASSES),
    "mobilenet_v2": lambda: MobileNetV2(num_classes=N_CLASSES, width_mult=0.25),
    "vgg11_bn": _vgg,
    "test_efficientnet": lambda: timm.create_model("test_efficientnet", num_classes=N_CLASSES),
    "efficientnet_lite0": lambda: timm.create_model("efficientnet_lite0", num_classes=N_CLASSES),
    "test_convnext": lambda: timm.create_model("test_convnext", num_classes=N_CLASSES),
    "test_vit": lambda: timm.create_model("test_vit", num_classes=N_CLASSES, img_size=32),
}
# Family, layer, axis of its features. Marked: the output comes from a batch norm.
LAYERS: list[tuple[str, str, int]] = [
    ("resnet18", "bn1", 1),  # batch norm
    ("resnet18", "layer2", 1),
    ("resnet18", "layer3.0.bn2", 1),  # batch norm, in a residual branch
    ("densenet", "features.norm0", 1),  # batch norm
    ("densenet", "features.denseblock1", 1),  # its forward runs all of its children
    ("densenet", "features.norm5", 1),  # batch norm, then a functional in-place ReLU
    ("mobilenet_v2", "features.2", 1),  # batch norm, as the block's last module
    ("mobilenet_v2", "features.3", 1),  # a residual sum with a batch norm
    ("vgg11_bn", "features.5", 1),  # batch norm, then an in-place ReLU
    ("vgg11_bn", "features.7", 1),
    ("test_efficientnet", "blocks.1", 1),  # batch norm
    ("efficientnet_lite0", "blocks.2", 1),  # batch norm
    ("test_convnext", "stages.1", 1),
    ("test_vit", "blocks.0", -1),
    ("test_vit", "blocks.0.norm1", -1),  # layer norm, in a residual branch
]


@cache
def network(family: str) -> nn.Module:
    """Seeded weights, norms with statistics and gains of their own, in evaluation mode and float64."""
    torch.manual_seed(0)
    model = BUILDERS[family]()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("running_var") or (name.endswith("weight") and tensor.ndim == 1):
                tensor.uniform_(0.5, 1.5)
            elif name.endswith(("running_mean", "bias")):
                tensor.normal_(0, 0.3)
            elif name.endswith("gamma"):
                tensor.uniform_(0.1, 0.5)  # layer scale starts at 1e-6, which shuts the branch
    return model.double().eval()


@cache
def blocks(family: str, layer: str, channel_dim: int) -> Subspaces:
    """Two orthonormal blocks that leave one feature out."""
    model, shapes = network(family), []
    handle = model.get_submodule(layer).register_forward_hook(lambda m, i, o: shapes.append(o.shape))
    with torch.no_grad():
        model(images())
    handle.remove()
    d = shapes[0][channel_dim]
    generator = torch.Generator().manual_seed(d)
    basis = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q
    return Subspaces(basis[:, : d - 1], [d // 2, d - 1 - d // 2])


def images() -> Tensor:
    """Two images of 32 × 32 pixels."""
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


TARGET = torch.tensor([3, 1])
_QUADRANTS = (torch.arange(32) // 16)[:, None] * 2 + torch.arange(32) // 16
MASK = _QUADRANTS.expand(1, 3, 32, 32).contiguous()

_CANONIZERS: dict[str, Callable[[], list[Any]]] = {
    "resnet18": lambda: [ResNetCanonizer()],
    "vgg11_bn": lambda: [VGGCanonizer()],
    "mobilenet_v2": lambda: [SequentialMergeBatchNorm()],
    "densenet": lambda: [],
    "test_efficientnet": lambda: [TimmCanonizer()],
    "efficientnet_lite0": lambda: [TimmCanonizer()],
}

ZENNIT: dict[str, Callable[[nn.Module, str], Any]] = {
    "gradient": lambda model, family: zennit_attribution.Gradient(model),
    # Noise of a batch is not the noise of its images; without noise the path is the same.
    "smooth_grad": lambda model, family: zennit_attribution.SmoothGrad(model, noise_level=0.0, n_iter=2),
    "integrated_gradients": lambda model, family: zennit_attribution.IntegratedGradients(model, n_iter=2),
    "beta_smooth": lambda model, family: zennit_attribution.Gradient(model, BetaSmooth()),
    "guided_backprop": lambda model, family: zennit_attribution.Gradient(model, GuidedBackprop()),
    "deconv_net": lambda model, family: zennit_attribution.Gradient(model, DeconvNet()),
    "epsilon_plus": lambda model, family: zennit_attribution.Gradient(
        model, EpsilonPlus(canonizers=_CANONIZERS[family]())
    ),
}
CAPTUM: dict[str, tuple[Callable[[nn.Module], Any], Any, dict[str, Any]]] = {
    "input_x_gradient": (InputXGradient, None, {}),
    "saliency": (Saliency, None, {}),
    "integrated_gradients": (IntegratedGradients, IntegratedGradientsContext(n_steps=2), {"n_steps": 2}),
    "deep_lift": (DeepLift, None, {}),
    "lrp": (LRP, None, {}),
    "feature_ablation": (FeatureAblation, "gradient", {"feature_mask": MASK}),
}
# Zennit's LRP wants a canonizer, its BetaSmooth and Captum's DeepLift modules that run once, Captum's LRP
# modules that have rules.
SUPPORTED = {
    "beta_smooth": set(BUILDERS) - {"resnet18"},
    "epsilon_plus": set(_CANONIZERS),
    "deep_lift": {"vgg11_bn", "densenet", "mobilenet_v2", "test_convnext", "test_vit"},
    "lrp": {"vgg11_bn"},
}


def explain(backend: str, method: str, case: tuple[str, str, int], x: Tensor, target: Tensor) -> Tensor:
    """Maps (N, K, 3, 32, 32)."""
    family, layer, channel_dim = case
    model = network(family)
    if backend == "captum":
        make, context, options = CAPTUM[method]
        wrapper = DisentangledAttribution(make(model), layer, blocks(*case), context, channel_dim=channel_dim)
        maps: Tensor = wrapper.attribute(x, target=target, **options)
        return maps
    options = {"context_steps": 2} if method == "integrated_gradients" else {}
    attributor = DisentangledAttributor(
        ZENNIT[method](model, family), layer, blocks(*case), channel_dim=channel_dim, **options
    )
    return attributor(x, nn.functional.one_hot(target, N_CLASSES).to(x))[1].detach()


CASES = [
    pytest.param(backend, method, case, id=f"{backend}_{method}-{case[0]}-{case[1]}")
    for backend, methods in (("zennit", ZENNIT), ("captum", CAPTUM))
    for method in methods
    for case in LAYERS
    if case[0] in SUPPORTED.get(method, set(BUILDERS))
]


@pytest.mark.parametrize(("backend", "method", "case"), CASES)
def test_an_image_alone_equals_the_image_in_a_batch(
    backend: str, method: str, case: tuple[str, str, int]
) -> None:
    x = images()
    together = explain(backend, method, case, x, TARGET)
    assert together.abs().amax() > 0
    for i in range(len(x)):
        alone = explain(backend, method, case, x[i : i + 1], TARGET[i : i + 1])
        tolerance = TOLERANCE * float(together.abs().max())
        torch.testing.assert_close(alone[0], together[i], rtol=0, atol=tolerance)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("case", [c for c in LAYERS if c[2] == 1], ids=lambda c: f"{c[0]}-{c[1]}")
@pytest.mark.parametrize("backend", ["zennit", "captum"])
def test_the_memory_format_of_the_input_changes_nothing(
    backend: str, case: tuple[str, str, int], n: int
) -> None:
    """Images in channels-last order have the same maps."""
    x, target = images()[:n], TARGET[:n]
    method = "gradient" if backend == "zennit" else "input_x_gradient"
    expected = explain(backend, method, case, x.repeat(2, 1, 1, 1), target.repeat(2))[:n]
    actual = explain(backend, method, case, x.to(memory_format=torch.channels_last), target)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))
