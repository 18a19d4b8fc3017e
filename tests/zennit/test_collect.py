"""`collect`: pairs at random positions, targets, seeds, storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drsa_core import PairStore, context_from_relevance
from torch import nn
from zennit.composites import EpsilonPlus

from tests.closeness import assert_same
from tests.zennit.models import small_input, small_model, subspaces
from tests.zennit.test_attributor import lower, upper
from zennit_drsa import DisentangledComposite, collect


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
    measure: Any = DisentangledComposite(EpsilonPlus(), "pool", subspaces(6))
    with measure.context(model):
        measure.virtual_layer.recording = True
        out = model(input.clone().requires_grad_())
        seed = torch.eye(5, dtype=torch.float64)[2] * out.detach()
        activation = measure.virtual_layer.activation.detach()
        (r,) = torch.autograd.grad(out, measure.virtual_layer.output, seed)
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
    assert len(passes) == 2
    assert all(parameter.grad is None for parameter in model.parameters())


def test_targets_and_images():
    model, input = small_model(), small_input(5)
    labels = torch.tensor([1, 4, 0, 2, 2])
    batches = [(input[:2], labels[:2]), (input[2:], labels[2:])]
    kwargs: dict[str, Any] = {"positions": 4, "random_state": 3, "progress": False}
    by_tensor = collect(model, EpsilonPlus(), "pool", batches, labels, **kwargs)
    by_function = collect(model, EpsilonPlus(), "pool", batches, lambda batch: batch[1], **kwargs)
    by_list = collect(model, EpsilonPlus(), "pool", batches, labels.tolist(), **kwargs)
    assert by_tensor.image.tolist() == [i for i in range(5) for _ in range(4)]
    for other in (by_function, by_list):
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
    collect(small_model(), None, "pool", [small_input()], 0)
    assert "collect" in capsys.readouterr().err


def test_bad_input():
    model, input = small_model(), small_input()

    def run(loader, target):
        return collect(model, None, "pool", loader, target, progress=False)

    with pytest.raises(ValueError, match="gave no batches"):
        run([], 0)
    with pytest.raises(ValueError, match=r"shape \(2, 5\), the targets are \[5\]"):
        run([input], 5)
    with pytest.raises(ValueError, match="one index for each of the 2 images"):
        run([input], torch.tensor([1]))
    with pytest.raises(ValueError, match="3 entries, but the loader gave 2 images"):
        run([input], torch.tensor([1, 2, 3]))
    with pytest.raises(TypeError, match="made of integers"):
        run([input], 0.5)
    with pytest.raises(TypeError, match="loader must give tensors"):
        run([{"x": input}], 0)
    with pytest.raises(ValueError, match="the input itself holds NaN"):
        run([input * float("nan")], 0)
    with pytest.raises(ValueError, match="did you mean 'pool'"):
        collect(model, None, "pol", [input], 0, progress=False)
    spatial = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 2, 1)).double()
    with pytest.raises(ValueError, match="between 0 and the number of outputs"):
        collect(spatial, None, "0", [input], 0, progress=False)
