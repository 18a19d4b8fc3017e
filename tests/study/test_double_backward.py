"""Convolutions with constant weights: same values, same first and second derivatives, and restored after."""

from __future__ import annotations

import pytest
import torch
from study.double_backward import constant_weights
from torch import Tensor, nn

from ..model_state import model_state

CONVOLUTIONS = [
    nn.Conv2d(4, 6, 3, padding=1),
    nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=False),
    nn.Conv2d(4, 4, 5, padding="same", groups=4),
    nn.Conv2d(4, 4, (3, 2), padding="same", dilation=2),
    nn.Conv2d(4, 4, 3, padding="valid"),
    nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
]


def derivatives(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    y = model(x)
    (first,) = torch.autograd.grad(y, x, y**2, create_graph=True)
    (second,) = torch.autograd.grad((first**3).sum(), x)
    return y.detach(), first.detach(), second


@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=str)
def test_values_and_derivatives(conv: nn.Module) -> None:
    model = nn.Sequential(conv, nn.Tanh()).double()
    x = torch.randn(2, 4, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = derivatives(model, x)
    before = model_state(model)
    with constant_weights(model):
        found = derivatives(model, x)
    assert model_state(model) == before
    # Sums in another order.
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_padding_of_timm() -> None:
    timm_layers = pytest.importorskip("timm.layers")
    model = timm_layers.create_conv2d(4, 4, 3, stride=2, padding="same", depthwise=True).double()
    assert type(model).__name__ == "Conv2dSame"
    x = torch.randn(2, 4, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = derivatives(model, x)
    with constant_weights(model):
        torch.testing.assert_close(derivatives(model, x), expected, rtol=1e-10, atol=1e-10)


class Standardised(nn.Conv2d):
    """A convolution that standardises its weight first, as those of NFNets do."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight / weight.norm(), self.bias)


class Doubled(nn.Conv2d):
    """A convolution that does something else with the weight that it is given."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, 2 * weight, bias)


def test_convolutions_that_do_more_are_left_as_they_are() -> None:
    replaced = nn.Conv2d(4, 4, 3)
    replaced.__dict__["forward"] = lambda x: 3 * x
    x = torch.randn(2, 4, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for conv in (Standardised(4, 4, 3), Doubled(4, 4, 3), replaced):
        model = nn.Sequential(conv, nn.Tanh()).double()
        expected = derivatives(model, x)
        with constant_weights(model):
            torch.testing.assert_close(derivatives(model, x), expected)


def test_restored_after_an_exception() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 3))
    before = model_state(model)
    with pytest.raises(KeyboardInterrupt), constant_weights(model):
        raise KeyboardInterrupt
    assert model_state(model) == before
