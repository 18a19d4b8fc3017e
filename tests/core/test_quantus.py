"""Our maps in Quantus, and its region perturbation against our AUPC on a case where both are defined."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from drsa_core import Subspaces
from drsa_core.evaluation import explain_func, patch_flipping
from torch import Tensor, nn


class Network(nn.Module):
    """A small convolutional network; its first layer is the one that is split."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(6 * 16 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).flatten(1))
        return out


SUBSPACES = Subspaces(torch.eye(6), [3, 3])


def attribute(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Gradient × Input maps of two concepts of the layer `features`, (N, 2, 3, H, W)."""
    assert isinstance(model, Network)
    x = x.clone().requires_grad_()
    a = model.features(x)
    score = model.head(a.flatten(1)).gather(1, y[:, None]).sum()
    (c,) = torch.autograd.grad(score, a, retain_graph=True)
    parts = [SUBSPACES.project_context(c, k) for k in range(2)]
    maps = [torch.autograd.grad(a, x, part, retain_graph=True)[0] * x.detach() for part in parts]
    return torch.stack(maps, 1)


@pytest.fixture
def case() -> tuple[Network, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = Network().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    x = torch.rand(3, 3, 16, 16, generator=generator)
    return model, x, torch.tensor([0, 1, 3])


def test_explain_func_gives_one_concept_or_their_sum(case) -> None:
    model, x, y = case
    maps = attribute(model, x, y).sum(2)
    explain = explain_func(attribute)
    found = explain(model, x.numpy(), y.numpy(), device="cpu")
    assert found.shape == (3, 1, 16, 16)
    np.testing.assert_allclose(found[:, 0], maps.sum(1), rtol=0, atol=1e-6)
    np.testing.assert_allclose(explain(model, x.numpy(), y.numpy(), concept=1)[:, 0], maps[:, 1], atol=1e-6)
    second = explain_func(attribute, concept=1)(model, x.numpy(), y.numpy())
    np.testing.assert_allclose(second[:, 0], maps[:, 1], atol=1e-6)
    with pytest.raises(ValueError, match="integer from 0 to 1, got 2"):
        explain(model, x.numpy(), y.numpy(), concept=2)
    with pytest.raises(ValueError, match="NaN"):
        explain_func(lambda m, x, y: torch.full((3, 1, 3, 16, 16), torch.nan))(model, x.numpy(), y.numpy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_in_float32(case, dtype: torch.dtype) -> None:
    model, x, y = case
    maps = torch.rand(3, 4, 3, 16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = explain_func(lambda *_: maps)(model, x.numpy(), y.numpy())
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[:, 0], maps.double().sum((1, 2)), rtol=1e-6)


def test_quantus_is_not_imported_with_the_core() -> None:
    script = "import sys, drsa_core.evaluation; sys.exit('quantus' in sys.modules or 'cv2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.filterwarnings("ignore")  # Quantus' own
def test_quantus_region_perturbation_is_our_curve(case) -> None:
    """Same patches, one per step, filled with a constant, logits: Quantus records f(x) − f(x^(τ))."""
    quantus = pytest.importorskip("quantus")
    model, x, y = case
    metric = quantus.RegionPerturbation(
        patch_size=4, regions_evaluation=16, perturb_baseline=0.0, normalise=False, disable_warnings=True
    )
    for concept in (None, 0, 1):
        drops = metric(
            model=model,
            x_batch=x.numpy(),
            y_batch=y.numpy(),
            explain_func=explain_func(attribute),
            explain_func_kwargs={"concept": concept},
            softmax=False,
            channel_first=True,
        )
        maps = attribute(model, x, y)
        chosen = maps.sum(1) if concept is None else maps[:, concept]
        # Our curve is rectified; 100 more keeps the outputs positive, and drops out of the differences.
        curves = patch_flipping(
            lambda inputs: model(inputs) + 100,
            x,
            chosen,
            y,
            (0.0, 1.0),
            patch_size=4,
            schedule="single",
            fill="constant",
        )
        ours = curves.scores[:, :1] - curves.scores[:, 1:]
        np.testing.assert_allclose(np.array(drops), ours, atol=1e-4)
        # Areas: Quantus' has unit steps from the first removal on, ours runs from 0 to 1 and begins at f(x).
        theirs = np.trapezoid(np.array(drops), axis=1) / 16
        first_step = (curves.scores[:, 0] + curves.scores[:, 1]) / 2 / 16
        expected = curves.scores[:, 0] * 15 / 16 - torch.from_numpy(theirs) + first_step
        torch.testing.assert_close(curves.aupc, expected, rtol=0, atol=1e-4)
