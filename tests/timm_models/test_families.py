"""A family of models is one file in `zennit_drsa/models`: `doctor` asks it, `ConvNetGamma` uses it."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from zennit.composites import EpsilonPlus

import zennit_drsa.models
from zennit_drsa import ConvNetGamma, doctor
from zennit_drsa.families import remedies

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
