"""A family of models is one canonizer in `CANONIZERS`: `doctor` suggests it, `ConvNetGamma` uses it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from zennit.composites import EpsilonPlus

from tests.model_state import model_state
from zennit_drsa import ConvNetGamma, doctor
from zennit_drsa.canonizers import CANONIZERS, NetworkCanonizer

timm = pytest.importorskip("timm")
tv = pytest.importorskip("torchvision").models


class Twin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.a(x) + self.b(x)
        return result


class TwinCanonizer(NetworkCanonizer):
    """The sum of `Twin` made explicit."""

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        return any(isinstance(module, Twin) for module in model.modules())

    def register(self, root_module: nn.Module) -> None:
        for module in root_module.modules():
            if isinstance(module, Twin):
                self._sum(module)


def test_a_canonizer_of_ones_own_is_all_that_a_family_needs():
    torch.manual_seed(0)
    model = nn.Sequential(Twin(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()
    x = torch.rand(2, 3, 6, 6)
    before = doctor(model, EpsilonPlus(), x, verbose=False)
    assert not before.ok
    assert "TwinCanonizer" not in str(before.suggestion)
    CANONIZERS.append(TwinCanonizer)
    try:
        found = doctor(model, EpsilonPlus(), x, verbose=False)
        assert found.suggestion == "give the composite canonizers=[tests.TwinCanonizer()]"
        assert doctor(model, ConvNetGamma(0.25), x, verbose=False).ok
    finally:
        CANONIZERS.remove(TwinCanonizer)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (
            lambda: timm.create_model("resnet33ts"),
            "the model is a ByobNet",
        ),  # no `ResNet` in spite of its name
        (lambda: timm.create_model("test_mambaout"), "the model is a MambaOut"),
        (lambda: nn.Sequential(tv.video.r3d_18()), "0 is a VideoResNet"),
        (lambda: tv.inception_v3(init_weights=False), "the model is a Inception3"),
    ],
)
def test_networks_of_the_libraries_without_a_canonizer_are_refused(build, named):
    model = build().eval()
    before = model_state(model)
    with pytest.raises(ValueError, match=rf"{named}, for which no canonizer is known.*doctor"):
        ConvNetGamma().register(model)
    assert model_state(model) == before


@pytest.mark.parametrize("build", [tv.squeezenet1_1, lambda: tv.googlenet(init_weights=False)])
def test_networks_that_need_no_canonizer(build):
    assert doctor(build().eval(), ConvNetGamma(), torch.rand(1, 3, 64, 64), verbose=False).ok
