"""`collect`: pairs at random positions, targets, seeds, storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drsa_core import PRCA, PairStore, context_from_relevance, fit_many
from torch import nn
from zennit.attribution import Gradient, SmoothGrad
from zennit.composites import EpsilonPlus

from tests.closeness import assert_same
from tests.toys import arriving_at, small_input, small_model
from zennit_drsa import DisentangledAttributor, collect


def test_contexts_without_a_composite_are_gradients():
    model, input = small_model(), small_input(3)
    targets = torch.tensor([1, 4, 0])
    a, c = collect(model, None, "pool", [input], targets, positions=None, progress=False)
    point = model.lower(input).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model.upper(point)[range(3), targets].sum(), point)
    torch.testing.assert_close(a, point.detach().movedim(1, -1).reshape(-1, 6))
    torch.testing.assert_close(c, gradient.movedim(1, -1).reshape(-1, 6))


def test_contexts_with_a_composite_are_relevance_over_activation():
    model, input = small_model(), small_input(3)
    a, c = collect(model, EpsilonPlus(), "pool", [input], 2, positions=None, progress=False)
    one_hot = torch.eye(5, dtype=torch.float64)[2]
    activation, r = arriving_at(model, EpsilonPlus(), "pool", input, lambda output: one_hot * output.detach())
    torch.testing.assert_close(c, context_from_relevance(activation, r).movedim(1, -1).reshape(-1, 6))
    torch.testing.assert_close((a * c).sum(), r.sum())


def test_one_backward_pass_for_each_batch_that_stops_at_the_layer():
    model, seen = small_model(), []

    def watch(module: nn.Module, args: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: seen.append(module))

    for module in (model.stem[0], model.middle):
        module.register_forward_hook(watch)
    collect(model, EpsilonPlus(), "pool", [small_input(), small_input()], 0, progress=False)
    assert seen == [model.middle, model.middle]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_targets_and_images():
    model, input = small_model(), small_input(5)
    labels = torch.tensor([1, 4, 0, 2, 2])
    batches = [(input[:2], labels[:2]), (input[2:], labels[2:])]

    def pairs(target: Any, seed: int = 3) -> Any:
        options: dict[str, Any] = {"positions": 4, "random_state": seed, "progress": False}
        return collect(model, EpsilonPlus(), "pool", batches, target, **options)

    by_tensor = pairs(labels)
    assert by_tensor.image.tolist() == [i for i in range(5) for _ in range(4)]
    for other in (pairs("label"), pairs(labels.tolist())):
        assert_same(by_tensor.a, other.a)
        assert_same(by_tensor.c, other.c)
    by_index = pairs(2)
    assert_same(by_index.c[-8:], by_tensor.c[-8:])  # the images whose label is 2
    assert not torch.equal(by_index.c, by_tensor.c)
    assert not torch.equal(pairs(2, seed=4).a, by_index.a)


def test_an_interrupted_collection_goes_on(tmp_path):
    model, batches = small_model(), [small_input(), small_input(3), small_input(1)]
    options: dict[str, Any] = {"positions": 3, "random_state": 0, "progress": False}
    expected = collect(model, EpsilonPlus(), "pool", batches, 1, **options)

    def breaking():
        yield batches[0]
        raise KeyboardInterrupt

    store = PairStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        collect(model, EpsilonPlus(), "pool", breaking(), 1, store=store, **options)
    assert len(store) == 1
    resumed = collect(model, EpsilonPlus(), "pool", batches, 1, store=store, **options)
    assert_same(resumed.a, expected.a)
    assert_same(resumed.c, expected.c)
    assert torch.equal(resumed.image, expected.image)


def test_progress_bar(capsys):
    collect(small_model(), None, "pool", [small_input()], 0, progress=True)
    assert "collecting pairs" in capsys.readouterr().err
    collect(small_model(), None, "pool", [small_input()], 0)  # not on a terminal
    assert not capsys.readouterr().err


BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "no images": (lambda x: [], 0, ValueError, "gave no images"),
    "target": (lambda x: [x], 5, ValueError, r"target 5 does not fit the model\'s output of shape \(2, 5\)"),
    "few": (lambda x: [x], torch.tensor([1]), ValueError, "1 entries, but the loader gave 2"),
    "many": (lambda x: [x], torch.tensor([1, 2, 3]), ValueError, "3 entries, but the loader gave 2"),
    "half": (lambda x: [x], 0.5, TypeError, "target"),
    "dict": (lambda x: [{"x": x}], 0, TypeError, "loader must give tensors"),
    "NaN": (lambda x: [x * float("nan")], 0, ValueError, "the input itself holds NaN"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    loader, target, error, message = BAD[what]
    with pytest.raises(error, match=message):
        collect(small_model(), None, "pool", loader(small_input()), target, progress=False)


def test_an_attributor_of_another_model():
    with pytest.raises(ValueError, match="another model"):
        collect(small_model(), SmoothGrad(small_model()), "pool", [small_input()], 0)


def test_subspaces_of_many_classes_know_where_they_come_from(tmp_path) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]
    model = nn.Sequential(*layers).eval()
    batches = [(torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]))]
    attributor = DisentangledAttributor(Gradient(model, EpsilonPlus()), "1")  # not entered
    found = fit_many(attributor, batches, tmp_path, PRCA(2)).subspaces(1)
    own = attributor.collect([batches[0][0]], 1, random_state=0).provenance
    assert own is not None
    assert found.provenance is not None
    assert (found.provenance.model, found.provenance.method) == (own.model, own.method)
    strict = DisentangledAttributor(Gradient(model, EpsilonPlus()), "1", found, strict=True)
    assert strict.explain(batches[0][0], 1).maps.shape == (4, found.n_subspaces, 3, 8, 8)
