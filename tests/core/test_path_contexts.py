"""Step 1 of Integrated Gradients: nested quadrature, and as many steps as each R_k asks for (Note B.2)."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from drsa_core.contexts import IntegratedGradientsContext, fejer, nested_levels
from drsa_core.layer import Request
from torch import Tensor, nn


@pytest.mark.parametrize("n", [1, 3, 7, 31])
def test_fejer_weights_are_integrals_of_lagrange_polynomials(n: int) -> None:
    points, weights = fejer(n)
    literal = np.array([1 / (p + 1) for p in range(n)])  # ∫ t^p dt
    moments = np.array([(weights * points**p).sum() for p in range(n)])
    np.testing.assert_allclose(moments, literal, atol=1e-13)  # n points, degree n − 1: this fixes the weights
    assert (weights > 0).all()


def test_levels_are_nested() -> None:
    so_far: list[float] = []
    for m, (points, weights) in enumerate(nested_levels(3, 4), start=3):
        so_far += points.tolist()
        expected = dict(zip(fejer(2**m - 1)[0].round(12), fejer(2**m - 1)[1], strict=True))
        assert len(so_far) == len(weights) == 2**m - 1
        for point, weight in zip(so_far, weights, strict=True):
            assert weight == pytest.approx(expected[round(point, 12)], rel=1e-12)


class Above(nn.Module):
    """y = Σ_j f(a_j) above a layer that hands its input through; counts the activations that it sees."""

    def __init__(self, f) -> None:
        super().__init__()
        self.layer, self.f, self.rows = nn.Identity(), f, 0

    def forward(self, x: Tensor) -> Tensor:
        a = self.layer(x)
        self.rows += len(a)
        return self.f(a).sum(1, keepdim=True)


def contexts(model: Above, x: Tensor, method=None) -> tuple[Tensor, int]:
    """Contexts, and the points on the path: not the first pass and the trial of three for each example."""
    model.rows = 0
    request = Request(model, model.layer, "layer", (x,), 0)
    c = (method or IntegratedGradientsContext())(request)[1]
    return c, model.rows - len(x) - 3 * len(x)


def exp(a: Tensor) -> Tensor:
    return torch.exp(3 * a)


def kinks(a: Tensor) -> Tensor:
    return sum((j * (a - t).relu() for j, t in enumerate((0.11, 0.37, 0.53, 0.71), 1)), 0 * a)


def difference(a: Tensor) -> Tensor:
    """f(a₁) − f(a₂), whose errors cancel in the sum: R_k were up to 100 % off."""
    signs = torch.tensor([1.0, -1.0], dtype=a.dtype)
    return signs * kinks(a)


def test_smooth_functions_need_few_steps_and_none_is_run_twice() -> None:
    a = torch.tensor([[0.3, 1.2]], dtype=torch.float64)
    c, n_points = contexts(Above(exp), a)
    assert n_points == 31  # 7 are enough, 15 say so, and 31 confirm it
    torch.testing.assert_close(a * c, torch.exp(3 * a) - 1, rtol=1e-8, atol=0)


@pytest.mark.parametrize("f", [exp, kinks, difference])
@pytest.mark.parametrize("x", [[0.9, 0.8], [0.9, 0.9], [0.31, 0.4]])
def test_the_error_of_the_relevance_is_below_three_per_cent(f, x) -> None:
    """Of a ⊙ c, and so of each R_k, not only of their sum; 3 % at kinks, far less where f is smooth."""
    a = torch.tensor([x], dtype=torch.float64)
    c, n_points = contexts(Above(f), a)
    gained = f(a) - f(0 * a)  # of each a_j by itself
    assert float((a * c - gained).norm()) <= 0.03 * float(gained.norm())
    assert 7 < n_points <= 511


def test_steps_are_chosen_for_each_example() -> None:
    """An example by itself is the same as in a batch, and does not pay for the others."""
    model = Above(lambda a: a + 0.5 * torch.sin(4 * a**2))
    x = torch.tensor([[0.5, 0.4], [2.9, 2.8], [0.0, 0.0]], dtype=torch.float64)
    together, n_points = contexts(model, x)
    alone = [contexts(model, x[i : i + 1]) for i in range(3)]
    assert torch.equal(together, torch.cat([c for c, _ in alone]))
    assert n_points == sum(n for _, n in alone)
    assert alone[0][1] < alone[1][1]
    assert alone[2][1] <= 15
    assert bool(together[2].isfinite().all())  # a = 0: nothing to sum to


def test_a_first_hit_by_chance_is_not_believed() -> None:
    """Of a polynomial of degree 15, seven points miss a lot and fifteen nothing: 31 and 63 confirm it."""

    def f(a: Tensor) -> Tensor:
        before, here = torch.ones_like(a), 2 * a - 1  # Chebyshev's T_0 and T_1
        for _ in range(14):
            before, here = here, 2 * (2 * a - 1) * here - before
        return a + here

    a = torch.ones(1, 1, dtype=torch.float64)
    c, n_points = contexts(Above(f), a)
    assert n_points == 63
    assert float(c) == pytest.approx(float(f(a) - f(0 * a)), rel=1e-10)


def test_the_cap_is_reported_and_fixed_steps_are_those_of_captum() -> None:
    wild = Above(lambda a: torch.sin(5000 * a) + 0.1 * a)
    a = torch.tensor([[1.0]], dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"is off by .*say 2048: n_steps"):
        assert contexts(wild, a)[1] == 511
    with pytest.warns(UserWarning, match=r"is off by .*say 12: n_steps"):
        contexts(wild, a, IntegratedGradientsContext(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        c, n_points = contexts(Above(exp), a, IntegratedGradientsContext(100))
    assert n_points == 100
    nodes, weights = np.polynomial.legendre.leggauss(100)
    by_hand = sum(w / 2 * 3 * np.exp(3 * (t + 1) / 2) for t, w in zip(nodes, weights, strict=True))
    assert float(c) == pytest.approx(by_hand, rel=1e-12)


def test_no_more_steps_once_nothing_is_finite() -> None:
    a = torch.tensor([[1.0]], dtype=torch.float64)
    c, n_points = contexts(Above(lambda a: a + torch.where(a < 0.5, torch.nan, 0.0) * a), a)
    assert n_points == 7
    assert bool(c.isnan().all())


@pytest.mark.parametrize("n_steps", [0, -1, 2.5, "many"])
def test_bad_numbers_of_steps(n_steps) -> None:
    with pytest.raises((TypeError, ValueError), match="n_steps"):
        IntegratedGradientsContext(n_steps)
