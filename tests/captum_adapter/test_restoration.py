"""The user's model and attributor come back as they were: after success, errors and Ctrl-C."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from captum.attr import (
    LRP,
    DeepLift,
    FeatureAblation,
    GradientShap,
    InputXGradient,
    IntegratedGradients,
    LayerIntegratedGradients,
    NoiseTunnel,
    ShapleyValueSampling,
)
from captum.attr._utils.lrp_rules import GammaRule
from drsa_core import RandomSubspaces
from torch import Tensor, nn

from captum_drsa import DisentangledAttribution, patch_mask
from tests.captum_adapter.networks import conv_net, images, subspaces
from tests.closeness import assert_same
from tests.model_state import model_state

pytestmark = pytest.mark.filterwarnings("ignore:Setting forward, backward hooks", "ignore:Input Tensor")

METHODS: dict[str, Any] = {
    "lrp": (LRP, {}),
    "lrp_gamma": (LRP, {}),
    "deep_lift": (DeepLift, {}),
    "integrated_gradients": (IntegratedGradients, {"n_steps": 3}),
    "input_x_gradient": (InputXGradient, {}),
    "gradient_shap": (GradientShap, {"baselines": images(2), "n_samples": 2}),
    "noise_tunnel": (lambda m: NoiseTunnel(InputXGradient(m)), {"nt_samples": 2}),
    "shapley": (ShapleyValueSampling, {"n_samples": 1, "feature_mask": patch_mask(images(), 6)}),
    "layer": (lambda m: LayerIntegratedGradients(m, m.features[0]), {"n_steps": 3}),
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
    first = da.attribute(x, target=1, **options)
    da.explain(x, 1, **options)
    da.concept_relevance(x, 1)
    assert model_state(model) == before
    assert attributor_state(method) == of_method
    assert torch.equal(x, x_before)
    assert not x.requires_grad
    assert x.grad is None
    if name in ("lrp", "lrp_gamma", "integrated_gradients", "layer"):  # the others draw
        assert_same(da.attribute(x, target=1, **options), first)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["features.0", "features.3", "top.0"])
def test_after_a_fault(name: str, error: type[BaseException], place: str) -> None:
    """The module at `place` fails in its first, second, … call, until a run comes through."""
    model, method, options = prepared(name)
    da = DisentangledAttribution(method, "features.4", subspaces(8))
    x, calls, faults = images(), {"left": 0}, 0

    def fail(*_: object) -> None:
        if calls["left"] == 0:
            raise error("injected")
        calls["left"] -= 1

    model.get_submodule(place).register_forward_hook(fail)
    before, of_method = model_state(model), attributor_state(method)
    for allowed in (0, 1, 2, 5):
        calls["left"] = allowed
        try:
            da.attribute(x, target=1, **options)
        except error:
            faults += 1
        assert model_state(model) == before
        assert attributor_state(method) == of_method
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


@pytest.mark.parametrize("name", ["lrp_gamma", "deep_lift", "integrated_gradients", "layer"])
def test_after_ctrl_c_at_any_time(name: str) -> None:
    """`tests/benchmarks/interrupts.py` tries every line."""
    model, method, options = prepared(name)
    da = DisentangledAttribution(method, "features.4", subspaces(8))
    before, handler, x = model_state(model), signal.getsignal(signal.SIGINT), images(1, 6)
    options = options if name != "shapley" else {"n_samples": 1}
    expected = da.attribute(x, target=1, **options)
    start = time.perf_counter()
    da.attribute(x, target=1, **options)
    duration, draw, interrupted = time.perf_counter() - start, random.Random(0), 0
    main = threading.main_thread().ident
    assert main is not None
    for _ in range(25):
        timer = threading.Timer(draw.uniform(0, duration), signal.pthread_kill, (main, signal.SIGINT))
        try:
            timer.start()
            da.attribute(x, target=1, **options)
        except KeyboardInterrupt:
            interrupted += 1
        with suppress(KeyboardInterrupt):  # it may come late
            timer.join()
            time.sleep(0)
        assert model_state(model) == before
        assert signal.getsignal(signal.SIGINT) is handler
    assert interrupted > 0
    assert_same(da.attribute(x, target=1, **options), expected)


@pytest.mark.parametrize("method", [IntegratedGradients, ShapleyValueSampling])
def test_statistics_of_batch_norm_in_training_mode(method) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 3)
    ).train()
    before = model_state(model)
    options: dict[str, Any] = {"n_steps": 2}
    if method is ShapleyValueSampling:
        options = {"feature_mask": patch_mask(images(), 6)}
    da = DisentangledAttribution(method(model), "2", subspaces(8), context_method="gradient")
    with pytest.warns(UserWarning, match=r"BatchNorm2d\)? is in training mode"):
        da.attribute(images(4), target=1, **options)
    assert model_state(model) == before


@pytest.mark.parametrize("method", [InputXGradient, LRP, IntegratedGradients])
def test_what_a_model_writes_itself_stays(method) -> None:
    """A counter and a cache of its own were taken back."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.n_calls = conv_net(), 0
            self.cache: dict[int, Any] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.n_calls += 1
            self.cache[len(x)] = x.shape
            scores: Tensor = self.net(x)
            return scores

    model = Counts()
    DisentangledAttribution(method(model), "net.features.4", subspaces(8)).attribute(images(), target=1)
    assert model.n_calls > 0
    assert model.cache


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


# ---------------------------------------------------------------------- unusual models


@pytest.mark.parametrize("method", [InputXGradient, LRP])
def test_compiled_models(method) -> None:
    """A compiled graph does not run hooks; the original module is explained."""
    model, x = conv_net(), images()
    expected = DisentangledAttribution(method(model), "features.4", subspaces(8)).attribute(x, target=1)
    compiled: Any = torch.compile(model, backend="eager")
    compiled(x)  # warm
    model.compile(backend="eager")
    model(x)
    call = model._compiled_call_impl
    for given in (compiled, model):
        da = DisentangledAttribution(method(given), "features.4", subspaces(8))
        assert_same(da.attribute(x, target=1), expected)
        assert model._compiled_call_impl is call


def test_fused_attention_leaves_out_no_hook() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.head(self.block(x).mean(1))
            return scores

    torch.manual_seed(0)
    model, x = Encoder().eval(), torch.randn(2, 4, 8)
    # Without gradients PyTorch takes a path that runs none of the inner modules.
    da = DisentangledAttribution(
        FeatureAblation(model), "block.norm2", subspaces(8), "gradient", channel_dim=-1
    )
    maps = da.attribute(x, target=1)
    assert maps.shape == (2, 3, 4, 8)
    assert torch.isfinite(maps).all()
    assert torch.backends.mha.get_fastpath_enabled()


class Odd(nn.Sequential):
    """A model whose truth value is False, and with a state that is no tensor."""

    def __len__(self) -> int:
        return 0

    def get_extra_state(self) -> dict[str, int]:
        return {"epoch": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"epoch": 3}


def test_odd_models() -> None:
    torch.manual_seed(0)
    model = Odd(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    before = model_state(model)
    da = DisentangledAttribution(LRP(model), "1")
    da.fit([torch.randn(2, 4)], 1, solver=RandomSubspaces(2, random_state=0))
    assert da.explain(torch.randn(2, 4), 1).maps.shape == (2, 2, 4)
    assert model_state(model) == before


def test_threads_wait_for_each_other() -> None:
    model, x = conv_net(), images()
    expected = DisentangledAttribution(LRP(model), "features.4", subspaces(8)).attribute(x, target=1)
    found: list[object] = []

    def explain() -> None:
        try:
            for _ in range(3):
                da = DisentangledAttribution(LRP(model), "features.4", subspaces(8))
                found.append(torch.allclose(da.attribute(x, target=1), expected))
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=explain) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 9
