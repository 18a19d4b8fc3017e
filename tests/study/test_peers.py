"""Directions of other methods: literal properties on data whose factors are known."""

from __future__ import annotations

import pytest
import torch
from drsa_core import Pairs
from study.peers import (
    ICA,
    NMF,
    Channels,
    Directions,
    KMeansDirections,
    SparseDictionary,
    orthonormalised,
)
from torch import Tensor

PEERS = [NMF, ICA, KMeansDirections, SparseDictionary, Channels]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def factors() -> Tensor:
    """Three non-negative directions of unit length in twelve dimensions, disjoint, shape (12, 3)."""
    directions = torch.zeros(12, 3)
    for k in range(3):
        directions[4 * k : 4 * k + 4, k] = torch.rand(4, generator=generator(k)) + 0.2
    return directions / directions.norm(dim=0)


@pytest.fixture(scope="module")
def pairs(factors: Tensor) -> Pairs:
    """Each activation shows one factor, with a strength of its own; contexts point along the factors."""
    n = 600
    which = torch.arange(n) % 3
    strength = 1 + torch.rand(n, generator=generator(7))
    noise = 0.01 * torch.rand(n, 12, generator=generator(8))
    a = strength[:, None] * factors.T[which] + noise
    c = torch.tensor([3.0, 2.0, 1.0])[which, None] * factors.T[which]
    return Pairs(a, c, torch.arange(n) // 20)


@pytest.mark.parametrize("method", PEERS)
def test_blocks_are_orthonormal_add_up_and_are_sorted(method: type[Directions], pairs: Pairs) -> None:
    pytest.importorskip("sklearn")
    found = method(3, random_state=0).fit(pairs).subspaces_
    assert found.dims == (1, 1, 1, 9)
    assert found.names[-1] == "residual"
    torch.testing.assert_close(found.basis.T @ found.basis, torch.eye(12), atol=1e-5, rtol=0)
    relevance = found.relevance(pairs.a, pairs.c)
    # Σ_k R_k = a·c, pair by pair: what the directions leave over is in the residual.
    torch.testing.assert_close(relevance.sum(1), (pairs.a * pairs.c).sum(1), atol=1e-4, rtol=1e-4)
    means = relevance.mean(0)[:3]
    assert means.tolist() == sorted(means.tolist(), reverse=True)


@pytest.mark.parametrize("method", [NMF, KMeansDirections, SparseDictionary])
def test_factors_that_never_meet_are_found(method: type[Directions], pairs: Pairs, factors: Tensor) -> None:
    pytest.importorskip("sklearn")
    found = method(3, random_state=0).fit(pairs)
    directions = torch.nn.functional.normalize(found.directions_, dim=0)
    # The factor of the largest contexts comes first. 0.01 of noise turns a direction by about as much.
    cosines = (directions.T @ factors).abs().diagonal()
    assert float(cosines.min()) > 0.98


def test_independent_sources_are_found() -> None:
    pytest.importorskip("sklearn")
    sources = torch.rand(4000, 2, generator=generator()) - 0.5
    mixing = torch.tensor([[1.0, 0.6], [0.2, 1.0], [0.0, 0.5]])
    a = sources @ mixing.T
    found = torch.nn.functional.normalize(ICA(2, random_state=0).fit(a, a).directions_, dim=0)
    cosines = (found.T @ torch.nn.functional.normalize(mixing, dim=0)).abs()
    assert float(cosines.max(1).values.min()) > 0.99
    assert sorted(cosines.argmax(1).tolist()) == [0, 1]


def test_channels_are_the_most_relevant_ones(pairs: Pairs) -> None:
    basis = Channels(2).fit(pairs).subspaces_.basis[:, :2]
    order = (pairs.a * pairs.c).mean(0).argsort(descending=True)
    assert torch.equal(basis, torch.eye(12)[:, order[:2]])


def test_the_closest_orthonormal_directions() -> None:
    directions = torch.randn(6, 3, generator=generator(), dtype=torch.float64)
    found = orthonormalised(directions)
    torch.testing.assert_close(found.T @ found, torch.eye(3, dtype=torch.float64))
    unit = torch.nn.functional.normalize(directions, dim=0)
    # The literal formula V (VᵀV)^-½, and closer to V than Gram and Schmidt's.
    values, vectors = torch.linalg.eigh(unit.T @ unit)
    torch.testing.assert_close(found, unit @ vectors @ torch.diag(values**-0.5) @ vectors.T)
    assert float((found - unit).norm()) < float((torch.linalg.qr(unit).Q.abs() - unit.abs()).norm())
    with pytest.raises(ValueError, match="linearly dependent"):
        orthonormalised(torch.ones(4, 2))


def test_scale_does_not_matter_and_seeds_repeat(pairs: Pairs) -> None:
    pytest.importorskip("sklearn")
    first = NMF(3, random_state=1).fit(pairs).subspaces_
    again = NMF(3, random_state=1).fit(pairs.a * 2.0**40, pairs.c * 2.0**-40).subspaces_
    torch.testing.assert_close(first.basis[:, :3], again.basis[:, :3])


def test_what_is_refused(pairs: Pairs) -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(ValueError, match="ends in a ReLU"):
        NMF(3).fit(pairs.a - 1, pairs.c)
    with pytest.raises(ValueError, match="n_subspaces"):
        Channels(13).fit(pairs)
    with pytest.raises(ValueError, match="need at least as many samples"):
        Channels(3).fit(pairs.a[:2], pairs.c[:2])
    with pytest.raises(TypeError, match="no method of its own"):
        Directions(2).fit(pairs)


@pytest.mark.parametrize("method", [NMF, ICA, KMeansDirections, SparseDictionary])
def test_more_directions_than_there_are_in_the_data_are_refused(method: type[Directions]) -> None:
    """What would be left over is noise: of the random start, or of rounding."""
    pytest.importorskip("sklearn")
    c = torch.rand(40, 6, generator=generator(1))
    strengths, directions = (torch.rand(shape, generator=generator(2)) for shape in ((40, 2), (2, 6)))
    with pytest.raises(ValueError, match=r"only 2 of 6 dimensions, where 3 directions .* ask for fewer"):
        method(3, random_state=0).fit(strengths @ directions, c)
    assert method(2, random_state=0).fit(strengths @ directions, c).subspaces_.dims == (1, 1, 4)
    with pytest.raises(ValueError, match=r"[01] of 6 dimensions, where 2 directions .* ask for fewer"):
        method(2, random_state=0).fit(torch.ones(40, 6), c)


def test_a_dictionary_that_nothing_uses_is_refused(pairs: Pairs) -> None:
    """The codes of a are 0 where the largest aᵀd, for activations with a mean square of 1, is below it."""
    pytest.importorskip("sklearn")
    longest = float((pairs.a / pairs.a.square().mean().sqrt()).norm(dim=1).max())
    with pytest.raises(ValueError, match="no activation has a code"):
        SparseDictionary(3, random_state=0, sparsity=1.01 * longest).fit(pairs)
    assert SparseDictionary(3, random_state=0, sparsity=0.5 * longest).fit(pairs).directions_.shape == (12, 3)


def test_independent_components_are_of_what_varies() -> None:
    """Three vectors differ from their mean in two directions only."""
    pytest.importorskip("sklearn")
    a = torch.rand(3, 6, generator=generator())
    with pytest.raises(ValueError, match="vary in only 2 of 6 dimensions"):
        ICA(3, random_state=0).fit(a, a)
    assert ICA(2, random_state=0).fit(a, a).subspaces_.dims == (1, 1, 4)
