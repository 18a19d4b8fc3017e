"""Compiled, scripted and attention models, inference mode, threads: right, or one clear sentence."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from captum.attr import (
    LRP,
    FeatureAblation,
    InputXGradient,
    IntegratedGradients,
    Occlusion,
)
from drsa_core import RandomSubspaces
from torch import Tensor, nn

from captum_drsa import DisentangledAttribution
from tests.captum_adapter.networks import conv_net, images, subspaces
from tests.closeness import assert_same


@pytest.mark.parametrize("method", [InputXGradient, IntegratedGradients, LRP, Occlusion])
def test_inference_mode(method) -> None:
    model, x = conv_net(), images()
    da = DisentangledAttribution(
        method(model), "features.4", subspaces(8), None if method is LRP else "gradient"
    )
    options: dict[str, Any] = {"sliding_window_shapes": (3, 6, 6)} if method is Occlusion else {}
    expected = da.attribute(x, target=1, **options)
    with torch.inference_mode():
        assert_same(da.attribute(x.clone(), target=1, **options), expected)
    with torch.inference_mode():
        made_there = conv_net()
    with pytest.raises(TypeError, match=r"made in torch.inference_mode\(\)"):
        DisentangledAttribution(InputXGradient(made_there), "features.4", subspaces(8))


def test_torchscript_is_refused() -> None:
    traced = torch.jit.trace(conv_net(), images())
    with pytest.raises(TypeError, match="TorchScript modules do not run the hooks"):
        DisentangledAttribution(InputXGradient(traced), "features.4", subspaces(8))


@pytest.mark.parametrize("method", [InputXGradient, LRP])
def test_compiled_models(method) -> None:
    """A compiled graph does not run hooks; the original module is explained."""
    model, x = conv_net(), images()
    expected = DisentangledAttribution(method(model), "features.4", subspaces(8)).attribute(x, target=1)
    compiled: Any = torch.compile(model, backend="eager")
    compiled(x)  # warm
    assert_same(
        DisentangledAttribution(method(compiled), "features.4", subspaces(8)).attribute(x, target=1), expected
    )
    model.compile(backend="eager")
    model(x)
    call = model._compiled_call_impl
    assert_same(
        DisentangledAttribution(method(model), "features.4", subspaces(8)).attribute(x, target=1), expected
    )
    assert model._compiled_call_impl is call


def test_attention_modules() -> None:
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
    with pytest.raises(TypeError, match=r"must return one tensor .* got tuple; choose a layer"):
        DisentangledAttribution(
            InputXGradient(model), "block.self_attn", subspaces(8), channel_dim=-1
        ).attribute(x, target=1)
    # Without gradients PyTorch takes a fused path that runs none of the inner modules.
    da = DisentangledAttribution(
        FeatureAblation(model), "block.norm2", subspaces(8), "gradient", channel_dim=-1
    )
    maps = da.attribute(x, target=1)
    assert maps.shape == (2, 3, 4, 8)
    assert torch.isfinite(maps).all()
    assert torch.backends.mha.get_fastpath_enabled()


def test_models_with_extra_state() -> None:
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = conv_net()

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.net(x)
            return scores

        def get_extra_state(self) -> dict[str, int]:
            return {"epoch": 3}

    da = DisentangledAttribution(InputXGradient(Extra()), "net.features.4")
    da.fit([images()], 1, solver=RandomSubspaces(2, random_state=0))
    assert da.attribute(images(), target=1).shape == (2, 2, 3, 12, 12)


class Empty(nn.Sequential):
    """A model whose truth value is False."""

    def __len__(self) -> int:
        return 0


def test_models_whose_truth_value_is_false() -> None:
    torch.manual_seed(0)
    model = Empty(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    before = [parameter.clone() for parameter in model.parameters()]
    DisentangledAttribution(LRP(model), "1", subspaces(8)).attribute(torch.randn(2, 4), target=1)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert not any(hasattr(module, "rule") for module in model.modules())


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


@pytest.mark.parametrize("context", ["integrated_gradients", "shapley"])
def test_small_scores_of_a_model_that_takes_the_batch_size_from_its_input(context: str) -> None:
    """Given activations for one input, its attention would be over the tokens of all of them."""

    class Attention(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.below, self.act, self.head = nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5)
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            h = self.act(self.below(x))
            tokens = 3 * h.reshape(len(x), -1, 4)
            tokens = (tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens
            scores: Tensor = self.head(tokens.reshape(h.shape).mean(1)) * self.scale
            return scores

    def contexts(scale: float) -> Tensor:
        da = DisentangledAttribution(
            IntegratedGradients(Attention(scale)), "act", context_method=context, channel_dim=-1
        )
        torch.manual_seed(0)
        return da.context(torch.randn(2, 3, 3), 1)[1] / scale

    assert_same(contexts(2.0**-24), contexts(1.0))
