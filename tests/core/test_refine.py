"""Showcase 1: a concept's activations set back where it stands out (`ProjectedModel`)."""

from __future__ import annotations

import copy

import pytest
import torch
from drsa_core import PRCA, ProvenanceWarning, Subspaces
from drsa_core.refine import ProjectedModel
from torch import Tensor, nn
from zennit.attribution import Gradient
from zennit.canonizers import SequentialMergeBatchNorm
from zennit.composites import EpsilonPlus

from tests.model_state import model_state
from zennit_drsa import DisentangledAttributor

LAYER = "2"


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 4)
        ).eval()


def tensors() -> tuple[Tensor, Tensor, Subspaces]:
    """Images (5, 3, 4, 4), a mean context (6,) and three concepts."""
    generator = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(6, 6, generator=generator))[0]
    x, context = torch.randn(5, 3, 4, 4, generator=generator), torch.randn(6, generator=generator)
    return x, context, Subspaces(basis, [2, 3, 1])


def reference(model: nn.Sequential) -> Tensor:
    images = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model[:3](images).movedim(1, -1).flatten(0, 2)


def test_positions_that_stand_out_are_set_back_as_the_formula_says() -> None:
    model, (x, context, subspaces) = network(), tensors()
    usual = reference(model)
    projected = ProjectedModel(model, LAYER, subspaces, [0, 2], context, usual, quantile=0.5)
    a = model[:3](x).detach()
    expected, n_changed = a.clone(), 0
    for k, threshold in zip((0, 2), projected.thresholds.tolist(), strict=True):
        block = subspaces.blocks[k]
        matrix = block @ block.T
        # Half of the reference positions lie below the threshold, which is one of them up to rounding.
        assert int(((usual @ matrix @ context) < threshold - 1e-6).sum()) == len(usual) // 2
        for n in range(len(x)):
            for i in range(4):
                for j in range(4):
                    if float(a[n, :, i, j] @ matrix @ context) > threshold:
                        expected[n, :, i, j] -= matrix @ (a[n, :, i, j] - usual.mean(0))
                        n_changed += 1
    assert 0 < n_changed < 2 * len(x) * 16
    torch.testing.assert_close(projected.set_back(a), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(projected(x), model[3:](expected), rtol=1e-5, atol=1e-6)


def test_references_are_left_alone_at_quantile_one() -> None:
    model, (_, context, subspaces) = network(), tensors()
    usual = reference(model)
    projected = ProjectedModel(model, LAYER, subspaces, [1], context, usual, quantile=1.0)
    a = usual.view(4, 4, 4, 6).movedim(-1, 1)
    assert torch.equal(projected.set_back(a), a)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_contexts_are_not_lost_in_half_precision(dtype: torch.dtype) -> None:
    model, (x, context, subspaces) = network(), tensors()
    projected = ProjectedModel(model, LAYER, subspaces, [0], 1e-8 * context, reference(model), 0.5)
    a = model[:3](x).detach().to(dtype)
    changed = [(projected.set_back(t) != t).any(1) for t in (a, a.float())]
    assert 0 < int(changed[1].sum()) < changed[1].numel()
    # Positions whose change is less than the spacing of the numbers stay as they are.
    assert int((changed[0] != changed[1]).sum()) <= 0.1 * int(changed[1].sum())


def test_tokens_have_their_features_last() -> None:
    model, (x, context, subspaces) = network(), tensors()
    a = model[:3](x).detach()
    first = ProjectedModel(model, LAYER, subspaces, [0], context, reference(model), 0.5)
    last = ProjectedModel(model, LAYER, subspaces, [0], context, reference(model), 0.5, channel_dim=-1)
    tokens = last.set_back(a.flatten(2).mT)
    torch.testing.assert_close(tokens.mT.reshape(a.shape), first.set_back(a), rtol=1e-5, atol=1e-6)


def test_projected_model_is_a_drop_in() -> None:
    model, (x, context, subspaces) = network(), tensors()
    before = model_state(model)
    projected = ProjectedModel(model, LAYER, subspaces, [0], context, reference(model), 0.5)
    assert list(projected.state_dict()) == list(model.state_dict())
    with torch.inference_mode():
        inferred = projected(x)
    torch.testing.assert_close(projected(x), inferred)
    singly = torch.cat([projected(part) for part in x.split(1)])
    torch.testing.assert_close(singly, inferred, rtol=1e-5, atol=1e-6)
    x.requires_grad_()
    assert torch.autograd.grad(projected(x)[:, 1].sum(), x)[0].abs().sum() > 0
    assert model_state(model) == before
    copied = copy.deepcopy(projected)
    torch.testing.assert_close(copied(x), projected(x))
    assert copied.original is not model
    with pytest.raises(RuntimeError):  # channels do not fit; the hook is gone all the same
        projected(x[:, :2])
    assert model_state(model) == before


def test_projected_model_names_mistakes() -> None:
    model, (x, context, subspaces) = network(), tensors()
    usual = reference(model)
    with pytest.raises(TypeError, match="torch module, got str"):
        ProjectedModel("model", LAYER, subspaces, [0], context, usual)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no layer 'features'"):
        ProjectedModel(model, "features", subspaces, [0], context, usual)
    with pytest.raises(ValueError, match=r"3 subspaces, but concepts = \(3,\)"):
        ProjectedModel(model, LAYER, subspaces, [3], context, usual)
    with pytest.raises(ValueError, match="context must have D = 6"):
        ProjectedModel(model, LAYER, subspaces, [0], context[:4], usual)
    with pytest.raises(ValueError, match="reference must have D = 6"):
        ProjectedModel(model, LAYER, subspaces, [0], context, usual[:, :4])
    with pytest.raises(ValueError, match="quantile"):
        ProjectedModel(model, LAYER, subspaces, [0], context, usual, quantile=1.5)
    with pytest.raises(ValueError, match="D = 6 features, but layer '0'"):
        ProjectedModel(nn.Sequential(nn.Conv2d(3, 5, 1)), "0", subspaces, [0], context, usual)(x)


def test_concepts_of_another_layer_or_activation_are_noticed() -> None:
    model, (x, _, _) = network(), tensors()
    composite = EpsilonPlus(canonizers=[SequentialMergeBatchNorm()])

    def learned(layer: str) -> tuple[Subspaces, Tensor, Tensor]:
        pairs = DisentangledAttributor(Gradient(model, composite), layer).collect([x], 1, positions=None)
        return PRCA(2).fit(pairs).subspaces_, pairs.c.mean(0), pairs.a

    # Of the convolution LRP saw the output of the merged batch norm: nothing could stand out in the model's.
    subspaces, context, usual = learned("0")
    with pytest.raises(
        ValueError, match=r"a BatchNorm2d follows.*does not have\. Learn them at the batch norm"
    ):
        ProjectedModel(model, "0", subspaces, [0], context, usual)
    ProjectedModel(model, "0", subspaces.with_provenance(None), [0], context, usual)
    for layer in ("1", "2"):
        subspaces, context, usual = learned(layer)
        projected = ProjectedModel(model, layer, subspaces, [0], context, usual, quantile=1.0, strict=True)
        # The images are their own references, so that the threshold is the largest score, up to rounding.
        largest = projected.scores(model[: int(layer) + 1](x)).max()
        torch.testing.assert_close(largest, projected.thresholds[0], rtol=1e-4, atol=1e-5)
    with pytest.warns(ProvenanceWarning, match="layer: '2' there, '1' here") as caught:
        ProjectedModel(model, "1", subspaces, [0], context, usual)
    assert caught[0].filename == __file__
    other = network()
    with torch.no_grad():
        other[0].weight.mul_(2)  # type: ignore[operator]
    with pytest.raises(ValueError, match="model: weights"):
        ProjectedModel(other, "2", subspaces, [0], context, usual, strict=True)
