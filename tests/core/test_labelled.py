"""Subspaces from labels: NetDissect's filters (Note H), IBD's concept vectors (Note I)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from drsa_core import Pairs, concept_vectors, ibd_subspaces, netdissect_subspaces
from torch import Tensor

from tests import golden


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    """Each activation shows one of three disjoint directions, with a strength of its own."""
    directions = torch.zeros(3, 12)
    for k in range(3):
        directions[k, 4 * k : 4 * k + 4] = torch.rand(4, generator=generator(k)) + 0.2
    which = torch.arange(600) % 3
    a = (1 + torch.rand(600, 1, generator=generator(7))) * directions[which]
    return Pairs(a + 0.01 * torch.rand(600, 12, generator=generator(8)), directions[which])


def test_filters_are_ranked_by_mean_relevance_per_filter() -> None:
    a = torch.rand(50, 6, generator=generator())
    c = torch.rand(50, 6, generator=generator(1)) * torch.tensor([1.0, 4.0, 1.0, 2.0, 4.0, 3.0])
    names = ["x", "y", "x", "z", "y", "z"]
    scores = {n: float((a * c).mean(0)[[i for i, m in enumerate(names) if m == n]].mean()) for n in "xyz"}
    found = netdissect_subspaces(names, a, c, n_subspaces=2)
    assert list(found.names) == sorted(scores, key=lambda name: -scores[name])[:2]
    identity = torch.eye(6)
    for name, block in zip(found.names, found.blocks, strict=True):
        assert torch.equal(block, identity[:, [i for i, m in enumerate(names) if m == name]])
    # Neither order nor names depend on the scale.
    for s, t in itertools.product([1e-25, 1e25], repeat=2):
        assert netdissect_subspaces(names, a * s, c * t, 2).names == found.names
    assert netdissect_subspaces(dict(enumerate(names)), Pairs(a, c), n_subspaces=None).n_subspaces == 3
    with pytest.raises(ValueError, match="a concept for each of the 6 filters"):
        netdissect_subspaces(names[:5], a, c)
    with pytest.raises(ValueError, match="n_subspaces must be an integer from 1 to 3, got 4"):
        netdissect_subspaces(names, a, c, 4)


def test_a_tally_from_a_spreadsheet_is_read_as_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "tally.csv"
    path.write_bytes("\ufeffunit,label\n1,Bäume\n2,空\n".encode())  # with a mark in front
    found = netdissect_subspaces(path, torch.ones(3, 2), torch.tensor([[2.0, 1.0]]).repeat(3, 1), 2)
    assert found.names == ("Bäume", "空")


@pytest.mark.parametrize(
    ("tally", "message"),
    [
        ("filter,name\n1,sky\n", "columns unit and label"),
        ("unit,label\none,sky\n", "line 2: unit must be"),
        ("unit,label\n1,sky\n1,tree\n", "line 3: unit must be"),
        ("unit,label\n1,\n", "line 2: unit must be"),
    ],
)
def test_damaged_tallies_are_named(tally: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tally.csv"
    path.write_text(tally)
    with pytest.raises(ValueError, match=message):
        netdissect_subspaces(path, torch.rand(3, 2), torch.rand(3, 2))


def test_relevance_of_concept_vectors_is_that_of_the_pseudo_inverse() -> None:
    """R_k = (u_kᵀa)(u⁺_k c), and the residual makes it add up, whatever the lengths (Note I)."""
    vectors = torch.randn(3, 5, generator=generator(), dtype=torch.float64)
    a, c = torch.randn(2, 20, 5, generator=generator(1), dtype=torch.float64)
    inverse = torch.linalg.inv(vectors @ vectors.T) @ vectors
    expected = torch.stack([(a @ vectors[k]) * (c @ inverse[k]) for k in range(3)], 1)
    for lengths in ([1.0] * 3, [1e-25] * 3, [1e-20, 1.0, 1e20]):
        found = ibd_subspaces(vectors * torch.tensor(lengths, dtype=torch.float64)[:, None], ["x", "y", "z"])
        relevance = found.relevance(a, c)
        torch.testing.assert_close(relevance[:, :3], expected)
        torch.testing.assert_close(relevance.sum(1), (a * c).sum(1))
    assert found.names == ("x", "y", "z", "residual")
    for wrong in (vectors[[0, 1, 1]], vectors * torch.tensor([[1.0], [0.0], [1.0]])):
        with pytest.raises(ValueError, match="linearly independent"):
            ibd_subspaces(wrong)


def test_concept_vectors_tell_labels_apart(pairs: Pairs) -> None:
    labels = torch.arange(len(pairs)) % 3
    vectors = concept_vectors(pairs.a, labels)
    assert vectors.shape == (3, 12)
    assert torch.equal((pairs.a @ vectors.T).argmax(1), labels)
    # A minimum of the literal loss: its gradient in double precision is zero.
    rows = pairs.a.double() / pairs.a.double().square().mean().sqrt()
    weights = vectors.double().requires_grad_()
    bias = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    wanted = torch.nn.functional.one_hot(labels, 3).double()

    def loss() -> Tensor:
        logits = rows @ weights.T + bias
        parts = wanted * torch.log1p(torch.exp(-logits)) + (1 - wanted) * torch.log1p(torch.exp(logits))
        return parts.mean(0).sum() + 5e-4 * weights.square().sum()

    for _ in range(200):  # the bias is not returned: solve for it
        (gradient,) = torch.autograd.grad(loss(), bias)
        with torch.no_grad():
            bias -= 3 * gradient
    (gradient,) = torch.autograd.grad(loss(), weights)
    assert float(gradient.abs().max()) < 1e-3
    for wrong in ([0] * len(pairs), [1, 2] * (len(pairs) // 2)):
        with pytest.raises(ValueError, match="each at least once"):
            concept_vectors(pairs.a, wrong)


def test_concept_vectors_are_found_with_hardly_any_weight_decay() -> None:
    """Features of very different scale: at the minimum the gradient by the weights is zero."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    source = generator()
    labels = torch.randint(3, (600,), generator=source)
    means = torch.rand(3, 64, generator=source)
    noise = torch.randn(600, 64, generator=source)
    a = ((means[labels] + noise).relu() * torch.logspace(0, -2, 64)).double()
    vectors = concept_vectors(a, labels, weight_decay=1e-6)
    rows = a / a.square().mean().sqrt()
    reference = linear_model.LogisticRegression(C=1 / (600 * 1e-6), tol=1e-9, max_iter=10000)
    for label, vector in enumerate(vectors):
        expected = torch.from_numpy(reference.fit(rows.numpy(), (labels == label).numpy()).coef_[0])
        cosine = torch.nn.functional.cosine_similarity(vector, expected, dim=0)
        assert float(cosine) == pytest.approx(1, abs=1e-5)


def test_netdissect_on_a_real_tally() -> None:
    tally = golden.SHARED / "data" / "netdissect" / "torchvision-vgg16-conv4_3.csv"
    if not tally.is_file():
        pytest.skip("the tally is not at hand")
    generator = torch.Generator().manual_seed(0)
    a, c = torch.rand(10, 512, generator=generator), torch.rand(10, 512, generator=generator)
    subspaces = netdissect_subspaces(tally, a, c, None)
    assert subspaces.is_complete
    assert subspaces.n_subspaces == 114  # the paper's table of concepts found at Conv4_3 of VGG16-TV
    scores = subspaces.relevance(a, c).mean(0) / torch.tensor(subspaces.dims)
    assert (scores.diff() <= 1e-6).all()
