"""collect, fit and patch_mask."""

from __future__ import annotations

from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import LRP, InputXGradient, IntegratedGradients, ShapleyValueSampling
from drsa_core import DRSA, PRCA, PairStore, RandomSubspaces, Subspaces, model_fingerprint
from torch.utils.data import DataLoader, TensorDataset

from captum_drsa import DisentangledAttribution, collect, patch_mask
from tests.captum_adapter.networks import TwoInputs, conv_net, images
from tests.closeness import assert_same


def loader(n: int = 5, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(TensorDataset(images(n), torch.zeros(n)), batch_size=batch_size)


@pytest.mark.parametrize("method", [InputXGradient, LRP, IntegratedGradients])
def test_pairs_are_columns_of_activations_and_contexts(method) -> None:
    model = conv_net()
    pairs = collect(method(model), "features.4", loader(), target=2, positions=None)
    assert pairs.a.shape == (5 * 36, 8)
    a, c = DisentangledAttribution(method(model), "features.4").context(images(5), 2)
    torch.testing.assert_close(pairs.a, a.movedim(1, -1).reshape(-1, 8))
    torch.testing.assert_close(pairs.c, c.movedim(1, -1).reshape(-1, 8), rtol=1e-4, atol=1e-6)
    assert pairs.image.tolist() == [n for n in range(5) for _ in range(36)]


def test_positions_and_seed() -> None:
    method = InputXGradient(conv_net())
    first, again, other = (
        collect(method, "features.4", loader(), target=2, positions=7, random_state=seed)
        for seed in (0, 0, 1)
    )
    assert len(first) == 35
    assert torch.equal(first.a, again.a)
    assert not torch.equal(first.a, other.a)


def test_batches_in_their_usual_forms(capsys: pytest.CaptureFixture[str]) -> None:
    method = InputXGradient(conv_net())
    batches = [images(2), images(2, seed=3)]
    expected = collect(method, "features.4", batches, target=2, positions=None)
    for form in ([(b, 1) for b in batches], [[b, 1, 2] for b in batches]):
        found = collect(method, "features.4", form, target=2, positions=None, progress=True)
        assert_same(found.c, expected.c)
    assert "collecting pairs" in capsys.readouterr().err
    torch.manual_seed(0)
    two = [((torch.randn(2, 4), torch.randn(2, 3)), 0)]
    assert collect(InputXGradient(TwoInputs()), "layer", two, target=1).a.shape == (2, 6)


def test_store_goes_on_where_it_stopped(tmp_path) -> None:
    model = conv_net()
    method = InputXGradient(model)
    whole = collect(method, "features.4", loader(6), target=2, positions=3, random_state=0)
    store = PairStore(tmp_path)

    def interrupted():
        for number, batch in enumerate(loader(6)):
            if number == 2:
                raise KeyboardInterrupt
            yield batch

    with pytest.raises(KeyboardInterrupt):
        collect(method, "features.4", interrupted(), target=2, positions=3, random_state=0, store=store)
    assert len(store) == 2
    runs = []
    handle = model.register_forward_hook(lambda *_: runs.append(1))
    resumed = collect(method, "features.4", loader(6), target=2, positions=3, random_state=0, store=store)
    handle.remove()
    assert len(runs) == 1  # the third batch alone
    assert torch.equal(resumed.a, whole.a)
    assert torch.equal(resumed.image, whole.image)


@pytest.mark.parametrize(
    "solver", [RandomSubspaces(3, random_state=0), PRCA(n_components=2), DRSA(n_subspaces=2, random_state=0)]
)
def test_fit_learns_subspaces_with_their_provenance(solver, tmp_path) -> None:
    model = conv_net()
    da = DisentangledAttribution(LRP(model), "features.4")
    assert da.fit(loader(), target=2, solver=solver, random_state=0) is da
    subspaces = da.subspaces
    assert isinstance(subspaces, Subspaces)
    assert subspaces.n_features == 8
    made = subspaces.provenance
    assert made is not None
    assert (made.backend, made.layer, made.target, made.random_state) == ("captum", "features.4", 2, 0)
    assert made.method == "LRPContext(default rules)"
    assert made.model == model_fingerprint(model)
    maps = da.attribute(images(), target=2)
    assert maps.shape == (2, subspaces.n_subspaces, 3, 12, 12)
    subspaces.save(tmp_path / "concepts.safetensors")
    loaded = Subspaces.load(tmp_path / "concepts.safetensors")
    again = DisentangledAttribution(LRP(model), "features.4", loaded).attribute(images(), target=2)
    assert_same(maps, again)


def test_fit_finds_four_concepts_by_default() -> None:
    da = DisentangledAttribution(InputXGradient(conv_net()), "features.4")
    learned = da.fit(loader(), 2, random_state=0).subspaces
    assert learned is not None
    assert learned.n_subspaces == 4


def test_the_seed_of_fit_is_that_of_a_solver_without_one() -> None:
    """The positions had it, and the starts of DRSA were others each time."""

    def basis(own_seed: int | None, random_state: int | None) -> Any:
        solver: Any = RandomSubspaces(3, random_state=own_seed)
        da = DisentangledAttribution(InputXGradient(conv_net()), "features.4")
        learned = da.fit(loader(), 2, solver=solver, random_state=random_state).subspaces
        assert solver.random_state == own_seed
        assert learned is not None
        return learned.basis

    assert torch.equal(basis(None, 0), basis(None, 0))
    assert torch.equal(basis(None, 0), basis(0, 1))
    assert not torch.equal(basis(None, 0), basis(None, 1))
    assert not torch.equal(basis(None, None), basis(None, None))


def test_targets_and_numbers_of_their_own() -> None:
    method = InputXGradient(conv_net())
    one: Any = np.int64(1)
    options: dict[str, Any] = {"positions": np.int64(3), "random_state": np.int64(0)}
    labels = collect(method, "features.4", [(images(), torch.tensor([1, 2]))], "label", **options)
    listed = collect(method, "features.4", [images()], [1, 2], **options)
    same: Any = collect(method, "features.4", [images()], one, **options)
    assert torch.equal(labels.c, listed.c)
    assert torch.equal(same.c[:3], listed.c[:3])
    assert not torch.equal(same.c[3:], listed.c[3:])
    # Positions depend on the image, not on the batches.
    singles = collect(method, "features.4", [images()[:1], images()[:0], images()[1:]], 1, **options)
    assert_same(singles.a, same.a)


def test_collect_has_the_arguments_of_the_method() -> None:
    of_function = set(signature(collect).parameters)
    assert set(signature(DisentangledAttribution.collect).parameters) - {"self"} <= of_function


def test_patch_mask_numbers_patches_row_by_row() -> None:
    mask = patch_mask(torch.zeros(5, 3, 224, 224))
    assert mask.shape == (1, 1, 224, 224)
    assert mask.unique().tolist() == list(range(196))
    assert (mask.unique(return_counts=True)[1] == 256).all()
    assert mask[0, 0, 0, 16] == 1
    assert mask[0, 0, 16, 0] == 14
    uneven = patch_mask(torch.zeros(1, 3, 5, 7), size=(2, 3))
    assert uneven[0, 0, 4].tolist() == [6, 6, 6, 7, 7, 7, 8]


def test_patch_mask_of_tuples_counts_on() -> None:
    one, two = patch_mask((torch.zeros(1, 3, 4, 4), torch.zeros(1, 1, 4, 4)), size=2)
    assert one.unique().tolist() == [0, 1, 2, 3]
    assert two.unique().tolist() == [4, 5, 6, 7]


def test_patches_get_one_value_each() -> None:
    model, x = conv_net(), images(1)
    mask = patch_mask(x, 4)
    da = DisentangledAttribution(
        ShapleyValueSampling(model),
        "features.4",
        RandomSubspaces(2, random_state=0).fit(torch.zeros(1, 8)).subspaces_,
    )
    maps = da.attribute(x, target=1, feature_mask=mask, n_samples=1)
    for patch in range(9):
        values = maps[..., mask[0, 0] == patch]
        assert torch.equal(values, values[:, :, :1, :1].expand_as(values))
