"""Subspaces do not depend on the scale of activations and contexts, in float32 least of all."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from drsa_core import (
    DRSA,
    DSA,
    PCA,
    PRCA,
    MaxRel,
    Pairs,
    RandomSubspaces,
    Subspaces,
    ibd_subspaces,
    netdissect_subspaces,
)
from drsa_core.checks import times_power_of_two, unit_rows, unit_scale, unscaled
from drsa_core.evaluation import select_prototypes
from drsa_core.objective import generalised_mean
from drsa_core.pairs import balanced, normalise

ESTIMATORS = [
    PRCA(2),
    PCA(2),
    MaxRel(3),
    RandomSubspaces(3, random_state=0),
    DSA(3, n_init=2, random_state=0),
    DRSA(3, n_init=2, random_state=0),
    DRSA(3, n_init=2, random_state=0, balance=0.5),
    DRSA(3, n_init=1, random_state=0, balance=1.0, solver="paper", max_iter=50),
]


def planted(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples in one of three coordinate planes each, of relevance 3 : 2 : 1, mixed by a random rotation."""
    generator = torch.Generator().manual_seed(0)
    which = torch.randint(3, (300,), generator=generator)
    inside = torch.rand(300, 2, generator=generator, dtype=torch.float64) + 0.2
    a = 0.01 * torch.randn(300, 6, generator=generator, dtype=torch.float64)
    for k in range(3):
        a[which == k, 2 * k : 2 * k + 2] += inside[which == k]
    strength = torch.tensor([3.0, 3.0, 2.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64)).Q
    return (a @ rotation).to(dtype), ((a * strength) @ rotation).to(dtype)


def fit_anew(estimator: Any, a: torch.Tensor, c: torch.Tensor) -> Any:
    return type(estimator)(**estimator.get_params()).fit(a, c)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
@pytest.mark.parametrize(("s", "t"), [*itertools.product([-66, 0, 66], repeat=2), (-83, -100), (83, 83)])
def test_powers_of_two_change_no_digit(estimator, s: int, t: int) -> None:
    a, c = planted()
    expected = fit_anew(estimator, a, c).subspaces_
    found = fit_anew(estimator, a * 2.0**s, c * 2.0**t).subspaces_
    assert found.dims == expected.dims
    assert torch.equal(found.basis, expected.basis)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
@pytest.mark.parametrize(
    ("s", "t"),
    [*itertools.product([1e-20, 1.0, 1e20], repeat=2), (1e-30, 1e-30), (1e25, 1e25), (1e-25, 1e25)],
)
def test_other_scales_change_no_more_than_rounding_does(estimator, s: float, t: float) -> None:
    a, c = planted()
    expected = fit_anew(estimator, a, c).subspaces_
    found = fit_anew(estimator, a * s, c * t).subspaces_
    assert found.dims == expected.dims
    for k in range(expected.n_subspaces):
        # 2e-3: rounding of the data by 6e-8 shows enlarged in where an iteration stops; a wrong order or a
        # wrong feature would be an angle of order 1.
        assert float(found.principal_angles(expected, k, k).max()) < 2e-3


@pytest.mark.parametrize(("s", "t"), [*itertools.product([1e-20, 1.0, 1e20], repeat=2)])
def test_eigenvalues_and_relevance_scale_with_both(s: float, t: float) -> None:
    a, c = planted()
    for estimator, attribute, factor in [
        (PRCA(), "eigenvalues_", s * t),
        (PCA(), "eigenvalues_", s * s),
        (MaxRel(), "relevance_", s * t),
    ]:
        expected = factor * getattr(fit_anew(estimator, a, c), attribute)
        found = getattr(fit_anew(estimator, a * s, c * t), attribute)
        assert found.dtype == torch.float64
        # 1e-6 of the largest: rounding of a · s and c · t in float32.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_the_objective_of_drsa_has_no_scale() -> None:
    a, c = planted()
    expected = DRSA(3, n_init=1, random_state=0).fit(a, c).objective_
    for s, t in [(1e-20, 1e20), (1e20, 1e20), (1e-30, 1e-30)]:
        found = DRSA(3, n_init=1, random_state=0).fit(a * s, c * t).objective_
        assert found == pytest.approx(expected, rel=1e-4)  # both stop within tol of the maximum


@pytest.mark.parametrize("estimator", [PRCA(2), MaxRel(2), DRSA(3, n_init=1, random_state=0)], ids=repr)
@pytest.mark.parametrize("exponent", [-700, 700])
def test_float64_has_an_edge_too(estimator, exponent: int) -> None:
    a, c = planted(torch.float64)
    expected = fit_anew(estimator, a, c).subspaces_
    far = fit_anew(estimator, times_power_of_two(a, exponent), times_power_of_two(c, exponent))
    assert torch.equal(far.subspaces_.basis, expected.basis)
    for attribute in ("eigenvalues_", "relevance_"):
        if hasattr(type(estimator), attribute):
            with pytest.raises(ValueError, match="beyond the range of float64"):
                getattr(far, attribute)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batches_of_a_stream_may_differ_in_scale(dtype: torch.dtype) -> None:
    a, c = planted(dtype)
    scales = torch.tensor([1e-20] * 100 + [1e18] * 100 + [1e20] * 100, dtype=dtype)[:, None]
    a, c = a * scales, c * scales
    whole, stream = PRCA(2).fit(a, c), PRCA(2)
    order = torch.arange(300).split(100)
    for rows in (order[0], order[2], order[1]):  # up and down
        stream.partial_fit(a[rows], c[rows])
    torch.testing.assert_close(stream.eigenvalues_, whole.eigenvalues_, rtol=1e-9, atol=0)
    torch.testing.assert_close(stream.basis_, whole.basis_, rtol=0, atol=1e-6)


def test_an_empty_context_in_a_stream_hides_nothing() -> None:
    a, c = planted()
    a, c = a * 1e-30, c * 1e-30
    stream = PRCA().partial_fit(a, torch.zeros_like(c)).partial_fit(a, c).partial_fit(a, torch.zeros_like(c))
    whole = PRCA().fit(a, c)
    assert stream.n_samples_seen_ == 900
    torch.testing.assert_close(stream.eigenvalues_ * 3, whole.eigenvalues_, rtol=1e-12, atol=0)
    # Streams of float32 and float64 end in the wider one, whichever comes last.
    assert PRCA().partial_fit(a.double(), c.double()).partial_fit(a, c).basis_.dtype == torch.float64


def test_subspaces_from_labels_do_not_depend_on_the_scale() -> None:
    a, c = planted()
    concepts = ["x", "y", "x", "z", "y", "z"]
    expected = netdissect_subspaces(concepts, a, c, 2).names
    for s, t in itertools.product([1e-25, 1e25], repeat=2):
        assert netdissect_subspaces(concepts, a * s, c * t, 2).names == expected
    vectors = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    expected_basis = ibd_subspaces(vectors).basis
    # Lengths of concept vectors cancel, also where they differ.
    for lengths in ([1e-25] * 3, [1e25] * 3, [1e-20, 1.0, 1e20]):
        found = ibd_subspaces(vectors * torch.tensor(lengths)[:, None]).basis
        torch.testing.assert_close(found, expected_basis, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="concept vector 1 is zero"):
        ibd_subspaces(vectors * torch.tensor([[1.0], [0.0], [1.0]]))


def test_prototypes_do_not_depend_on_the_scale() -> None:
    a, c = planted()
    image = torch.arange(300) // 30
    subspaces = Subspaces(torch.eye(6), [2, 2, 2])
    expected = select_prototypes(Pairs(a, c, image), subspaces, 3, 50, random_state=0)
    for s, t in [(1e-25, 1e-25), (1e25, 1e25)]:
        found = select_prototypes(Pairs(a * s, c * t, image), subspaces, 3, 50, random_state=0)
        assert found.images == expected.images
        assert found.objective == pytest.approx(expected.objective * s * t, rel=1e-6, abs=0)


def test_normalise_and_balanced_at_any_scale() -> None:
    a, c = planted()
    for s in (2.0**-100, 2.0**100):
        assert torch.equal(normalise(a * s), normalise(a))
    for s, t in itertools.product([1e-30, 1e30], repeat=2):
        x, y = balanced(a * s, c * t, 1.0)
        # Note on `balanced`: with exponent 1 the relevance of a pair is its cosine.
        cosine = torch.nn.functional.cosine_similarity(a.double(), c.double())
        torch.testing.assert_close((x.double() * y.double()).sum(1), cosine, rtol=1e-5, atol=1e-6)
    x, y = balanced(torch.zeros(2, 3), c[:2, :3], 1.0)
    assert not x.any()
    assert not y.any()


def test_unit_scale_is_exact() -> None:
    for value in (1.0, 0.75, 3e38, 1.2e-38, 1e-45, -5.0):
        tensor = torch.tensor([[value, 0.0]])
        scaled, exponent = unit_scale(tensor)
        assert 0.5 <= float(scaled.abs().max()) < 1
        assert float(scaled[0, 0]) * 2.0**exponent == float(tensor[0, 0])
    assert unit_scale(torch.zeros(2, 2))[1] == 0
    with pytest.raises(ValueError, match="2\\^2000, beyond the range of float64"):
        unscaled(torch.ones(1), 2000, "it")
    assert float(unscaled(torch.zeros(1), 2000, "it")) == 0


def test_unit_rows_of_any_length() -> None:
    rows = torch.tensor([[3e-200, 4e-200], [3e200, 4e200], [0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([[0.6, 0.8], [0.6, 0.8], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(unit_rows(rows), expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_generalised_mean_with_extreme_exponents(dtype: torch.dtype) -> None:
    values = torch.tensor([1e-3, 1.0, 2.0], dtype=dtype)
    geometric = float(np.exp(np.log(values.double().numpy()).mean()))
    for q, expected in [(-1e3, 1e-3), (1e3, 2.0), (1e-9, geometric), (-1e-9, geometric), (0.0, geometric)]:
        mean, slopes = generalised_mean(values, q)
        # 2e-3: at |q| = 1000, K^(1/q) is 1 + 1.1e-3.
        assert mean == pytest.approx(expected, rel=2e-3 if abs(q) > 1 else 1e-6)
        assert torch.isfinite(slopes).all()
        assert float((slopes * values).double().sum()) == pytest.approx(mean, rel=1e-5)  # Euler
