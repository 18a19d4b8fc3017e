"""The model comes back as it was: after success, errors and interrupts at every stage, and many calls."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from drsa_core.layer import Cut, Split
from torch import nn
from zennit.attribution import Gradient, IntegratedGradients, Occlusion, SmoothGrad
from zennit.canonizers import Canonizer, SequentialMergeBatchNorm
from zennit.composites import EpsilonGammaBox, GuidedBackprop
from zennit.core import BasicHook, Composite
from zennit.torchvision import ResNetCanonizer

import zennit_drsa.attribution
from tests.model_state import model_state
from tests.toys import small_input, small_model, subspaces, torchvision_model
from zennit_drsa import DisentangledAttributor, DisentangledComposite, VGGGamma, collect

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


STAGES = ("canonizer", "rules", "forward", "attr_output", "above", "parts", "below", "result")


@pytest.mark.parametrize("error", [RuntimeError("injected"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("validated", [False, True])
def test_faults_at_every_stage(monkeypatch, stage, error, validated):
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

    if stage == "rules":
        composite.module_map = fail_after(5, composite.module_map)
    elif stage == "forward":
        monkeypatch.setattr(Cut, "__call__", fail)
    elif stage == "attr_output":
        attr_output = fail
    elif stage == "above":  # in the rule of the head
        composite.layer_map.insert(0, ((nn.Linear,), BasicHook(reducer=fail)))
    elif stage == "parts":
        monkeypatch.setattr(Split, "cotangents", fail)
    elif stage == "below":  # of the last concept
        monkeypatch.setattr(Split, "below", fail_after(2, Split.below))
    elif stage == "result":
        monkeypatch.setattr(zennit_drsa.attribution.DisentangledAttributor, "_check_finite", fail)
    run = DisentangledAttributor(Gradient(model, composite), "pool", subspaces(6), validated=validated)
    with pytest.raises(type(error)):
        run(input, attr_output)
    assert model_state(model) == before
    assert not run.composite.handles
    assert all("backward" not in vars(hook) for hook in gc.get_objects() if isinstance(hook, BasicHook))


@pytest.mark.parametrize("kind", [Gradient, SmoothGrad, IntegratedGradients, Occlusion])
def test_success_of_each_attributor(kind):
    model, input = small_model(), small_input()
    before = model_state(model)
    extra = {"n_iter": 2} if kind in (SmoothGrad, IntegratedGradients) else {}
    for composite in (None, gamma(), GuidedBackprop()):
        run = DisentangledAttributor(
            kind(model, composite, **extra), "pool", subspaces(6), residual=True, context_steps=2
        )
        run(input, TARGET)
        run.explain(input, 1)
        assert model_state(model) == before
    filtered = DisentangledComposite(gamma(), "pool", subspaces(6), 1)
    kind(model, filtered, **extra)(input, TARGET)
    collect(model, gamma(), "pool", [input], 1, progress=False)
    assert model_state(model) == before
    assert not filtered.handles


@pytest.mark.parametrize("network", ["vgg11_bn", "resnet18"])
def test_torchvision_networks(network):
    model = torchvision_model(network)
    before = model_state(model)
    composite = VGGGamma() if network == "vgg11_bn" else gamma(ResNetCanonizer())
    layer, n_features = ("features.20", 512) if network == "vgg11_bn" else ("layer2", 128)
    run = DisentangledAttributor(Gradient(model, composite), layer, subspaces(n_features))
    run(torch.randn(1, 3, 32, 32).clamp(-2, 2))
    assert model_state(model) == before


def test_an_attributor_goes_on_after_an_interrupt():
    model, input, calls = small_model(), small_input(), []
    before = model_state(model)

    def attr_output(output):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return TARGET

    wrapped = IntegratedGradients(model, n_iter=2)
    with DisentangledAttributor(wrapped, "pool", subspaces(6), context_steps=4) as run:
        with pytest.raises(KeyboardInterrupt):
            run(input, attr_output)
        assert run(input, TARGET)[1].isfinite().all()
    assert model_state(model) == before


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("composite", [gamma, GuidedBackprop])
def test_many_calls_keep_no_tensors(composite, inside):
    run = DisentangledAttributor(Gradient(small_model(), composite()), "pool", subspaces(6))

    def n_tensors_after(n: int) -> int:
        for _ in range(n):
            run(small_input(), TARGET)
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    if inside:
        with run:
            first = n_tensors_after(3)
            assert n_tensors_after(20) <= first
    else:
        first = n_tensors_after(3)
        assert n_tensors_after(20) <= first
