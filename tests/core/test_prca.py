"""PRCA and the closed-form baselines, and what all estimators share: parameters, scales, provenance."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from drsa_core import DRSA, DSA, PCA, PRCA, MaxRel, NotFittedError, Pairs, RandomSubspaces
from drsa_core.provenance import Provenance
from torch import Tensor

from tests import golden

ESTIMATORS: list[Any] = [PRCA, PCA, MaxRel, RandomSubspaces, DSA, DRSA]
PROVENANCE = Provenance("zennit", "Gradient", "features.3", 1, 7, "abc", 20, 0)


@pytest.fixture
def arrays() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(300, 12, generator=generator, dtype=torch.float64)
    return a, torch.randn(300, 12, generator=generator, dtype=torch.float64)


@pytest.fixture
def pairs() -> Pairs:
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(60, 6, generator=generator)
    return Pairs(a, a * torch.rand(60, 6, generator=generator), provenance=PROVENANCE)


def fast(estimator: Any) -> Any:
    """An instance that fits in no time, with a seed where there is one."""
    wanted = {"n_init": 1, "random_state": 0, "n_subspaces": 2, "n_components": 2}
    return estimator(**{name: wanted[name] for name in estimator().get_params() if name in wanted})


# The mathematics ----------------------------------------------------------------------------------------


def test_eigenproblem_of_the_paper(arrays) -> None:
    """Σ = E[acᵀ + caᵀ], summed sample by sample; Σu = λu; λ signed and descending (Note C.2)."""
    a, c = arrays
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
    # Signs are fixed: Σ is the same for (−a, −c).
    assert (prca.basis_.gather(0, prca.basis_.abs().argmax(0, keepdim=True)) > 0).all()
    torch.testing.assert_close(PRCA().fit(-a, -c).basis_, prca.basis_)


def test_reduction_to_uncentred_pca(arrays) -> None:
    """Proposition 2, exactly: with c = a the spectrum is that of E[aaᵀ], here from the SVD of a."""
    a, _ = arrays
    _, singular, vectors = np.linalg.svd(a.numpy() / np.sqrt(len(a)), full_matrices=False)
    prca, pca = PRCA(2).fit(a, a), PCA(2).fit(a)
    torch.testing.assert_close(pca.eigenvalues_, torch.as_tensor(singular**2))
    torch.testing.assert_close(prca.eigenvalues_, 2 * pca.eigenvalues_)
    overlap = (torch.as_tensor(vectors) @ pca.basis_).abs()
    torch.testing.assert_close(overlap, torch.eye(12, dtype=torch.float64), atol=1e-9, rtol=0)
    assert pca.subspaces_.names == ("PCA", "residual")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_stream_equals_one_batch(arrays, dtype: torch.dtype) -> None:
    a, c = (t.to(dtype) for t in arrays)
    whole, stream = PRCA(2).fit(a, c), PRCA(2)
    for start, stop in [(0, 1), (1, 200), (200, 300)]:
        stream.partial_fit(a[start:stop], c[start:stop])
    assert stream.n_samples_seen_ == 300
    assert stream.basis_.dtype == dtype
    # Sums are in float64, so the order of addition is not seen in either precision.
    torch.testing.assert_close(stream.eigenvalues_, whole.eigenvalues_, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(stream.basis_, whole.basis_, rtol=0, atol=1e-6)
    assert stream.fit(a[:10], c[:10]).n_samples_seen_ == 10  # fit starts anew


def test_maxrel_takes_the_most_relevant_features(arrays) -> None:
    a, c = arrays
    maxrel = MaxRel(n_components=2).fit(a, c)
    scores = [float(sum(a[n, j] * c[n, j] for n in range(len(a))) / len(a)) for j in range(12)]
    assert maxrel.relevance_.tolist() == pytest.approx(scores)
    assert maxrel.order_.tolist() == sorted(range(12), key=lambda j: -scores[j])
    first = maxrel.subspaces_.blocks[0]
    assert first.argmax(0).tolist() == maxrel.order_[:2].tolist()
    assert first.sum() == 2


def test_random_subspaces_are_seeded(arrays) -> None:
    a, _ = arrays
    first, again, other = (RandomSubspaces(3, random_state=s).fit(a).subspaces_ for s in (0, 0, 1))
    assert torch.equal(first.basis, again.basis)
    assert not torch.equal(first.basis, other.basis)
    assert first.dims == (4, 4, 4)
    assert first.orthogonality_error < 1e-12


def test_all_components_and_half_precision(arrays) -> None:
    a, c = arrays
    subspaces = PRCA(n_components=12).fit(a.numpy(), c.numpy()).subspaces_
    assert (subspaces.dims, subspaces.is_complete) == ((12,), True)
    assert MaxRel(n_components=12).fit(a, c).subspaces_.dims == (12,)
    assert PRCA().fit(a.half(), c.half()).basis_.dtype == torch.float32


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


# Scales -------------------------------------------------------------------------------------------------

SCALED = [
    PRCA(2),
    PCA(2),
    MaxRel(3),
    DSA(3, n_init=2, random_state=0),
    DRSA(3, n_init=2, random_state=0, balance=0.5),
    DRSA(3, n_init=1, random_state=0, balance=1.0, solver="paper", max_iter=50),
]


def planted() -> tuple[Tensor, Tensor]:
    """Samples in one of three coordinate planes each, of relevance 3 : 2 : 1, mixed by a random rotation."""
    generator = torch.Generator().manual_seed(0)
    which = torch.randint(3, (300,), generator=generator)
    inside = torch.rand(300, 2, generator=generator, dtype=torch.float64) + 0.2
    a = 0.01 * torch.randn(300, 6, generator=generator, dtype=torch.float64)
    for k in range(3):
        a[which == k, 2 * k : 2 * k + 2] += inside[which == k]
    strength = torch.tensor([3.0, 3.0, 2.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64)).Q
    return (a @ rotation).float(), ((a * strength) @ rotation).float()


@pytest.mark.parametrize("estimator", SCALED, ids=repr)
@pytest.mark.parametrize(("s", "t"), [(2.0**-83, 2.0**-100), (2.0**83, 2.0**83), (1e-25, 1e25), (1e20, 1.0)])
def test_subspaces_do_not_depend_on_scales_that_float32_products_leave(estimator, s, t) -> None:
    a, c = planted()
    expected = copy.deepcopy(estimator).fit(a, c).subspaces_
    found = copy.deepcopy(estimator).fit(a * s, c * t).subspaces_
    assert found.dims == expected.dims
    for k in range(expected.n_subspaces):
        # 2e-3: rounding of the data by 6e-8 shows enlarged in where an iteration stops; a wrong order or a
        # wrong feature would be an angle of order 1.
        assert float(found.principal_angles(expected, k, k).max()) < 2e-3


@pytest.mark.parametrize(("s", "t"), [*itertools.product([1e-20, 1e20], repeat=2)])
def test_eigenvalues_and_relevance_scale_with_both(s: float, t: float) -> None:
    a, c = planted()
    for make, attribute, factor in [
        (PRCA, "eigenvalues_", s * t),
        (PCA, "eigenvalues_", s * s),
        (MaxRel, "relevance_", s * t),
    ]:
        expected = factor * getattr(make().fit(a, c), attribute)
        found = getattr(make().fit(a * s, c * t), attribute)
        # 1e-6 of the largest: rounding of a · s and c · t in float32.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


# As scikit-learn's users expect it ----------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_parameters_by_name(estimator) -> None:
    model = estimator()
    parameters = model.get_params()
    assert parameters == model.get_params(deep=False) == vars(model)  # the constructor stores nothing else
    name = next(iter(parameters))
    assert model.set_params(**{name: 3}) is model
    assert model.get_params() == {**parameters, name: 3}
    with pytest.raises(ValueError, match=f"{estimator.__name__} has no parameter 'alpha'; .* are {name}"):
        model.set_params(**{name: 5, "alpha": 1})
    assert getattr(model, name) == 3  # nothing is changed by a call that fails


def test_repr_shows_what_is_not_the_default() -> None:
    assert repr(DRSA()) == "DRSA()"
    assert repr(DRSA(n_subspaces=3, random_state=0)) == "DRSA(n_subspaces=3, random_state=0)"
    assert repr(DRSA(dims=np.array([1, 2]))) == "DRSA(dims=array([1, 2]))"  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_scikit_learn_clones_it(estimator, pairs) -> None:
    base = pytest.importorskip("sklearn.base")
    model = fast(estimator).fit(pairs)
    fresh = base.clone(model)
    assert type(fresh) is estimator
    assert fresh.get_params() == model.get_params()
    assert not hasattr(fresh, "subspaces_")
    assert torch.equal(fresh.fit(pairs).subspaces_.basis, model.subspaces_.basis)
    # A bad value is kept, and refused by fit.
    name = next(iter(model.get_params()))
    wrong = base.clone(estimator(**{name: "four"}))
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 'four'"):
        wrong.fit(pairs)


def test_scikit_learn_is_not_needed() -> None:
    script = (
        "import sys; sys.modules['sklearn'] = None\n"
        "import torch, drsa_core\n"
        "model = drsa_core.PRCA(); model.set_params(**model.get_params()).fit(torch.eye(3), torch.eye(3))\n"
        "print(model.subspaces_)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_fitted_attributes_before_the_fit(estimator, pairs) -> None:
    model = estimator()
    with pytest.raises(NotFittedError, match=f"{estimator.__name__} is not fitted yet"):
        _ = model.subspaces_
    assert not hasattr(model, "subspaces_")
    fitted = fast(estimator).fit(pairs)
    with pytest.raises(AttributeError, match="no attribute 'subspace_'") as caught:
        _ = fitted.subspace_  # a slip of the pen is not a missing fit
    assert not isinstance(caught.value, NotFittedError)
    assert torch.equal(copy.deepcopy(fitted).subspaces_.basis, fitted.subspaces_.basis)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_fit_takes_pairs_and_remembers_where_they_are_from(estimator, pairs) -> None:
    model = fast(estimator)
    assert model.fit(pairs) is model
    from_arrays = fast(estimator).fit(pairs.a, pairs.c).subspaces_
    assert torch.equal(model.subspaces_.basis, from_arrays.basis)
    assert Provenance.from_dict(model.subspaces_.metadata["provenance"]) == PROVENANCE
    assert "provenance" not in from_arrays.metadata


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_fit_does_not_take(estimator, pairs) -> None:
    with pytest.raises(TypeError, match=r"Pairs hold their contexts"):
        estimator().fit(pairs, pairs.c)
    if estimator in (PCA, RandomSubspaces, DSA):  # blind to contexts
        only_a = fast(estimator).fit(pairs.a).subspaces_
        assert torch.equal(only_a.basis, fast(estimator).fit(pairs).subspaces_.basis)
    else:
        with pytest.raises(TypeError, match=r"contexts are missing: give fit\(a, c\)"):
            estimator().fit(pairs.a)


def test_batches_of_a_stream_must_be_of_one_origin(pairs) -> None:
    def part(rows: slice, provenance: Provenance | None) -> Pairs:
        return Pairs(pairs.a[rows], pairs.c[rows], provenance=provenance)

    first, second = slice(0, 30), slice(30, 60)
    stream = PRCA().partial_fit(part(first, PROVENANCE)).partial_fit(part(second, PROVENANCE))
    assert stream.subspaces_.metadata["provenance"] == PROVENANCE.as_dict()
    torch.testing.assert_close(stream.basis_, PRCA().fit(pairs).basis_)
    assert "provenance" not in stream.partial_fit(part(first, None)).subspaces_.metadata
    other = Provenance("zennit", "Gradient", "features.5", 1, 7, "abc", 20, 0)
    stream = PRCA().partial_fit(part(first, PROVENANCE))
    with pytest.raises(ValueError, match=r"not collected in one way: layer: 'features\.3'"):
        stream.partial_fit(part(second, other))
    assert stream.n_samples_seen_ == 30
    with pytest.raises(ValueError, match="fitted on 6 features, but this batch has 3"):
        stream.partial_fit(torch.ones(2, 3), torch.ones(2, 3))


def test_numbers_of_numpy(pairs) -> None:
    """NumPy scalars and 0-d arrays: the same fit, and metadata that JSON can hold."""
    expected = DRSA(2, q=0.5, n_init=2, max_iter=400, tol=2.0**-15, random_state=3).fit(pairs).subspaces_
    kinds: list[tuple[Any, Any]] = [
        (np.float32, np.int64),
        (np.array, np.array),
        (torch.tensor, torch.tensor),
    ]
    for real, whole in kinds:
        model = DRSA(
            whole(2),
            q=real(0.5),
            n_init=whole(2),
            max_iter=whole(400),
            tol=real(2.0**-15),
            random_state=whole(3),
        )
        found = model.fit(pairs).subspaces_
        assert torch.equal(found.basis, expected.basis)
        assert found.metadata == expected.metadata
    assert sorted(DRSA(dims=np.array([2, 4]), n_init=1).fit(pairs).subspaces_.dims) == [2, 4]  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [PRCA, MaxRel, DRSA])
@pytest.mark.parametrize(
    ("a", "c", "message"),
    [
        (torch.ones(3, 4), torch.ones(3, 5), r"same shape .* a \(3, 4\) and c \(3, 5\)"),
        (torch.ones(4), torch.ones(4), r"shape \(n_samples, n_features\)"),
        (torch.ones(0, 4), torch.ones(0, 4), "both at least 1"),
        (torch.tensor([[1.0, torch.nan]]), torch.ones(1, 2), r"a \(activations\) has 1 NaN or Inf"),
        (torch.zeros(3, 4), torch.ones(3, 4), "all activations a are zero: the layer is silent"),
        (torch.ones(3, 4), torch.zeros(3, 4), "zero"),
    ],
)
def test_bad_input_is_named(model, a, c, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ = model().fit(a, c).subspaces_


def test_bad_parameters_are_named(arrays) -> None:
    for model in (PRCA, PCA, MaxRel):
        with pytest.raises(ValueError, match="at most D = 12, got 13"):
            model(13).fit(*arrays)
        with pytest.raises(ValueError, match="at least 1, got 0"):
            model(0).fit(*arrays)
    with pytest.raises(ValueError, match="5 components need at least as many samples, got 4"):
        _ = PRCA(5).fit(arrays[0][:4], arrays[1][:4]).subspaces_
    for seed in (True, 1.0, -1, "0"):
        with pytest.raises(ValueError, match="random_state, if not None, must be an integer of at least 0"):
            RandomSubspaces(2, random_state=seed).fit(arrays[0])  # type: ignore[arg-type]
