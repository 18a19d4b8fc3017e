"""`DRSA(balance=…)`: unequal evidence is levelled, and without it nothing changes."""

from __future__ import annotations

import pytest
import torch
from drsa_core import DRSA, Subspaces
from drsa_core.pairs import balanced


def test_balanced_divides_relevance_of_every_subspace() -> None:
    generator = torch.Generator().manual_seed(0)
    a, c = torch.randn(2, 5, 6, dtype=torch.float64, generator=generator)
    subspaces = Subspaces(torch.eye(6, dtype=torch.float64), [2, 4])
    for exponent in (0.0, 0.3, 1.0):
        even = subspaces.relevance(*balanced(a, c, exponent))
        lengths = a.norm(dim=1, keepdim=True) * c.norm(dim=1, keepdim=True)
        torch.testing.assert_close(even, subspaces.relevance(a, c) / lengths**exponent)


def test_zero_pairs_stay_zero() -> None:
    a, c = balanced(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [3.0, 4.0]]), 1.0)
    torch.testing.assert_close((a * c).sum(1), torch.tensor([0.0, 1.0]))


def test_no_balance_is_the_papers_objective() -> None:
    generator = torch.Generator().manual_seed(0)
    a, c = torch.randn(2, 300, 8, generator=generator)
    default, zero = DRSA(2, random_state=0).fit(a, c), DRSA(2, random_state=0, balance=0.0).fit(a, c)
    assert default.objective_ == zero.objective_
    assert default.subspaces_.basis.equal(zero.subspaces_.basis)
    assert default.subspaces_.metadata["solver"]["balance"] == 0.0


def concepts(strengths: list[float], n: int = 400, n_features: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs a = c = s_m (e_m + noise) with one concept m each, which takes two directions in turn."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for m, strength in enumerate(strengths):
        directions = torch.eye(n_features)[[2 * m, 2 * m + 1]]
        part = directions[torch.randint(2, (n,), generator=generator)]
        rows.append(strength * (part + 0.05 * torch.randn(n, n_features, generator=generator)))
    return torch.cat(rows), torch.cat(rows)


def test_balance_finds_a_weak_concept() -> None:
    """Two concepts, the second with a tenth of the length: a hundredth of the relevance.

    For two subspaces of two dimensions, the paper's objective prefers to halve the strong concept; levelled
    pairs give a subspace to each.
    """
    a, c = concepts([1.0, 0.1])
    truth = [Subspaces(torch.eye(8)[:, [2 * m, 2 * m + 1]], [2]) for m in range(2)]

    def weak_share(balance: float) -> float:
        found = DRSA(dims=[2, 2], random_state=0, balance=balance).fit(a, c).subspaces_
        angles = [found.principal_angles(truth[1], k=k) for k in range(2)]
        return max(float(angle.cos().square().mean()) for angle in angles)

    assert weak_share(0.0) < 0.6
    assert weak_share(1.0) > 0.95


def test_bad_balance_is_named() -> None:
    with pytest.raises(ValueError, match=r"balance must be a finite number from 0 to 1, got 1\.5"):
        DRSA(2, balance=1.5).fit(torch.ones(4, 2), torch.ones(4, 2))
