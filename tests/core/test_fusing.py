"""Convolutions and activations in one operation: the plain network's outputs, and what must be left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drsa_core.evaluation import patch_flipping
from drsa_core.evaluation._onednn import NOTHING, Packed, available
from drsa_core.evaluation.folding import fold_batch_norms
from drsa_core.evaluation.fusing import ACTIVATIONS, fuse_activations
from torch import Tensor, fx, nn
from torch.nn import functional

from tests.model_state import model_state

pytestmark = pytest.mark.skipif(not available(), reason="this torch has no oneDNN")


class Block(nn.Module):
    """Convolution, batch norm, nothing, activation, convolution, mean."""

    def __init__(self, act: Callable[[Tensor], Tensor], kind: str = "plain", size: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        convolution = {"same": Same, "reflect": Reflect}.get(kind, nn.Conv2d)
        self.one = convolution(3, 8, size, stride=2, padding=0 if kind == "same" else size // 2)
        self.norm, self.nothing, self.act, self.kind = nn.BatchNorm2d(8), nn.Identity(), act, kind
        self.two = nn.Conv2d(8, 8, 3, groups=8, padding=1)
        nn.init.normal_(self.norm.weight, std=5)  # so that a ReLU6 has something to cut off
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.one(x))
        if self.kind == "used twice":
            return (x + self.two(self.act(x))).mean((2, 3))
        x = self.two(self.act(self.nothing(x)))
        if self.kind == "used again":
            x = self.act(x)
        return x.view(len(x), -1) if self.kind == "view" else x.mean((2, 3))


class Same(nn.Conv2d):
    """Padding as TensorFlow has it: as much as is missing, the odd row or column at the end."""

    def forward(self, x: Tensor) -> Tensor:
        (high, wide), (width, _), (stride, _) = x.shape[2:], self.kernel_size, self.stride
        down, right = (max((-(-n // stride) - 1) * stride + width - n, 0) for n in (high, wide))
        x = functional.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2))
        return super().forward(x)


class Reflect(nn.Conv2d):
    """Padding with what is there instead of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        x = functional.pad(x, [self.kernel_size[0] // 2] * 4, mode="reflect")
        return functional.conv2d(x, self.weight, self.bias, self.stride)


def images(n: int = 3, high: int = 16, wide: int = 16) -> Tensor:
    """Noise of one seed, in [0, 1]."""
    return torch.rand(n, 3, high, wide, generator=torch.Generator().manual_seed(1))


def fused_copy(model: nn.Module, x: Tensor) -> tuple[fx.GraphModule, list[Packed]]:
    """The copy, and its packed convolutions; it gives what the plain network gives."""
    folded = fold_batch_norms(model)
    assert folded is not None
    fused = fuse_activations(folded, x[:1])
    assert fused is not None
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-5)
    return fused, [module for module in fused.modules() if isinstance(module, Packed)]


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_activation_goes_into_the_convolution_before_it(act: Any) -> None:
    model = Block(act(inplace=True) if isinstance(act, type) else act)
    fused, packed = fused_copy(model, images())
    assert [one.activation for one in packed] == [ACTIVATIONS[act], NOTHING]
    assert not any(node.target is act for node in fused.graph.nodes)
    assert not any(isinstance(act, type) and isinstance(module, act) for module in fused.modules())


def test_numbers_of_the_activation_count() -> None:
    x = images()
    _, packed = fused_copy(Block(nn.ReLU6()), x)
    found = packed[0](x)
    assert (float(found.min()), float(found.max())) == (0, 6)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("shape", [(16, 16), (15, 15), (16, 15)])
def test_padding_by_the_size_of_the_input_needs_no_copy(shape: tuple[int, int], size: int) -> None:
    _, packed = fused_copy(Block(nn.ReLU(), "same", size), images(3, *shape))
    assert [one.activation[0] for one in packed] == ["relu", "none"]


def test_other_padding_is_left_alone() -> None:
    x = images()
    x[:, :, [0, 1, -2, -1]] = x[:, :, :, [0, 1, -2, -1]] = 0  # on which zeros would do as well
    model = Block(nn.ReLU(), "reflect")
    model.norm = nn.BatchNorm2d(8).eval()
    fused, packed = fused_copy(nn.Sequential(model.one, nn.ReLU(), nn.Conv2d(8, 8, 1), model.norm).eval(), x)
    assert len(packed) == 1
    assert any(isinstance(module, Reflect) for module in fused.modules())


def test_an_activation_that_serves_twice_goes_into_both() -> None:
    _, packed = fused_copy(Block(nn.ReLU(), "used again"), images())
    assert [one.activation[0] for one in packed] == ["relu", "relu"]


def test_an_output_that_something_else_uses_is_not_activated() -> None:
    fused, packed = fused_copy(Block(nn.ReLU(), "used twice"), images())
    assert [one.activation for one in packed] == [NOTHING, NOTHING]
    assert any(isinstance(module, nn.ReLU) for module in fused.modules())


def test_other_numbers_devices_and_settings_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, folded = images(), fold_batch_norms(Block(nn.ReLU()))
    assert folded is not None
    assert fuse_activations(folded, x) is not None
    assert fuse_activations(folded, x.to("meta")) is None
    assert fuse_activations(folded, torch.rand(1, 5, 16, 16)) is None  # not an input at all
    with torch.backends.mkldnn.flags(enabled=False):
        assert fuse_activations(folded, x) is None
    double = fold_batch_norms(Block(nn.ReLU()).double())
    assert double is not None
    assert fuse_activations(double, x.double()) is None
    monkeypatch.setattr("drsa_core.evaluation.fusing.available", lambda: False)
    assert fuse_activations(folded, x) is None


def test_the_folded_network_stays_as_it_was() -> None:
    x, folded = images(), fold_batch_norms(Block(nn.ReLU(inplace=True)))
    assert folded is not None
    code, state, expected = folded.code, model_state(folded), folded(x)
    assert fuse_activations(folded, x) is not None
    assert (folded.code, model_state(folded)) == (code, state)
    assert torch.equal(folded(x), expected)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that packed convolutions get from now on."""
    sizes: list[int] = []
    original = Packed.forward

    def forward(self: Packed, x: Tensor) -> Tensor:
        sizes.append(len(x))
        return original(self, x)

    monkeypatch.setattr(Packed, "forward", forward)
    return sizes


OPTIONS: dict[str, Any] = {"patch_size": 4, "schedule": "single", "fill": "mean"}


def test_patch_flipping_runs_it_and_leaves_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, sizes = Block(nn.SiLU(), "same"), images(), counted(monkeypatch)
    state = model_state(model)
    options = {**OPTIONS, "batch_size": 5}
    found, again = (patch_flipping(model, x, x, 1, (0.0, 1.0), **options) for _ in range(2))
    assert max(sizes) == 5
    assert torch.equal(found.scores, again.scores)  # bit for bit, as the batch size is given
    assert model_state(model) == state
    sizes.clear()
    searched = patch_flipping(model, x, x, 1, (0.0, 1.0), **OPTIONS)
    assert max(sizes) > 1
    sizes.clear()
    expected = patch_flipping(model.forward, x, x, 1, (0.0, 1.0), **options)
    assert sizes == []
    assert float(expected.scores.max()) > 0.01
    for curves in (found, searched):
        torch.testing.assert_close(curves.scores, expected.scores, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("why", ["hook", "double", "view", "wrong"])
def test_patch_flipping_runs_others_without(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, sizes = Block(nn.ReLU(), why), images(), counted(monkeypatch)
    if why == "hook":
        model.two.register_forward_hook(lambda *_: None)
    if why == "double":
        model, x = model.double(), x.double()
    if why == "wrong":
        wrong = fx.symbolic_trace(nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8)))
        monkeypatch.setattr("drsa_core.evaluation.running.fuse_activations", lambda *_: wrong)
    options = {**OPTIONS, "batch_size": 5}
    found = patch_flipping(model, x, x, 1, (0.0, 1.0), **options)
    assert set(sizes) <= {1}  # tried on one image at most
    expected = patch_flipping(model.forward, x, x, 1, (0.0, 1.0), **options)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-5, atol=1e-6)
    assert float(expected.scores.max()) > 0
