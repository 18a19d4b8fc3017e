"""Weights that are no parameters, under Captum's rules; `zennit_adapter/test_validate.py` has Zennit's."""

from __future__ import annotations

import pytest
import torch
from captum.attr import LRP
from captum.attr._utils.lrp_rules import EpsilonRule, GammaRule
from torch import Tensor
from torch.nn.utils import prune, weight_norm

from captum_drsa import DisentangledAttribution
from tests.toys import subspaces
from tests.zennit_adapter.test_validate import images, network

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")


@pytest.mark.parametrize("derive", [weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.3)])
def test_captum(derive) -> None:
    """Captum has no rule for the module of a parametrisation, and says so itself."""
    model = network()
    derive(model[2])

    def maps() -> Tensor:
        run = DisentangledAttribution(LRP(model), "1", subspaces(6, 2))
        result: Tensor = run.attribute(images(), target=(1, 0, 0))
        return result

    model[2].rule = GammaRule()
    with pytest.raises(ValueError, match="the weight of a Conv2d is no parameter"):
        maps()
    model[2].rule = EpsilonRule()
    assert torch.isfinite(maps()).all()
