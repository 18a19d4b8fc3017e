"""A family of models is one file in `zennit_drsa/models`: `doctor` asks it, `ConvNetGamma` uses it."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn
from zennit.composites import EpsilonPlus

import zennit_drsa.models
from tests.model_state import model_state
from zennit_drsa import ConvNetGamma, doctor
from zennit_drsa.families import remedies

timm = pytest.importorskip("timm")
tv = pytest.importorskip("torchvision").models

FAMILY = '''
from torch import nn
from zennit_drsa.canonizer import NetworkCanonizer, add
from zennit_drsa.families import canonizer


class TwinCanonizer(NetworkCanonizer):
    """The sum of `Twin` made explicit."""

    @classmethod
    def suits(cls, model):
        return any(type(module).__name__ == "Twin" for module in model.modules())

    def register(self, root_module):
        for module in root_module.modules():
            if type(module).__name__ == "Twin":
                self._sum(module, lambda x, twin=module: add(twin, twin.a(x), twin.b(x)))


REMEDIES = (canonizer("twins.TwinCanonizer()", TwinCanonizer, TwinCanonizer.suits),)
'''


class Twin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.a(x) + self.b(x)
        return result


def test_one_new_file_is_all_that_a_family_needs(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(Twin(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()
    x = torch.rand(2, 3, 6, 6)
    before = doctor(model, EpsilonPlus(), x, verbose=False)
    assert not before.ok
    assert "TwinCanonizer" not in str(before.suggestion)
    n_known = len(remedies())

    (tmp_path / "twins.py").write_text(FAMILY)
    monkeypatch.setattr(zennit_drsa.models, "__path__", [*zennit_drsa.models.__path__, str(tmp_path)])
    try:
        assert len(remedies()) == n_known + 1
        found = doctor(model, EpsilonPlus(), x, verbose=False)
        assert found.suggestion == "give the composite canonizers=[twins.TwinCanonizer()]"
        assert doctor(model, ConvNetGamma(0.25), x, verbose=False).ok
    finally:
        sys.modules.pop("zennit_drsa.models.twins", None)


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
