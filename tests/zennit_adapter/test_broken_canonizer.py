"""A canonizer that fails half-way, on a model that it is not made for, leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import densenet121
from zennit.attribution import Gradient
from zennit.canonizers import SequentialMergeBatchNorm
from zennit.composites import EpsilonPlus
from zennit.core import Composite

from tests.model_state import model_state
from tests.toys import randomise_batch_norm, subspaces
from zennit_drsa import DisentangledAttributor, DisentangledComposite, collect, doctor

LAYER, N_FEATURES = "features.transition1", 128


def attributor(model: nn.Module, composite: Composite) -> DisentangledAttributor:
    return DisentangledAttributor(Gradient(model, composite), LAYER, subspaces(N_FEATURES))


USES: dict[str, Callable[[nn.Module, Composite, Tensor], Any]] = {
    "call": lambda model, composite, x: attributor(model, composite)(x),
    "context": lambda model, composite, x: attributor(model, composite).__enter__(),
    "composite": lambda model, composite, x: DisentangledComposite(
        composite, LAYER, subspaces(N_FEATURES)
    ).register(model),
    "collect": lambda model, composite, x: collect(model, composite, LAYER, [x], 1, progress=False),
    "doctor": lambda model, composite, x: doctor(model, composite, x, verbose=False),
}


@pytest.fixture(scope="module")
def densenet() -> nn.Module:
    torch.manual_seed(0)
    return randomise_batch_norm(densenet121(weights=None, num_classes=4)).eval()


@pytest.mark.parametrize("use", USES)
def test_densenet_with_merged_norms(densenet, use):
    """The norms of a DenseNet come before their convolutions: merging fails when some are merged already."""
    x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    composite = EpsilonPlus(canonizers=[SequentialMergeBatchNorm()])
    with torch.no_grad():
        output = densenet(x)
    before = model_state(densenet)
    with pytest.raises(RuntimeError, match="must match the size"):
        USES[use](densenet, composite, x)
    assert model_state(densenet) == before
    assert not composite.handles
    with torch.no_grad():
        assert torch.equal(densenet(x), output)
