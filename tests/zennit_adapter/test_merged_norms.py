"""Merged batch norms with the ε of Keras: the canonized model has the same output, and `doctor` passes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import resnet18, vgg11_bn
from zennit.attribution import Gradient
from zennit.canonizers import Canonizer, SequentialMergeBatchNorm
from zennit.composites import EpsilonPlus
from zennit.torchvision import ResNetCanonizer

from tests.model_state import model_state
from tests.toys import randomise_batch_norm
from zennit_drsa import ConvNetGamma, DisentangledAttributor, TorchvisionCanonizer, VGGGamma, doctor
from zennit_drsa.doctor import validate


def network(build: Any) -> nn.Module:
    torch.manual_seed(0)
    model = randomise_batch_norm(build(num_classes=5)).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    return model


COMPOSITES: dict[str, Any] = {
    "Zennit's": (resnet18, lambda: EpsilonPlus(canonizers=[ResNetCanonizer()])),
    "ours": (resnet18, lambda: EpsilonPlus(canonizers=[TorchvisionCanonizer()])),
    "of the family": (resnet18, ConvNetGamma),
    "VGG": (vgg11_bn, VGGGamma),
    "sequential": (vgg11_bn, lambda: EpsilonPlus(canonizers=[SequentialMergeBatchNorm()])),
}


@pytest.mark.filterwarnings("ignore:the input ranges")
@pytest.mark.parametrize("name", COMPOSITES)
def test_the_output_stays(name: str) -> None:
    build, composite = COMPOSITES[name]
    model = network(build)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    before = model_state(model)
    assert doctor(model, composite(), x, verbose=False).logit_change <= 1e-5
    attributor = DisentangledAttributor(
        Gradient(model, composite()), "layer2" if build is resnet18 else "features.8"
    )
    with attributor:
        canonized = model(x).detach()
    assert model_state(model) == before
    expected = model(x).detach()
    assert (canonized - expected).abs().max() <= 1e-5 * expected.abs().max()
    validate(model, composite(), attributor.layer_name, x)
    assert model_state(model) == before


class Broken(Canonizer):  # type: ignore[misc]
    """Adds one to the bias of every linear layer."""

    module: Any
    bias: Any

    def apply(self, root_module: nn.Module) -> list[Any]:
        return [self.register(module) for module in root_module.modules() if isinstance(module, nn.Linear)]

    def register(self, module: Any) -> Broken:
        instance = Broken()
        instance.module, instance.bias = module, module.bias
        module.bias = nn.Parameter(module.bias + 1)
        return instance

    def remove(self) -> None:
        self.module.bias = self.bias


def test_a_canonizer_that_changes_the_output_is_refused_and_taken_back() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    before, x = model_state(model), torch.rand(2, 4)
    with pytest.raises(ValueError, match=r"changes the model's output by .* Broken"):
        validate(model, EpsilonPlus(canonizers=[Broken()]), "1", x)
    assert model_state(model) == before
    composite = EpsilonPlus(canonizers=[Broken()])
    with composite.context(model):
        with pytest.raises(ValueError, match="changes the model's output"):
            validate(model, composite, "1", x, registered=True)
        assert composite.handles
    assert model_state(model) == before
