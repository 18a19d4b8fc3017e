"""The guard: whatever was done to a model is undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import LRP, InputXGradient
from drsa_core.layer import Guard, guarded
from drsa_core.layer.guard import _restore_dict
from torch import nn
from zennit.attribution import Gradient
from zennit.composites import EpsilonPlus

from captum_drsa import DisentangledAttribution
from tests.captum_adapter.networks import subspaces
from tests.model_state import model_state
from zennit_drsa import DisentangledAttributor


class Empty(nn.Module):
    """A model that is false as a truth value."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def __len__(self) -> int:
        return 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def network() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval()
    model[0].register_forward_hook(lambda *_: None)
    model[0].register_forward_hook(lambda *_: None)
    model[3].bias.requires_grad_(False)
    return model


def parameters_replaced(model: Any) -> None:
    model[0].weight.data = model[0].weight.data * 2
    model[0].bias = nn.Parameter(torch.zeros(6))
    model[3].weight.data = model[3].weight.data[:1]
    del model[3].bias


def buffers_written(model: Any) -> None:
    model[1].running_mean.add_(1)
    model[1].running_var.data = torch.zeros(6)
    model[1].num_batches_tracked = torch.tensor(7)
    model[1].register_buffer("more", torch.ones(2))


def hooks_changed(model: Any) -> None:
    first = next(iter(model[0]._forward_hooks))
    removed = model[0]._forward_hooks.pop(first)
    model[0].register_forward_hook(lambda *_: None, prepend=True)
    model[0]._forward_hooks[first] = removed  # there again, but at the end
    model[2].register_forward_pre_hook(lambda *_: None)
    model.register_full_backward_hook(lambda *_: None)


def children_changed(model: Any) -> None:
    model[0].child = nn.Linear(2, 2)
    model.append(nn.ReLU())
    model[1] = nn.Identity()


def attributes_changed(model: Any) -> None:
    model[0].forward = lambda x: x
    model[2].inplace = True
    model[3].rule = object()


def flags_changed(model: Any) -> None:
    model.train()
    model[2].eval()
    for parameter in model.parameters():
        parameter.requires_grad_(not parameter.requires_grad)


CHANGES = (
    parameters_replaced,
    buffers_written,
    hooks_changed,
    children_changed,
    attributes_changed,
    flags_changed,
)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_undone(change, error):
    model = network()
    before = model_state(model)

    def work() -> str:
        change(model)
        assert model_state(model) != before
        if error is not None:
            raise error
        return "done"

    if error is None:
        assert guarded(model, work) == "done"
    else:
        with pytest.raises(error):
            guarded(model, work)
    assert model_state(model) == before


def test_values_in_another_order_at_the_same_address():
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()

    def transpose() -> None:
        model.weight.data = model.weight.data.t()

    guarded(model, transpose)
    assert torch.equal(model.weight, before)


def test_nested_guards_restore_to_their_own_beginning():
    model = network()
    before = model_state(model)

    def outer() -> None:
        parameters_replaced(model)
        between = model_state(model)
        with pytest.raises(ValueError, match="inner"):
            guarded(model, inner)
        assert model_state(model) == between

    def inner() -> None:
        hooks_changed(model)
        flags_changed(model)
        raise ValueError("inner")

    guarded(model, outer)
    assert model_state(model) == before


def test_settings_of_pytorch():
    model = network()
    torch.backends.mha.set_fastpath_enabled(True)
    with torch.inference_mode():
        assert not guarded(model, torch.is_inference_mode_enabled)
        assert torch.is_inference_mode_enabled()
    assert not guarded(model, torch.backends.mha.get_fastpath_enabled)
    assert torch.backends.mha.get_fastpath_enabled()


def test_fused_attention_comes_back_with_the_last_of_several_guards():
    """It is one switch for the whole process; guards of two models may end in any order."""
    torch.backends.mha.set_fastpath_enabled(True)
    first, second = Guard(network()), Guard(network())
    first.begin()
    second.begin()
    first.end()
    assert not torch.backends.mha.get_fastpath_enabled()  # the second still needs it off
    second.end()
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_buffers(layout):
    model = network()
    model.register_buffer("adjacency", torch.eye(4).to_sparse(layout=layout))
    model[0].register_parameter("scale", nn.Parameter(torch.eye(4).to_sparse()))
    kept, hooks = model.adjacency, len(model[2]._forward_hooks)
    maps = DisentangledAttribution(InputXGradient(model), "2", subspaces(6)).attribute(
        torch.rand(2, 4), target=1
    )
    assert maps.shape == (2, 3, 4)
    assert model.adjacency is kept
    assert len(model[2]._forward_hooks) == hooks


def test_other_objects_are_kept():
    rule = type("Rule", (), {})()
    rule.kept = 1

    def work() -> None:
        rule.kept, rule.added = 2, 3

    guarded(network(), work, [rule])
    assert vars(rule) == {"kept": 1}


def test_further_modules_are_kept():
    model, other = network(), network()
    before = model_state(other)
    guarded(model, lambda: hooks_changed(other), [other])
    assert model_state(other) == before


def test_what_was_added_is_taken_out_while_others_read():
    """A module without its attributes, for however short a time, fails in another thread."""

    class Read(dict):  # type: ignore[type-arg]
        def clear(self) -> None:
            raise AssertionError("read meanwhile")

    current = Read(first=1, second=2, added=3)
    _restore_dict(current, {"first": 1, "second": 0})
    assert current == {"first": 1, "second": 0}


def test_compiled_models_run_eagerly_inside():
    model: Any = network()
    model.compile(backend="eager")
    before = model_state(model)
    x, seen = torch.rand(2, 4), []

    def work() -> torch.Tensor:
        model[2].register_forward_hook(lambda *_: seen.append(1))
        return model(x)

    assert torch.equal(guarded(model, work), network()(x))
    assert seen == [1]
    assert model_state(model) == before


@pytest.mark.parametrize("layer", ["0", "2"])
def test_compiled_modules_inside_of_a_model_run_eagerly(layer):
    """A graph that is compiled does not run hooks on what is inside of it: rules there had no effect."""

    def maps(is_compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        inner: Any = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU())
        model: Any = nn.Sequential(inner, nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
        x = torch.rand(2, 4)
        if is_compiled:
            torch._dynamo.reset()  # graphs of other tests may fit
            model[0] = torch.compile(inner, backend="eager")
            model(x.clone().requires_grad_())  # as in training: hooks that come later are not in this graph
        before = model_state(model)
        compiled = vars(model[0]).get("forward")
        zennit = DisentangledAttributor(Gradient(model, EpsilonPlus()), layer, subspaces(6)).explain(x, 1)
        captum = DisentangledAttribution(LRP(model), layer, subspaces(6)).attribute(x, target=1)
        assert model_state(model) == before
        assert vars(model[0]).get("forward") is compiled
        return [zennit.maps, captum]

    for found, expected in zip(maps(True), maps(False), strict=True):
        assert torch.equal(found, expected)  # the same operations


@pytest.mark.parametrize("method", [InputXGradient, LRP])
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_adapters_take_models_that_are_false_or_compiled(method, empty, compiled):
    body = network()
    body[1] = nn.Dropout().eval()  # Captum's LRP has no rule for batch norms
    model = Empty(body) if empty else body
    explained: Any = torch.compile(model, backend="eager") if compiled else model
    before = model_state(model)
    x, target = torch.rand(2, 4), torch.eye(3)[[1, 1]]
    maps = DisentangledAttribution(method(explained), body[2], subspaces(6)).attribute(x, target=1)
    assert maps.shape == (2, 3, 4)
    run = DisentangledAttributor(Gradient(explained, EpsilonPlus()), body[2], subspaces(6))
    assert run(x, target)[1].shape == (2, 3, 4)
    assert model_state(model) == before


def test_modules_inside_a_closure():
    """Batch norms in training mode write their statistics; a closure does not show its modules."""
    model = network().train()
    before = model_state(model)
    x = torch.rand(5, 4)
    with pytest.warns(UserWarning, match="training mode"):
        guarded(model[2], lambda: model(x), is_whole=False)
    assert model_state(model) == before
    da = DisentangledAttribution(InputXGradient(lambda x: model(x)), model[2], subspaces(6))
    with pytest.warns(UserWarning, match="training mode"):
        da.attribute(x, target=1)
    assert model_state(model) == before
