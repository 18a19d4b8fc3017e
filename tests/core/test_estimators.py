"""The estimators as scikit-learn's users expect them, with and without scikit-learn."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drsa_core import DRSA, DSA, PCA, PRCA, MaxRel, NotFittedError, Pairs, PairShards, RandomSubspaces
from drsa_core.provenance import Provenance
from drsa_core.solvers.peers import Channels

ESTIMATORS: list[Any] = [PRCA, PCA, MaxRel, RandomSubspaces, DSA, DRSA]
BLIND = [PCA, RandomSubspaces, DSA]
PROVENANCE = Provenance("zennit", "Gradient", "features.3", 1, 7, "abc", 20, 0)


@pytest.fixture
def pairs() -> Pairs:
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(60, 6, generator=generator)
    return Pairs(a, a * torch.rand(60, 6, generator=generator), provenance=PROVENANCE)


def fast(estimator: Any) -> Any:
    """An instance that fits in no time, with a seed where there is one."""
    wanted = {"n_init": 1, "random_state": 0, "n_subspaces": 2, "n_components": 2}
    return estimator(**{name: wanted[name] for name in estimator().get_params() if name in wanted})


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
    assert repr(DSA(dims=[1, 2])) == "DSA(dims=[1, 2])"
    assert repr(PRCA(np.int64(2))) == "PRCA(n_components=np.int64(2))"  # type: ignore[arg-type]
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
    # A bad value is kept as it is, and refused by fit.
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
    with pytest.raises(NotFittedError, match=f"{estimator.__name__} is not fitted yet: .*subspaces_"):
        _ = model.subspaces_
    assert issubclass(NotFittedError, ValueError)
    assert issubclass(NotFittedError, AttributeError)
    assert not hasattr(model, "subspaces_")
    fitted = fast(estimator).fit(pairs)
    with pytest.raises(AttributeError, match="no attribute 'subspace_'") as caught:
        _ = fitted.subspace_  # a slip of the pen is not a missing fit
    assert not isinstance(caught.value, NotFittedError)
    with pytest.raises(AttributeError, match="no attribute 'n_subspace'"):
        _ = model.n_subspace
    assert torch.equal(copy.deepcopy(fitted).subspaces_.basis, fitted.subspaces_.basis)


def test_scores_of_the_fit_before_the_fit() -> None:
    for model, name in [
        (PRCA(), "eigenvalues_"),
        (PRCA(), "basis_"),
        (PRCA(), "n_samples_seen_"),
        (MaxRel(), "relevance_"),
        (MaxRel(), "order_"),
        (DRSA(), "objective_"),
    ]:
        with pytest.raises(NotFittedError, match=name):
            getattr(model, name)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_fit_takes_pairs_and_remembers_where_they_are_from(estimator, pairs) -> None:
    model = fast(estimator)
    assert model.fit(pairs) is model
    from_arrays = fast(estimator).fit(pairs.a, pairs.c).subspaces_
    assert torch.equal(model.subspaces_.basis, from_arrays.basis)
    assert Provenance.from_dict(model.subspaces_.metadata["provenance"]) == PROVENANCE
    assert "provenance" not in from_arrays.metadata
    unknown = fast(estimator).fit(Pairs(pairs.a, pairs.c)).subspaces_
    assert "provenance" not in unknown.metadata


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_fit_does_not_take(estimator, pairs) -> None:
    with pytest.raises(TypeError, match=r"got Pairs, which holds its contexts, and c as well"):
        estimator().fit(pairs, pairs.c)
    if estimator in BLIND:
        assert torch.equal(
            fast(estimator).fit(pairs.a).subspaces_.basis, fast(estimator).fit(pairs).subspaces_.basis
        )
    else:
        with pytest.raises(TypeError, match=r"contexts are missing: give fit\(a, c\)"):
            estimator().fit(pairs.a)
        with pytest.raises(TypeError, match="got only tuple"):
            estimator().fit((pairs.a, pairs.c))


def test_a_failed_fit_leaves_the_last_one(pairs) -> None:
    model = PRCA().fit(pairs)
    before = model.subspaces_.basis
    with pytest.raises(ValueError, match="NaN"):
        model.fit(pairs.a * torch.nan, pairs.c)
    assert torch.equal(model.subspaces_.basis, before)
    model.set_params(n_components=99)  # counts from the next fit on
    assert model.subspaces_.dims == (1, 5)


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
    with pytest.raises(ValueError, match=r"not collected like the ones before: layer: 'features\.3'"):
        stream.partial_fit(part(second, other))
    assert stream.n_samples_seen_ == 30
    # What is known is kept while batches without provenance come, at the beginning or in between.
    for order in ((None, PROVENANCE), (PROVENANCE, None), (None, PROVENANCE, None)):
        stream = PRCA()
        for provenance in order:
            stream.partial_fit(part(first, provenance))
        with pytest.raises(ValueError, match="not collected like the ones before"):
            stream.partial_fit(part(second, other))
        stream.partial_fit(part(second, PROVENANCE))
        assert "provenance" not in stream.subspaces_.metadata
        stream.partial_fit(*part(second, other))  # on purpose
        assert PRCA.fit(stream, part(first, other)).subspaces_.provenance == other


@pytest.mark.parametrize("estimator", [RandomSubspaces, DSA, DRSA])
@pytest.mark.parametrize("seed", [np.int64(3), np.uint8(3), np.array(3), torch.tensor(3)])
def test_seeds_of_numpy_and_torch(estimator, seed, pairs) -> None:
    expected = fast(estimator).set_params(random_state=3).fit(pairs).subspaces_
    found = fast(estimator).set_params(random_state=seed).fit(pairs).subspaces_
    assert torch.equal(found.basis, expected.basis)
    assert found.metadata == expected.metadata


@pytest.mark.parametrize("estimator", [RandomSubspaces, DSA, DRSA])
@pytest.mark.parametrize(
    "seed", [True, 1.0, np.float64(2), -1, np.int64(-1), "0", np.array([1]), np.bool_(True)]
)
def test_what_is_not_a_seed(estimator, seed, pairs) -> None:
    with pytest.raises(ValueError, match=r"random_state, if not None, must be an integer of at least 0, got"):
        fast(estimator).set_params(random_state=seed).fit(pairs)


def test_numbers_of_numpy(pairs) -> None:
    """Every number as a NumPy scalar or 0-d array: the same fit, and metadata that JSON can hold."""
    plain = {"q": 0.5, "n_init": 2, "max_iter": 400, "tol": 2.0**-15, "balance": 0.5}
    expected = DRSA(2, random_state=0, **plain).fit(pairs).subspaces_  # type: ignore[arg-type]
    kinds: list[tuple[Any, Any]] = [(np.float32, np.int64), (np.float16, np.uint16), (np.array, np.array)]
    for real, whole in kinds:
        numbers: dict[str, Any] = {
            name: real(value) if isinstance(value, float) else whole(value) for name, value in plain.items()
        }
        found = DRSA(whole(2), random_state=0, **numbers).fit(pairs).subspaces_
        assert torch.equal(found.basis, expected.basis)
        assert found.metadata == expected.metadata
    some_dims: list[Any] = [np.array([2, 4]), torch.tensor([2, 4]), (np.int8(2), np.int8(4))]
    for dims in some_dims:
        assert sorted(DRSA(dims=dims, random_state=0, n_init=1).fit(pairs).subspaces_.dims) == [2, 4]
    estimators: list[Any] = [PRCA, PCA, MaxRel]
    for estimator in estimators:
        found = estimator(np.int64(2)).fit(pairs).subspaces_
        assert found.metadata["solver"]["n_components"] == 2


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"q": "half"}, "q must be a finite number, got 'half'"),
        ({"q": np.float32("nan")}, "q must be a finite number"),
        ({"q": True}, "q must be a finite number, got True"),
        ({"tol": float("nan")}, "tol must be a finite number of at least 0"),
        ({"balance": np.array([0.5, 0.5])}, "balance must be a finite number from 0 to 1"),
        ({"n_init": 2.0}, r"n_init must be an integer of at least 1, got 2\.0"),
        ({"n_subspaces": True}, "n_subspaces must be an integer of at least 1, got True"),
        ({"dims": 4}, "dims must be a sequence of block sizes, one for each subspace, got 4"),
        ({"dims": [2.0, 4.0]}, "every entry of dims must be an integer"),
        ({"dims": np.ma.masked_array([2, 4], [True, False])}, "every entry of dims"),
        ({"solver": ["paper"]}, "solver must be one of"),
    ],
)
def test_what_is_not_a_number(parameters: dict[str, Any], message: str, pairs) -> None:
    with pytest.raises(ValueError, match=message):
        DRSA(**parameters).fit(pairs)


@pytest.mark.parametrize("estimator", [MaxRel, DSA, DRSA, Channels])
def test_a_silent_layer_is_no_data(estimator, pairs) -> None:
    silent = Pairs(torch.zeros_like(pairs.a), pairs.c)
    for given in [silent, PairShards(silent)] if estimator in (DSA, DRSA) else [silent]:
        with pytest.raises(ValueError, match="all activations a are zero: the layer is silent"):
            fast(estimator).fit(given)


def test_a_stream_does_not_claim_the_seed_of_its_first_batch(pairs) -> None:
    first = pairs.with_provenance(replace(PROVENANCE, positions=5, random_state=0))
    second = pairs.with_provenance(replace(PROVENANCE, positions=5, random_state=1, skip_tokens=1))
    whole = PRCA(2).fit(Pairs.concatenate([first, second])).subspaces_
    for order in ([first, second], [second, first]):
        stream = PRCA(2)
        for part in order:
            stream.partial_fit(part)
        assert stream.subspaces_.provenance == whole.provenance
        assert whole.provenance == replace(PROVENANCE, positions=5, random_state=None, skip_tokens=None)
