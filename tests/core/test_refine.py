"""Models without a concept: `RefinedModel` (Eq. 12) and `ProjectedModel` (section 6.1)."""

from __future__ import annotations

import copy

import pytest
import torch
from drsa_core import PRCA, ProvenanceWarning, Subspaces
from drsa_core.refine import ProjectedModel, RefinedModel, excess_relevance, mean_relevance
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_contexts_are_not_lost_in_half_precision(dtype: torch.dtype) -> None:
    model, (x, context, subspaces) = network(), tensors()
    projected = ProjectedModel(model, LAYER, subspaces, [0], 1e-8 * context, reference(model), 0.5)
    a = model[:3](x).detach().to(dtype)
    changed = [(projected.set_back(t) != t).any(1) for t in (a, a.float())]
    assert 0 < int(changed[1].sum()) < changed[1].numel()
    # Positions whose change is less than the spacing of the numbers stay as they are.
    assert int((changed[0] != changed[1]).sum()) <= 0.1 * int(changed[1].sum())


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
        ValueError, match=r"merge the BatchNorm2d.*does not have\. Learn them at the batch norm"
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


# ---------------------------------------------------------------------- relevance subtracted


class GradientTimesInput:
    """R_k = (U_kᵀa)ᵀ(U_kᵀc) with c = ∂y/∂a at the ReLU, by plain autograd: what an adapter does."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model
        basis = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))[0]
        self.subspaces = Subspaces(basis, [2, 2, 2])

    def __call__(self, x: Tensor, target: int) -> Tensor:
        a = self.model[:3](x).detach().requires_grad_()
        y = self.model[3:](a)[:, target]
        (c,) = torch.autograd.grad(y.sum(), a)
        return self.subspaces.relevance(a, c).sum((2, 3)).detach()


def images(n_images: int = 5, seed: int = 2) -> Tensor:
    return torch.randn(n_images, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


def test_refined_output_is_equation_12_with_excess_relevance() -> None:
    model, x = network(), images()
    relevance = GradientTimesInput(model)
    usual = torch.tensor([0.1, -0.2, 0.05])
    refined = RefinedModel(model, relevance, 2, [0, 2], usual)
    expected = model(x).detach().clone()
    for n, values in enumerate(relevance(x, 2).tolist()):
        for k in (0, 2):
            expected[n, 2] -= max(0.0, values[k] - float(usual[k]))
    torch.testing.assert_close(refined(x), expected, rtol=1e-6, atol=1e-6)
    assert (refined(x)[:, 2] <= model(x)[:, 2]).all()
    usual += 1  # what the user does with it later is nothing to the model
    torch.testing.assert_close(refined(x), expected, rtol=1e-6, atol=1e-6)
    plain = RefinedModel(model, relevance, 2, [0, 1, 2])  # all concepts: all but the bias
    torch.testing.assert_close(
        plain(x)[:, 2], model.get_parameter("4.bias")[2].expand(5), rtol=1e-5, atol=1e-5
    )


class InPlace(nn.Module):
    """A network that normalises its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.network(x.sub_(0.5))
        return output


def test_models_may_write_into_their_input() -> None:
    model, x = InPlace(), images()
    explain = GradientTimesInput(model.network)
    refined = RefinedModel(model.eval(), lambda x, target: explain(x - 0.5, target), 2, [0])
    expected = model(x.clone())[:, 2] - explain(x - 0.5, 2)[:, 0]
    torch.testing.assert_close(refined(x.clone())[:, 2], expected)


def test_refined_model_is_a_drop_in() -> None:
    model, x = network(), images()
    before, relevance = model_state(model), GradientTimesInput(model)
    refined = RefinedModel(model, relevance, 1, [0], torch.zeros(3))
    assert list(refined.state_dict()) == list(model.state_dict())
    assert [n for n, _ in refined.named_modules()] == [n for n, _ in model.named_modules()]
    assert refined.get_submodule("2") is model[2]
    with_gradients = refined(x)
    with torch.no_grad():
        without = refined(x)
    with torch.inference_mode():
        inferred = refined(x.clone())
    assert torch.equal(with_gradients, without)
    assert torch.equal(without, inferred)
    assert with_gradients.requires_grad
    assert not without.requires_grad
    singly = torch.cat([refined(part) for part in x.split(1)])
    torch.testing.assert_close(singly, without, rtol=1e-5, atol=1e-6)  # batch sizes change sums' order
    assert model_state(model) == before

    other = network()  # a checkpoint of the original goes in, one of the refined model comes out
    with torch.no_grad():
        other.get_parameter("0.weight").mul_(2)
    assert refined.load_state_dict(other.state_dict()).missing_keys == []
    assert torch.equal(model.get_parameter("0.weight"), other.get_parameter("0.weight"))
    stack = nn.Sequential(refined, nn.Softmax(1))
    assert next(iter(stack.state_dict())) == "0.0.weight"
    stack.load_state_dict(stack.state_dict())
    torch.testing.assert_close(stack.double()(x.double()).sum(1), torch.ones(5).double())
    assert model[0].weight.dtype == torch.float64


def test_refined_gradients_are_those_of_the_original() -> None:
    model, x = network(), images().requires_grad_()
    refined = RefinedModel(model, GradientTimesInput(model), 1, [0], torch.zeros(3))
    (expected,) = torch.autograd.grad(model(x).square().sum() * 0 + model(x)[:, 1].sum(), x)
    (found,) = torch.autograd.grad(refined(x)[:, 1].sum(), x)
    torch.testing.assert_close(found, expected)


def test_refined_modes_copies_and_a_second_class() -> None:
    model, x = network(), images()
    refined = RefinedModel(model, GradientTimesInput(model), 1, [0], torch.zeros(3))
    refined.train()
    assert model.training
    assert model[1].training
    with pytest.raises(ValueError, match="call eval"):
        refined(x)
    assert not refined.eval().original.training
    copied = copy.deepcopy(refined)
    assert torch.equal(copied(x), refined(x))
    assert copied.original is not model
    assert copied.get_submodule("0") is copied.original.get_submodule("0")
    twice = RefinedModel(refined, GradientTimesInput(model), 3, [1], torch.zeros(3)).eval()
    once = RefinedModel(model, GradientTimesInput(model), 3, [1], torch.zeros(3))
    assert torch.equal(twice(x)[:, :3], refined(x)[:, :3])
    assert torch.equal(twice(x)[:, 3], once(x)[:, 3])


def test_both_adapters_feed_the_refined_model() -> None:
    captum_attr = pytest.importorskip("captum.attr")
    zennit_attribution = pytest.importorskip("zennit.attribution")
    from captum_drsa import DisentangledAttribution
    from zennit_drsa import DisentangledAttributor

    model, x = network(), images()
    own = GradientTimesInput(model)
    captum = DisentangledAttribution(captum_attr.InputXGradient(model), "2", own.subspaces)
    zennit = DisentangledAttributor(zennit_attribution.Gradient(model), "2", own.subspaces)
    expected = RefinedModel(model, own, 1, [0, 1], torch.zeros(3))(x)

    def by_zennit(x: Tensor, target: int) -> Tensor:
        return zennit.concept_relevance(x, nn.functional.one_hot(torch.tensor([target] * len(x)), 4).float())

    before = model_state(model)
    for relevance in (captum.concept_relevance, by_zennit):
        with torch.no_grad():
            found = RefinedModel(model, relevance, 1, [0, 1], torch.zeros(3))(x)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert model_state(model) == before


def test_mean_and_excess() -> None:
    model = network()
    relevance = GradientTimesInput(model)
    x = images(7)
    found = mean_relevance(relevance, [x[:4], (x[4:], "labels")], 2, progress=False)
    torch.testing.assert_close(found, relevance(x, 2).mean(0))
    excess = excess_relevance(torch.tensor([[1.0, -1.0], [3.0, 0.0]]), torch.tensor([2.0, -2.0]))
    assert excess.tolist() == [[0.0, 1.0], [1.0, 2.0]]
    with pytest.raises(ValueError, match="no images"):
        mean_relevance(relevance, [], 2)
    with pytest.raises(ValueError, match=r"\(N, K\) and mean \(K,\)"):
        excess_relevance(torch.zeros(2, 2), torch.zeros(3))
    for nan in [(torch.nan, 0.0), (0.0, torch.nan)]:
        with pytest.raises(ValueError, match="1 NaN"):
            excess_relevance(torch.tensor([[nan[0]]]), torch.tensor([nan[1]]))


def test_refined_model_names_mistakes() -> None:
    model, x = network(), images()
    relevance = GradientTimesInput(model)
    with pytest.raises(TypeError, match="torch module, got str"):
        RefinedModel("model", relevance, 0, [0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        RefinedModel(model, relevance, 0, [])
    with pytest.raises(ValueError, match=r"\(N, K\) and mean \(K,\)"):
        RefinedModel(model, relevance, 0, [1], torch.zeros(2))(x)
    with pytest.raises(ValueError, match="gave 3 concepts, but concepts = \\(3,\\)"):
        RefinedModel(model, relevance, 0, [3])(x)
    with pytest.raises(ValueError, match="more than target = 4"):
        RefinedModel(model, relevance, 4, [0])(x)
    with pytest.raises(ValueError, match=r"\(5, K\)"):
        RefinedModel(model, lambda x, target: torch.zeros(3), 0, [0])(x)
    with pytest.raises(ValueError, match="NaN"):
        RefinedModel(model, lambda x, target: torch.full((len(x), 1), torch.nan), 0, [0])(x)
    twice = network()
    twice.forward = lambda x: (model(x), model(x))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"must give outputs \(N, n_outputs\).*got tuple"):
        RefinedModel(twice, relevance, 0, [0])(x)
