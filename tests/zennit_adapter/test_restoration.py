"""The model comes back as it was: after success, errors and interrupts at every stage, and many calls."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from drsa_core.layer import BackwardPass, Cut
from torch import nn
from zennit.attribution import Gradient, IntegratedGradients, Occlusion, SmoothGrad
from zennit.canonizers import Canonizer, SequentialMergeBatchNorm
from zennit.composites import EpsilonGammaBox, GuidedBackprop
from zennit.core import BasicHook, Composite
from zennit.torchvision import ResNetCanonizer

import zennit_drsa.attribution
from tests.model_state import model_state
from tests.zennit_adapter.models import small_input, small_model, subspaces, torchvision_model
from zennit_drsa import DisentangledAttributor, SubspaceFilter, VGGGamma, collect

TARGET = torch.eye(5, dtype=torch.float64)[[1, 4]]


def gamma(*canonizers: Canonizer) -> Composite:
    return EpsilonGammaBox(low=-3.0, high=3.0, canonizers=[SequentialMergeBatchNorm(), *canonizers])


class Failing(Canonizer):  # type: ignore[misc]
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def apply(self, root_module: nn.Module) -> list[Canonizer]:
        raise self.error

    def register(self) -> None: ...

    def remove(self) -> None: ...


@pytest.mark.parametrize("error", [RuntimeError("injected"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize(
    "stage",
    [
        "canonizer",
        "filter",
        "rules",
        "forward",
        "attr_output",
        "above",
        "parts",
        "below",
        "last_concept",
        "result",
    ],
)
def test_faults_at_every_stage(monkeypatch, stage, error):
    model, input = small_model(), small_input()
    for parameter in model.stem.parameters():
        parameter.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = model_state(model)
    composite = gamma(Failing(error)) if stage == "canonizer" else gamma()
    attr_output: Any = TARGET
    calls = {"n": 0}

    def fail(*args, **kwargs):
        raise error

    def fail_after(n, function):
        def wrapper(*args, **kwargs):
            calls["n"] += 1
            return fail() if calls["n"] > n else function(*args, **kwargs)

        return wrapper

    if stage == "filter":
        monkeypatch.setattr(zennit_drsa.attribution, "warn_of_training", fail)
    elif stage == "rules":
        composite.module_map = fail_after(5, composite.module_map)
    elif stage == "forward":
        monkeypatch.setattr(Cut, "__call__", fail)
    elif stage == "attr_output":
        attr_output = fail
    elif stage == "above":  # in the rule of the head
        monkeypatch.setattr(BasicHook, "_default_modifier", fail)
        composite.layer_map.insert(0, ((nn.Linear,), BasicHook(reducer=fail)))
    elif stage == "parts":
        monkeypatch.setattr(BackwardPass, "cotangents", fail)
    elif stage in ("below", "last_concept"):
        function = zennit_drsa.passes._vjp
        monkeypatch.setattr(zennit_drsa.passes, "_vjp", fail_after(0 if stage == "below" else 5, function))
    elif stage == "result":
        monkeypatch.setattr(zennit_drsa.attribution, "check_finite", fail)
    run = DisentangledAttributor(Gradient(model, composite), "pool", subspaces(6))
    with pytest.raises(type(error)):
        run(input, attr_output)
    assert model_state(model) == before
    assert not run.composite.handles


@pytest.mark.parametrize("attributor", [Gradient, SmoothGrad, IntegratedGradients, Occlusion])
def test_success_of_each_attributor(attributor):
    model, input = small_model(), small_input()
    before = model_state(model)
    extra = {"n_iter": 2} if attributor in (SmoothGrad, IntegratedGradients) else {}
    for composite in (None, gamma(), GuidedBackprop()):
        run = DisentangledAttributor(
            attributor(model, composite, **extra), "pool", subspaces(6), residual=True, context_steps=2
        )
        run(input, TARGET)
        run.concept_relevance(input, TARGET)
    collect(model, gamma(), "pool", [input], 1, progress=False)
    assert model_state(model) == before


@pytest.mark.parametrize("network", ["vgg11_bn", "resnet18"])
def test_torchvision_networks(network):
    model = torchvision_model(network)
    before = model_state(model)
    composite = VGGGamma() if network == "vgg11_bn" else gamma(ResNetCanonizer())
    layer, n_features = ("features.20", 512) if network == "vgg11_bn" else ("layer2", 128)
    DisentangledAttributor(Gradient(model, composite), layer, subspaces(n_features))(
        torch.randn(1, 3, 32, 32)
    )
    assert model_state(model) == before


def test_a_failing_step_of_integrated_gradients_leaves_no_replacement():
    model, input = small_model(), small_input()
    before = model_state(model)
    calls: list[int] = []

    def attr_output(output):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return TARGET

    run = DisentangledAttributor(IntegratedGradients(model, n_iter=2), "pool", subspaces(6), context_steps=4)
    with run:
        with pytest.raises(KeyboardInterrupt):
            run(input, attr_output)
        assert run(input, TARGET)[1].isfinite().all()
    assert model_state(model) == before


def test_removal_of_filters_in_any_order():
    model, blocks = small_model(), subspaces(6)
    before = model_state(model)
    first, second = (
        SubspaceFilter("act", blocks).apply(model)[0],
        SubspaceFilter("relu", blocks).apply(model)[0],
    )
    model(small_input())
    first.remove()
    second.remove()
    second.remove()
    assert model_state(model) == before


@pytest.mark.parametrize("composite", [gamma, GuidedBackprop, VGGGamma])
@pytest.mark.parametrize("inside", [False, True])
def test_many_calls_keep_no_tensors(composite, inside):
    model, input = small_model(), small_input()
    run = DisentangledAttributor(Gradient(model, composite()), "pool", subspaces(6))

    def n_tensors() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    def calls(n: int) -> None:
        for _ in range(n):
            run(input, TARGET)

    if inside:
        with run:
            calls(3)
            first = n_tensors()
            calls(97)
            assert n_tensors() <= first
    else:
        calls(3)
        first = n_tensors()
        calls(97)
        assert n_tensors() <= first
