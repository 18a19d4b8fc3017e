"""Showcase 3 on a small network: smoothing, relevance preservation, manipulation, and the score."""

from __future__ import annotations

import math

import pytest
import torch
from study.manipulation import (
    SoftplusActivations,
    is_suspicious,
    manipulate,
    manipulation_score,
    map_errors,
    preserve_relevance,
)
from torch import Tensor, nn

from ..model_state import model_state


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(
                nn.Conv2d(1, 8, 3, padding=1),
                nn.ReLU(inplace=True),
                nn.Conv2d(8, 8, 3, padding=1),
                nn.ReLU6(),
            ),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
        )


def gradient_times_input(model: nn.Module, target: int = 0):
    def explain(x: Tensor) -> tuple[Tensor, Tensor]:
        output = model(x)
        (gradient,) = torch.autograd.grad(output[:, target].sum(), x, create_graph=True)
        return output, (x * gradient).sum(1)

    return explain


def images(n: int = 2) -> Tensor:
    return torch.rand(n, 1, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("z", [-1.3, 0.0, 2.0, 5.9, 7.5])
def test_softplus_by_hand(z: float) -> None:
    def softplus(t: float, beta: float) -> float:
        return math.log1p(math.exp(beta * t)) / beta

    value = torch.tensor([z], dtype=torch.float64)
    for activation, smooth in (
        (nn.ReLU(), lambda beta: softplus(z, beta)),
        (nn.ReLU6(), lambda beta: softplus(z, beta) - softplus(z - 6, beta)),
    ):
        with SoftplusActivations(nn.Sequential(activation)) as activations:
            assert float(activation(value)) == float(type(activation)()(value))
            # torch takes the identity for βz > 20, where it is off by less than exp(−20).
            for beta in (0.7, 3.0):
                activations.beta = beta
                assert float(activation(value)) == pytest.approx(smooth(beta), abs=1e-8)
            activations.beta = 1000.0
            assert float(activation(value)) == pytest.approx(float(type(activation)()(value)), abs=1e-3)


def test_smoothing_is_taken_back() -> None:
    model = network()
    before = model_state(model)
    with pytest.raises(KeyboardInterrupt), SoftplusActivations(model, 5.0):
        raise KeyboardInterrupt
    assert model_state(model) == before
    with (
        pytest.raises(ValueError, match=r"no nn\.ReLU or nn\.ReLU6"),
        SoftplusActivations(nn.Linear(1, 1), 5.0),
    ):
        pass


def test_target_gets_the_total_of_the_original() -> None:
    target, original = torch.rand(3, 4, 4), torch.rand(3, 4, 4)
    rescaled = preserve_relevance(target, original)
    torch.testing.assert_close(rescaled.sum((1, 2)), original.sum((1, 2)))
    torch.testing.assert_close(rescaled / rescaled.amax((1, 2), True), target / target.amax((1, 2), True))
    with pytest.raises(ValueError, match=r"images \[1\] add up to zero, or to another sign"):
        preserve_relevance(target * torch.tensor([1.0, -1.0, 1.0])[:, None, None], original)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float16, 40.0), (torch.bfloat16, 1.0), (torch.float32, 1e36)]
)
def test_totals_of_many_pixels_keep_their_digits(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    target, original = (scale * torch.rand(2, 1, 64, 64, generator=generator)).to(dtype)
    rescaled = preserve_relevance(target, original)
    assert rescaled.dtype == dtype
    totals = [maps.double().sum((1, 2)) for maps in (rescaled, original)]
    # Roundings of single pixels cancel in the sum; 1e-4 is less than that of a total in bfloat16.
    torch.testing.assert_close(*totals, rtol=1e-4, atol=0)


def test_manipulation_moves_the_map_and_keeps_the_output() -> None:
    model, x = network(), images()
    explain = gradient_times_input(model)
    goal = explain(images(4)[2:].requires_grad_())[1].detach()
    before = model_state(model)
    result = manipulate(
        model, explain, x, goal, n_iter=60, lr=0.02, max_change=0.3, betas=(5.0, 50.0), progress=False
    )
    assert model_state(model) == before
    errors = [
        map_errors(m, result.original_map, result.target_map) for m in (result.original_map, result.map)
    ]
    assert (errors[1].to_target < 0.5 * errors[0].to_target).all()
    assert float((result.image - x).abs().max()) <= 0.3 + 1e-6
    assert float(result.image.min()) >= 0
    assert float(result.image.max()) <= 1
    assert float((result.output.softmax(1) - result.original_output.softmax(1)).abs().max()) < 0.05
    torch.testing.assert_close(result.target_map.sum((1, 2)), result.original_map.sum((1, 2)))
    # What is returned belongs to the network as it is.
    output, map = explain(result.image.clone().requires_grad_())
    torch.testing.assert_close(result.output, output.detach())
    torch.testing.assert_close(result.map, map.detach())
    assert result.history.shape == (60, 2)
    assert result.history[-1, 0] < result.history[0, 0]


def test_bounds_may_differ_from_channel_to_channel() -> None:
    model, x = network(), images()
    explain = gradient_times_input(model)
    goal = explain(images(4)[2:].requires_grad_())[1].detach()
    spread = torch.linspace(0.1, 0.3, x.shape[1]).view(-1, 1, 1)
    low, high = torch.zeros_like(spread), torch.ones_like(spread)
    result = manipulate(
        model, explain, x, goal, n_iter=8, lr=0.1, bounds=(low, high), max_change=spread, progress=False
    )
    change = (result.image - x).abs().amax((0, 2, 3))
    assert (change <= spread.flatten() + 1e-6).all()
    assert change[-1] > spread[0]  # the wider channel uses its room
    with pytest.raises(
        ValueError, match=r"max_change must be a number, or a tensor that fits x .* got \(7,\)"
    ):
        manipulate(model, explain, x, goal, max_change=torch.ones(7), progress=False)


def test_interrupted_manipulation_leaves_the_model() -> None:
    model, x = network(), images()
    explain, calls = gradient_times_input(model), []

    def interrupted(image: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return explain(image)

    before = model_state(model)
    goal = explain(images(4)[2:].requires_grad_())[1].detach()
    with pytest.raises(KeyboardInterrupt):
        manipulate(model, interrupted, x, goal, progress=False)
    assert model_state(model) == before


def test_errors_by_hand() -> None:
    original = torch.tensor([[[1.0, 2.0]]])
    target = torch.tensor([[[4.0, 2.0]]])
    errors = map_errors(torch.tensor([[[0.0, 4.0]]]), original, target)
    assert float(errors.to_original) == pytest.approx((1 + 4) / 2)
    assert float(errors.to_target) == pytest.approx((16 + 4) / 2)
    assert float(errors.correlation_to_original) == pytest.approx(1)
    assert float(errors.correlation_to_target) == pytest.approx(-1)


def test_score_is_the_cancelled_share() -> None:
    principal = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    maps = torch.stack([principal, torch.tensor([[-1.0, 3.0], [0.0, 0.0]])])[None]
    # |2 − 1| + |3| = 4 is left of 2 + 1 + 3 = 6.
    assert float(manipulation_score(maps, pool=1)) == pytest.approx(1 / 3)
    agreeing = torch.stack([principal, 3 * principal])[None]
    assert float(manipulation_score(agreeing, pool=1)) == 0
    assert float(manipulation_score(torch.stack([principal, -principal])[None], pool=1)) == 1
    assert float(manipulation_score(torch.zeros(1, 2, 3, 2, 2), pool=2)) == 0
    # Averages over the square: 0.5 and 0.5.
    assert float(manipulation_score(maps, pool=2)) == 0


def test_what_cancels_at_the_edge_counts() -> None:
    maps = torch.zeros(1, 2, 5, 5)
    maps[0, :, 4, 4] = torch.tensor([3.0, -3.0])  # in a square of one pixel
    assert float(manipulation_score(maps, pool=2)) == 1
    maps[0, 0, :2, :2] = 0.5  # as much as 2 that agree: 1 − 2 / (2 + 3 + 3)
    assert float(manipulation_score(maps, pool=2)) == pytest.approx(0.75)


def test_suspicion() -> None:
    trusted = torch.linspace(0, 1, 101)
    assert is_suspicious(torch.tensor([0.94, 0.96]), trusted).tolist() == [False, True]
    with pytest.raises(ValueError, match="trusted is empty"):
        is_suspicious(trusted, trusted[:0])
