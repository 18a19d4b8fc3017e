"""What `doctor` suggests is done, literally, and passes; where nothing passes, the method it names runs."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.model_state import model_state

from .zoo import image, normed, timm

tv = pytest.importorskip("torchvision").models

import zennit.canonizers  # noqa: E402
import zennit.composites  # noqa: E402
import zennit.torchvision  # noqa: E402
from torchvision.models.resnet import BasicBlock, ResNet  # noqa: E402
from zennit.composites import EpsilonPlus  # noqa: E402

import zennit_drsa  # noqa: E402
from zennit_drsa import VGGGamma, doctor  # noqa: E402


class MyBlock(BasicBlock):  # type: ignore[misc]
    pass


class MyResNet(ResNet):  # type: ignore[misc]
    pass


class PooledResNet(ResNet):  # type: ignore[misc]
    """A ResNet that pools in its own code."""

    def pool(self, x):
        return x.mean((2, 3))

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.pool(self.layer4(self.layer3(self.layer2(self.layer1(x))))))


class RepairedResNet(PooledResNet):
    """The same, after what the suggestion says about pooling."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.own_pool = nn.AdaptiveAvgPool2d(1)

    def pool(self, x):
        return self.own_pool(x).flatten(1)


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 2, 32, batch_first=True)
    return nn.Sequential(nn.Flatten(2), nn.Linear(64 * 64, 64), nn.TransformerEncoder(layer, 1), nn.Flatten())


def efficientnet() -> nn.Module:
    config = tv.efficientnet.MBConvConfig
    blocks = [config(1, 3, 1, 32, 16, 1, 1.0, 1.0), config(6, 3, 2, 16, 24, 2, 1.0, 1.0)]
    return tv.EfficientNet(blocks, dropout=0.1, num_classes=10)


def convnext() -> nn.Module:
    setting = tv.convnext.CNBlockConfig
    return tv.ConvNeXt([setting(16, 32, 1), setting(32, None, 1)], layer_scale=0.5, num_classes=10)


TIMM, TORCHVISION = "zennit_drsa.TimmCanonizer()", "zennit_drsa.TorchvisionCanonizer()"
MERGE = "zennit.canonizers.SequentialMergeBatchNorm()"
CANONIZERS = {
    "resnet18": (lambda: tv.resnet18(num_classes=10), TORCHVISION),
    "a wrapped one": (lambda: nn.Sequential(MyResNet(MyBlock, [1, 1, 1, 1], num_classes=10)), TORCHVISION),
    "vgg11_bn": (lambda: tv.vgg11_bn(num_classes=10), MERGE),
    "googlenet": (lambda: tv.googlenet(num_classes=10, init_weights=False), MERGE),
    "efficientnet": (efficientnet, TORCHVISION),
    "densenet": (lambda: tv.DenseNet(8, (2, 2, 2, 2), 16, num_classes=10), TORCHVISION),
    "convnext": (convnext, TORCHVISION),
    "shufflenet": (lambda: tv.shufflenet_v2_x0_5(num_classes=10), TORCHVISION),
    "timm resnet": (lambda: normed("resnet18"), TIMM),
    "timm convnext": (lambda: normed("convnext_atto"), TIMM),
}
TRANSFORMERS = {
    "torchvision vit": lambda: tv.VisionTransformer(64, 16, 1, 2, 32, 64, num_classes=10),
    "torchvision swin": lambda: tv.SwinTransformer([4, 4], 16, [1, 1], [2, 2], [4, 4], num_classes=10),
    "timm swin": lambda: timm.models.SwinTransformer(
        64, 4, embed_dim=16, depths=(1, 1), num_heads=(2, 2), window_size=4, num_classes=10
    ),
}
OTHERWISE = {
    "encoder": (transformer, "attention"),
    "mixer": (
        lambda: timm.models.MlpMixer(10, img_size=64, patch_size=32, num_blocks=1, embed_dim=32),
        "nothing here",
    ),
}


def settled(model: nn.Module) -> nn.Module:
    """Running statistics that are not trivial, and evaluation mode."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            assert module.running_var is not None
            module.running_mean.copy_(0.1 * torch.randn(module.num_features, generator=generator))
            module.running_var.copy_(0.5 + torch.rand(module.num_features, generator=generator))
    return model.eval()


def examine(model, composite):
    before = model_state(model)
    diagnosis = doctor(model, composite, image(64, n=2), verbose=False)
    assert model_state(model) == before
    return diagnosis


def suggested(diagnosis) -> EpsilonPlus:
    """The composite with what the suggestion names, read from its text."""
    (code,) = re.findall(r"canonizers=\[(.*?)\]", diagnosis.suggestion)
    return EpsilonPlus(canonizers=[eval(code, {"zennit": zennit, "zennit_drsa": zennit_drsa})])


@pytest.mark.parametrize("name", CANONIZERS)
def test_the_canonizer_that_is_suggested_passes(name):
    build, expected = CANONIZERS[name]
    torch.manual_seed(0)
    model = settled(build())
    plain = examine(model, EpsilonPlus())
    assert not plain.ok
    assert plain.suggestion == f"give the composite canonizers=[{expected}]"
    after = examine(model, suggested(plain))
    assert after.ok, str(after)
    assert after.suggestion is None


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_are_sent_to_their_composite(name):
    torch.manual_seed(0)
    model = TRANSFORMERS[name]().eval()
    nn.init.normal_(next(p for p in reversed(list(model.parameters())) if p.ndim == 2))  # may be zeros
    suggestion = str(examine(model, EpsilonPlus()).suggestion)
    assert "use zennit_drsa.TransformerGamma()" in suggestion
    assert examine(model, zennit_drsa.TransformerGamma()).ok


def test_rules_that_the_users_composite_lacks_are_suggested():
    torch.manual_seed(0)
    model = settled(tv.resnet18(num_classes=10))
    diagnosis = examine(model, zennit.composites.NameMapComposite([]))
    assert diagnosis.suggestion == f"use zennit.composites.EpsilonPlus(canonizers=[{TORCHVISION}])"
    assert examine(model, suggested(diagnosis)).ok


def test_what_a_canonizer_leaves_is_named():
    torch.manual_seed(0)
    diagnosis = examine(settled(PooledResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)), EpsilonPlus())
    assert "what is left ((model) (PooledResNet: mean) has no rule)" in str(diagnosis.suggestion)
    assert "torch.nn.AdaptiveAvgPool2d for pooling" in str(diagnosis.suggestion)
    repaired = settled(RepairedResNet(BasicBlock, [1, 1, 1, 1], num_classes=10))
    assert examine(repaired, suggested(diagnosis)).ok


@pytest.mark.parametrize("name", OTHERWISE)
def test_where_lrp_has_no_rules_another_method_is_named_and_runs(name):
    captum_attr = pytest.importorskip("captum.attr")
    from drsa_core import Subspaces

    from captum_drsa import DisentangledAttribution

    build, reason = OTHERWISE[name]
    torch.manual_seed(0)
    model = build().eval()
    suggestion = str(examine(model, EpsilonPlus()).suggestion)
    assert reason in suggestion
    assert "DisentangledAttribution(captum.attr.InputXGradient(model), layer, subspaces)" in suggestion
    x = image(64, n=2)
    layer = {"encoder": "2.layers.0.norm2"}.get(name, "norm")
    (width,) = model.get_submodule(layer).normalized_shape
    subspaces = Subspaces(torch.eye(width), [width // 2, width // 2])
    attribution = DisentangledAttribution(captum_attr.InputXGradient(model), layer, subspaces, channel_dim=-1)
    maps = attribution.attribute(x, target=1)
    assert maps.shape == (2, 2, 3, 64, 64)
    assert bool(maps.isfinite().all())


def test_a_canonizer_that_destroys_the_model_is_never_suggested_and_the_error_has_a_note():
    torch.manual_seed(0)
    model = settled(tv.DenseNet(8, (2, 2), 16, num_classes=10))
    before = model_state(model)
    composite = EpsilonPlus(canonizers=[zennit.canonizers.SequentialMergeBatchNorm()])
    try:
        suggestion = doctor(model, composite, image(64), verbose=False).suggestion
    except RuntimeError as error:
        suggestion = " ".join(error.__notes__)
    assert TORCHVISION in str(suggestion)
    assert model_state(model) == before


def test_vgg_gamma_on_a_resnet_is_refused_with_what_suits():
    model = settled(tv.resnet18(num_classes=10))
    before = model_state(model)
    with pytest.raises(ValueError, match=r"VGGGamma is for VGG.*doctor") as caught:
        doctor(model, VGGGamma(), image(64), verbose=False)
    assert any(TORCHVISION in note for note in caught.value.__notes__)
    assert model_state(model) == before
