"""PRCA and the closed-form baselines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drsa_core import PCA, PRCA, MaxRel, RandomSubspaces

from tests import golden


@pytest.fixture
def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(300, 12, generator=generator, dtype=torch.float64)
    return a, torch.randn(300, 12, generator=generator, dtype=torch.float64)


def test_eigenproblem_of_the_paper(pairs) -> None:
    """Σ = E[acᵀ + caᵀ], summed sample by sample; Σu = λu; λ signed and descending (Note C.2)."""
    a, c = pairs
    outer = [torch.outer(x, y) + torch.outer(y, x) for x, y in zip(a, c, strict=True)]
    sigma = torch.stack(outer).mean(0)
    prca = PRCA(n_components=3).fit(a, c)
    torch.testing.assert_close(sigma @ prca.basis_, prca.basis_ * prca.eigenvalues_, atol=1e-12, rtol=0)
    assert (prca.eigenvalues_.diff() <= 0).all()
    assert prca.eigenvalues_[-1] < 0 < prca.eigenvalues_[0]  # indefinite, unlike PCA
    assert (prca.subspaces_.dims, prca.subspaces_.names) == ((3, 9), ("PRCA", "residual"))
    # Eigenvalues are twice the relevance captured, and no other subspace captures more.
    captured = prca.subspaces_.relevance(a, c).mean(0)[0]
    assert captured.item() == pytest.approx(prca.eigenvalues_[:3].sum().item() / 2)
    for seed in range(5):
        other = RandomSubspaces(dims=[3], random_state=seed).fit(a).subspaces_
        assert other.relevance(a, c).mean(0)[0] < captured


def test_signs_are_fixed(pairs) -> None:
    a, c = pairs
    components = PRCA().fit(a, c).basis_
    assert (components.gather(0, components.abs().argmax(0, keepdim=True)) > 0).all()
    # Σ is the same for (−a, −c), and so are the eigenvectors with their signs.
    torch.testing.assert_close(PRCA().fit(-a, -c).basis_, components)


def test_reduction_to_uncentred_pca(pairs) -> None:
    """Proposition 2, exactly: with c = a the spectrum is that of E[aaᵀ], here from the SVD of a."""
    a, _ = pairs
    _, singular, vectors = np.linalg.svd(a.numpy() / np.sqrt(len(a)), full_matrices=False)
    prca, pca = PRCA(2).fit(a, a), PCA(2).fit(a)
    torch.testing.assert_close(pca.eigenvalues_, torch.as_tensor(singular**2))
    torch.testing.assert_close(prca.eigenvalues_, 2 * pca.eigenvalues_)
    overlap = (torch.as_tensor(vectors) @ pca.basis_).abs()
    torch.testing.assert_close(overlap, torch.eye(12, dtype=torch.float64), atol=1e-9, rtol=0)
    assert torch.equal(prca.basis_, pca.basis_)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_stream_equals_one_batch(pairs, dtype: torch.dtype) -> None:
    a, c = (t.to(dtype) for t in pairs)
    whole, stream = PRCA(2).fit(a, c), PRCA(2)
    for start, stop in [(0, 1), (1, 200), (200, 300)]:
        stream.partial_fit(a[start:stop], c[start:stop])
    assert stream.n_samples_seen_ == 300
    assert stream.basis_.dtype == dtype
    # Sums are in float64, so the order of addition is not seen in either precision.
    torch.testing.assert_close(stream.eigenvalues_, whole.eigenvalues_, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(stream.basis_, whole.basis_, rtol=0, atol=1e-6)
    assert stream.fit(a[:10], c[:10]).n_samples_seen_ == 10  # fit starts anew


def test_numpy_and_half_precision_are_welcome(pairs) -> None:
    a, c = pairs
    from_numpy = PRCA().fit(a.numpy(), c.numpy())
    assert torch.equal(from_numpy.basis_, PRCA().fit(a, c).basis_)
    assert PRCA().fit(a.half(), c.half()).basis_.dtype == torch.float32


def test_all_components(pairs) -> None:
    subspaces = PRCA(n_components=12).fit(*pairs).subspaces_
    assert (subspaces.dims, subspaces.is_complete) == ((12,), True)
    assert MaxRel(n_components=12).fit(*pairs).subspaces_.dims == (12,)


def test_maxrel_takes_the_most_relevant_features(pairs) -> None:
    a, c = pairs
    maxrel = MaxRel(n_components=2).fit(a, c)
    scores = [float(sum(a[n, j] * c[n, j] for n in range(len(a))) / len(a)) for j in range(12)]
    assert maxrel.relevance_.tolist() == pytest.approx(scores)
    assert maxrel.order_.tolist() == sorted(range(12), key=lambda j: -scores[j])
    first = maxrel.subspaces_.blocks[0]
    assert first.argmax(0).tolist() == maxrel.order_[:2].tolist()
    assert first.sum() == 2


def test_random_subspaces_are_seeded(pairs) -> None:
    a, _ = pairs
    first, again, other = (RandomSubspaces(3, random_state=s).fit(a).subspaces_ for s in (0, 0, 1))
    assert torch.equal(first.basis, again.basis)
    assert not torch.equal(first.basis, other.basis)
    assert first.dims == (4, 4, 4)
    assert first.orthogonality_error < 1e-12


def test_golden() -> None:
    arrays, _ = golden.load("drsa_syn")
    a, c = arrays["A"].astype(np.float64), arrays["C"].astype(np.float64)
    for model, name in [(PRCA().fit(a, c), "prca"), (PCA().fit(a), "pca")]:
        np.testing.assert_allclose(model.eigenvalues_.numpy(), arrays[f"{name}_eigvals"], rtol=1e-9)
        # Stored in float32; eigenvectors agree up to sign.
        overlap = np.abs((model.basis_.numpy() * arrays[f"{name}_eigvecs"]).sum(0))
        np.testing.assert_allclose(overlap, 1, atol=1e-6)
    maxrel = MaxRel().fit(a, c)
    np.testing.assert_allclose(maxrel.relevance_.numpy(), arrays["maxrel_score"], rtol=1e-5)
    assert maxrel.order_.tolist() == arrays["maxrel_order"].tolist()


@pytest.mark.parametrize("model", [PRCA, MaxRel])
@pytest.mark.parametrize(
    ("a", "c", "message"),
    [
        (torch.ones(3, 4), torch.ones(3, 5), r"same shape .* a \(3, 4\) and c \(3, 5\)"),
        (torch.ones(4), torch.ones(4), r"shape \(n_samples, n_features\)"),
        (torch.ones(0, 4), torch.ones(0, 4), "both at least 1"),
        (torch.tensor([[1.0, torch.nan]]), torch.ones(1, 2), r"a \(activations\) has 1 NaN or Inf"),
        (torch.ones(1, 2), torch.tensor([[1.0, torch.inf]]), r"first at index \(0, 1\)"),
        (torch.ones(3, 4), torch.zeros(3, 4), "zero"),
    ],
)
def test_bad_input_is_named(model, a, c, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ = model().fit(a, c).subspaces_


def test_bad_parameters_are_named(pairs) -> None:
    for model in (PRCA, PCA, MaxRel):
        with pytest.raises(ValueError, match="at most D = 12, got 13"):
            model(13).fit(*pairs)
        with pytest.raises(ValueError, match="at least 1, got 0"):
            model(0).fit(*pairs)
    with pytest.raises(ValueError, match="5 components need at least as many samples, got 4"):
        _ = PRCA(5).fit(pairs[0][:4], pairs[1][:4]).subspaces_
    with pytest.raises(ValueError, match="not fitted yet"):
        _ = PRCA().subspaces_
    with pytest.raises(ValueError, match="fitted on 12 features, this batch has 3"):
        PRCA().fit(*pairs).partial_fit(torch.ones(2, 3), torch.ones(2, 3))
