"""`collect`: pairs at random positions, targets, seeds, storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drsa_core import PRCA, PairStore, context_from_relevance, fit_many
from torch import nn
from zennit.attribution import Gradient
from zennit.composites import EpsilonPlus

from tests.closeness import assert_same
from tests.zennit_adapter.models import slot_at, small_input, small_model
from tests.zennit_adapter.test_attributor import lower, upper
from zennit_drsa import DisentangledAttributor, collect


def test_contexts_without_a_composite_are_gradients():
    model, input = small_model(), small_input(3)
    targets = torch.tensor([1, 4, 0])
    a, c = collect(model, None, "pool", [input], targets, positions=None, progress=False)
    point = lower(model, input).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(upper(model, point)[range(3), targets].sum(), point)
    torch.testing.assert_close(a, point.detach().movedim(1, -1).reshape(-1, 6))
    torch.testing.assert_close(c, gradient.movedim(1, -1).reshape(-1, 6))


def test_contexts_with_a_composite_are_relevance_over_activation():
    model, input = small_model(), small_input(3)
    a, c = collect(model, EpsilonPlus(), "pool", [input], 2, positions=None, progress=False)
    one_hot = torch.eye(5, dtype=torch.float64)[2]
    activation, r = slot_at(model, EpsilonPlus(), "pool", input, lambda output: one_hot * output.detach())
    torch.testing.assert_close(c, context_from_relevance(activation, r).movedim(1, -1).reshape(-1, 6))
    torch.testing.assert_close((a * c).sum(), r.sum())


def test_one_backward_pass_per_batch_that_stops_at_the_layer(monkeypatch):
    model = small_model()
    passes: list[int] = []
    grad = torch.autograd.grad

    def counted(*args, **kwargs):
        passes.append(1)
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    collect(model, None, "pool", [small_input(), small_input()], 0, progress=False)
    assert len(passes) == 4  # for each batch one at the output, where it starts, and one down to the layer
    assert all(parameter.grad is None for parameter in model.parameters())


def test_targets_and_images():
    model, input = small_model(), small_input(5)
    labels = torch.tensor([1, 4, 0, 2, 2])
    batches = [(input[:2], labels[:2]), (input[2:], labels[2:])]
    kwargs: dict[str, Any] = {"positions": 4, "random_state": 3, "progress": False}
    by_tensor = collect(model, EpsilonPlus(), "pool", batches, labels, **kwargs)
    by_label = collect(model, EpsilonPlus(), "pool", batches, "label", **kwargs)
    by_list = collect(model, EpsilonPlus(), "pool", batches, labels.tolist(), **kwargs)
    assert by_tensor.image.tolist() == [i for i in range(5) for _ in range(4)]
    for other in (by_label, by_list):
        assert_same(by_tensor.a, other.a)
        assert_same(by_tensor.c, other.c)
    by_index = collect(model, EpsilonPlus(), "pool", batches, 2, **kwargs)
    assert_same(by_index.c[-8:], by_tensor.c[-8:])  # the images whose label is 2
    assert not torch.equal(by_index.c, by_tensor.c)


def test_seeds():
    model, input = small_model(), small_input()

    def run(seed):
        return collect(model, None, "pool", [input], 0, positions=3, random_state=seed, progress=False).a

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_an_interrupted_collection_goes_on(tmp_path):
    model, batches = small_model(), [small_input(), small_input(3), small_input(1)]
    kwargs: dict[str, Any] = {"positions": 3, "random_state": 0, "progress": False}
    expected = collect(model, EpsilonPlus(), "pool", batches, 1, **kwargs)

    def breaking():
        yield batches[0]
        raise KeyboardInterrupt

    store = PairStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        collect(model, EpsilonPlus(), "pool", breaking(), 1, store=store, **kwargs)
    assert len(store) == 1
    resumed = collect(model, EpsilonPlus(), "pool", batches, 1, store=store, **kwargs)
    assert_same(resumed.a, expected.a)
    assert_same(resumed.c, expected.c)
    assert torch.equal(resumed.image, expected.image)


def test_progress_bar(capsys):
    collect(small_model(), None, "pool", [small_input()], 0, progress=True)
    assert "collecting pairs" in capsys.readouterr().err
    collect(small_model(), None, "pool", [small_input()], 0)  # not on a terminal
    assert not capsys.readouterr().err


def test_bad_input():
    model, input = small_model(), small_input()

    def run(loader, target):
        return collect(model, None, "pool", loader, target, progress=False)

    with pytest.raises(ValueError, match="gave no images"):
        run([], 0)
    with pytest.raises(ValueError, match=r"target 5 does not fit the model\'s output of shape \(2, 5\)"):
        run([input], 5)
    with pytest.raises(ValueError, match="1 entries, but the loader gave 2 images"):
        run([input], torch.tensor([1]))
    with pytest.raises(ValueError, match="3 entries, but the loader gave 2 images"):
        run([input], torch.tensor([1, 2, 3]))
    with pytest.raises(TypeError, match="target must be an int, one int for each image"):
        run([input], 0.5)
    with pytest.raises(TypeError, match="loader must give tensors"):
        run([{"x": input}], 0)
    with pytest.raises(ValueError, match="the input itself holds NaN"):
        run([input * float("nan")], 0)
    with pytest.raises(ValueError, match="did you mean 'pool'"):
        collect(model, None, "pol", [input], 0, progress=False)
    spatial = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 2, 1)).double()
    with pytest.raises(ValueError, match="does not fit the model's output of shape"):
        collect(spatial, None, "0", [input], 0, progress=False)


def test_subspaces_of_many_classes_know_where_they_come_from(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    ).eval()
    batches = [(torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]))]
    attributor = DisentangledAttributor(Gradient(model, EpsilonPlus()), "1")  # not entered
    found = fit_many(attributor, batches, tmp_path, PRCA(2)).subspaces(1)
    own = attributor.collect([batches[0][0]], 1, random_state=0).provenance
    assert own is not None
    assert found.provenance is not None
    assert (found.provenance.model, found.provenance.method) == (own.model, own.method)
    strict = DisentangledAttributor(Gradient(model, EpsilonPlus()), "1", found, strict=True)
    assert strict.explain(batches[0][0], 1).maps.shape == (4, found.n_subspaces, 3, 8, 8)
