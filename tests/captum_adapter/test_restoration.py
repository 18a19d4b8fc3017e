"""The user's model and attributor come back as they were: after success, errors and KeyboardInterrupt."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from captum.attr import (
    LRP,
    DeepLift,
    GradientShap,
    InputXGradient,
    IntegratedGradients,
    NoiseTunnel,
    ShapleyValueSampling,
)
from captum.attr._utils.lrp_rules import GammaRule
from torch import nn

from captum_drsa import DisentangledAttribution, patch_mask
from tests.captum_adapter.networks import conv_net, images, subspaces
from tests.closeness import assert_same
from tests.model_state import model_state

pytestmark = pytest.mark.filterwarnings("ignore:Setting forward, backward hooks", "ignore:Input Tensor")

METHODS = {
    "lrp": (LRP, {}),
    "lrp_gamma": (LRP, {}),
    "deep_lift": (DeepLift, {}),
    "integrated_gradients": (IntegratedGradients, {"n_steps": 3}),
    "input_x_gradient": (InputXGradient, {}),
    "gradient_shap": (GradientShap, {"baselines": images(2), "n_samples": 2}),
    "noise_tunnel": (lambda m: NoiseTunnel(InputXGradient(m)), {"nt_samples": 2}),
    "shapley": (ShapleyValueSampling, {"n_samples": 1, "feature_mask": patch_mask(images(), 6)}),
}


def prepared(name: str):
    model = conv_net()
    if name == "lrp_gamma":
        model.features[0].rule = GammaRule(0.5)
        model.top[0].rule = GammaRule(0.1)
    # What a user may have on a model: gradients, frozen weights, hooks.
    model(images()).sum().backward()
    model.features[0].bias.requires_grad_(False)
    model.features[1].register_forward_hook(lambda *_: None)
    model.classifier.register_forward_pre_hook(lambda *_: None)
    method, options = METHODS[name]
    return model, method(model), options


def attributor_state(method: object) -> dict[str, int]:
    return {key: id(value) for key, value in vars(method).items()}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("training", [False, True])
def test_after_success(name: str, training: bool) -> None:
    model, method, options = prepared(name)
    if training:
        model.train()
    before, of_method = model_state(model), attributor_state(method)
    x = images()
    x_before = x.clone()
    da = DisentangledAttribution(method, "features.4", subspaces(8))
    da.attribute(x, target=1, **options)
    da.concept_relevance(x, 1)
    assert model_state(model) == before
    assert attributor_state(method) == of_method
    assert torch.equal(x, x_before)
    assert not x.requires_grad
    assert x.grad is None


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["features.0", "features.3", "top.0"])
def test_after_a_fault(name: str, error: type[BaseException], place: str) -> None:
    """The module at `place` fails in its first, second, … call, until a run comes through."""
    model, method, options = prepared(name)
    da = DisentangledAttribution(method, "features.4", subspaces(8))
    x = images()
    module = model.get_submodule(place)
    calls = {"left": 0}

    def fail(*_: object) -> None:
        if calls["left"] == 0:
            raise error("injected")
        calls["left"] -= 1

    module.register_forward_hook(fail)
    before = model_state(model)
    faults = 0
    for allowed in (0, 1, 2, 5):
        calls["left"] = allowed
        try:
            da.attribute(x, target=1, **options)
        except error:
            faults += 1
        assert model_state(model) == before
        assert not x.requires_grad
    assert faults >= 1


@pytest.mark.parametrize("name", ["lrp", "deep_lift", "input_x_gradient"])
def test_after_a_fault_in_the_backward_pass(name: str) -> None:
    model, method, options = prepared(name)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("injected")

    model.features[2].register_forward_hook(lambda _, __, output: Fails.apply(output))
    before = model_state(model)
    with pytest.raises(RuntimeError, match="injected"):
        DisentangledAttribution(method, "features.4", subspaces(8)).attribute(images(), target=1, **options)
    assert model_state(model) == before


@pytest.mark.parametrize("method", [IntegratedGradients, ShapleyValueSampling])
def test_statistics_of_batch_norm_in_training_mode(method) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 3)
    ).train()
    before = model_state(model)
    options: dict[str, Any] = (
        {"n_steps": 2} if method is IntegratedGradients else {"feature_mask": patch_mask(images(), 6)}
    )
    DisentangledAttribution(method(model), "2", subspaces(8), context_method="gradient").attribute(
        images(4), target=1, **options
    )
    assert model_state(model) == before


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_kept_alive(name: str) -> None:
    """Neither activations nor inputs outlive a call."""
    model, method, options = prepared(name)
    da = DisentangledAttribution(method, "features.4", subspaces(8))
    kept: list[weakref.ref[torch.Tensor]] = []
    handle = model.features[3].register_forward_hook(lambda _, __, output: kept.append(weakref.ref(output)))
    x = images()
    result = da.attribute(x, target=1, **options)
    handle.remove()
    kept.append(weakref.ref(x))
    del x, result
    gc.collect()
    assert len(kept) > 1
    assert not [ref for ref in kept if ref() is not None]


def test_captum_itself_works_afterwards_as_before() -> None:
    model, x = conv_net(), images()
    before = IntegratedGradients(model).attribute(x, target=1, n_steps=3)
    method = IntegratedGradients(model)
    DisentangledAttribution(method, "features.4", subspaces(8)).attribute(x, target=1, n_steps=3)
    assert_same(method.attribute(x, target=1, n_steps=3), before)
