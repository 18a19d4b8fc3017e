"""Pairs, sampling of positions, stores, labelled concepts and layers."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from drsa_core import (
    PRCA,
    Pairs,
    Subspaces,
    sample_pairs,
)

from .test_provenance import made


def test_pairs_unpack_concatenate_and_survive_a_file(tmp_path) -> None:
    first = Pairs(torch.rand(3, 4), torch.rand(3, 4), torch.tensor([0, 0, 1]))
    second = Pairs(torch.rand(2, 4), torch.rand(2, 4))
    both = Pairs.concatenate([first, second])
    a, c = both
    assert torch.equal(a, torch.cat([first.a, second.a]))
    assert torch.equal(c, torch.cat([first.c, second.c]))
    assert both.image.tolist() == [0, 0, 1, 2, 2]
    assert len(both) == 5
    both.save(tmp_path / "pairs.safetensors")
    loaded = Pairs.load(tmp_path / "pairs.safetensors")
    assert torch.equal(loaded.a, both.a)
    assert torch.equal(loaded.c, both.c)
    assert torch.equal(loaded.image, both.image)
    with pytest.raises(ValueError, match="does not hold subspaces"):
        Subspaces.load(tmp_path / "pairs.safetensors")


@pytest.mark.parametrize("channel_dim", [1, -1])
def test_positions_are_sampled_without_repetition_and_in_step(channel_dim: int) -> None:
    activation = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)  # every value occurs once
    if channel_dim == -1:
        activation = activation.movedim(1, -1)
    pairs = sample_pairs(activation, -activation, 6, torch.Generator().manual_seed(0), channel_dim)
    assert pairs.a.shape == (12, 3)
    assert torch.equal(pairs.c, -pairs.a)
    assert pairs.image.tolist() == [0] * 6 + [1] * 6
    assert len(pairs.a[:, 0].unique()) == 12
    # A row is the feature vector at one position: features are 20 apart in this activation.
    assert (pairs.a.diff(dim=1) == 20).all()
    assert (pairs.a[:6] < 60).all()
    again = sample_pairs(activation, -activation, 6, torch.Generator().manual_seed(0), channel_dim)
    assert torch.equal(again.a, pairs.a)


def test_all_positions() -> None:
    activation = torch.rand(2, 3, 4)
    for positions in (None, 4, 100):
        assert sample_pairs(activation, activation, positions).a.shape == (8, 3)
    assert sample_pairs(torch.rand(2, 3), torch.rand(2, 3), 20).a.shape == (2, 3)  # a dense layer


def test_bad_pairs_are_named() -> None:
    with pytest.raises(ValueError, match="positions must be an integer of at least 1, got 0"):
        sample_pairs(torch.rand(1, 2, 3), torch.rand(1, 2, 3), 0)
    with pytest.raises(ValueError, match="one shape"):
        sample_pairs(torch.rand(1, 2, 3), torch.rand(1, 2, 4), 1)
    for channel_dim in (0, -3):  # the axis of the images
        with pytest.raises(ValueError, match="an axis after that of the images"):
            sample_pairs(torch.rand(2, 2, 2), torch.rand(2, 2, 2), 1, channel_dim=channel_dim)
    with pytest.raises(ValueError, match="at least one Pairs"):
        Pairs.concatenate([])
    with pytest.raises(ValueError, match=r"the same number of features, got \[2, 3\]"):
        Pairs.concatenate(
            [Pairs(torch.ones(1, 2), torch.ones(1, 2)), Pairs(torch.ones(1, 3), torch.ones(1, 3))]
        )
    with pytest.raises(ValueError, match=r"image must have shape \(1,\), got \(2,\)"):
        Pairs(torch.ones(1, 2), torch.ones(1, 2), torch.tensor([0, 1]))


def test_pairs_are_values() -> None:
    a, c, image = torch.rand(2, 3), np.random.default_rng(0).random((2, 3)), torch.tensor([0, 1])
    pairs = Pairs(a, c, image, made())
    expected = pairs.a.clone(), pairs.c.clone()
    a.zero_()
    c[:] = 0
    image.zero_()
    assert torch.equal(pairs.a, expected[0])
    assert torch.equal(pairs.c, expected[1])
    assert pairs.image.tolist() == [0, 1]
    for name in ("a", "c", "image", "provenance"):
        with pytest.raises(AttributeError):
            setattr(pairs, name, None)
    other = pairs.with_provenance(None)
    assert (other.provenance, pairs.provenance) == (None, made())
    assert pairs.to("cpu").provenance == made()
    assert "at 'a', target 3, zennit" in repr(pairs)


def test_provenance_goes_through_files_and_concatenation(tmp_path) -> None:
    ones = torch.ones(1, 2)
    first = Pairs(ones, ones, provenance=made(target=[1, 2]))
    first.save(tmp_path / "p.safetensors")
    assert Pairs.load(tmp_path / "p.safetensors").provenance == made(target=[1, 2])
    nothing = Pairs(ones, ones)
    assert Pairs.concatenate([nothing, first]).provenance == first.provenance
    assert Pairs.concatenate([nothing, nothing]).provenance is None
    other = Pairs(ones, ones, provenance=made(target=[1, 2], random_state=5))
    assert Pairs.concatenate([first, other]).provenance == made(target=[1, 2], random_state=None)
    with pytest.raises(ValueError, match=r"layer: 'a' there, 'b' here.*with_provenance\(None\)"):
        Pairs.concatenate([first, Pairs(ones, ones, provenance=made(layer="b", target=[1, 2]))])
    with pytest.raises(ValueError, match="target"):
        Pairs.concatenate([first, Pairs(ones, ones, provenance=made(target=1))])
    # A part that does not know its model hides no difference between the others.
    parts = [Pairs(ones, ones, provenance=made(model=model)) for model in (None, "x", "y")]
    with pytest.raises(ValueError, match="model"):
        Pairs.concatenate(parts)
    assert Pairs.concatenate(parts[:2]).provenance == made(model="x")


def test_empty_batches_go_with_others() -> None:
    empty = sample_pairs(torch.rand(0, 3, 4), torch.rand(0, 3, 4), 2)
    some = Pairs(torch.rand(2, 3), torch.rand(2, 3), torch.tensor([0, 1]))
    assert len(empty) == len(sample_pairs(torch.rand(0, 3), torch.rand(0, 3), None)) == 0
    assert Pairs.concatenate([empty, some, empty, some]).image.tolist() == [0, 1, 2, 3]
    assert len(Pairs.concatenate([empty, empty])) == 0
    with pytest.raises(ValueError, match="both at least 1"):
        PRCA().fit(*empty)


def test_unusual_arrays_are_taken() -> None:
    values = np.arange(6.0).reshape(2, 3)
    fixed = values.copy()
    fixed.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for array in (
            values[::-1][::-1],
            values.astype(">f8"),
            values.astype(np.longdouble),
            fixed,
            values.T.copy().T,
        ):
            assert Pairs(array, values).a.tolist() == values.tolist()
        assert Pairs(values[::-1], values).a.tolist() == values[::-1].tolist()


def test_positions_do_not_depend_on_the_default_device() -> None:
    """Positions were drawn there, by a generator of the CPU, which CUDA refuses."""
    a = torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    for positions in (2, None):
        expected = sample_pairs(a, 2 * a, positions, torch.Generator().manual_seed(1))
        with torch.device("meta"):
            pairs = sample_pairs(a, 2 * a, positions, torch.Generator().manual_seed(1))
            images = Pairs(a[0, :, 0], a[0, :, 1]).image
        torch.testing.assert_close(pairs.a, expected.a, rtol=0, atol=0)
        torch.testing.assert_close(pairs.image, expected.image)
        assert images.device.type == "cpu"


def test_wrong_arrays_are_refused() -> None:
    good = np.ones((2, 3))
    cases: list[tuple[Any, str]] = [
        (np.ma.masked_array(good, mask=good > 0), "masked array"),
        (good.astype(int), "floating point, got an array of int64"),
        (good.astype(complex), "floating point"),
        (torch.ones(2, 3, dtype=torch.long), "floating point, got torch.int64"),
        ([[1.0]], "must be a torch tensor, got list"),
    ]
    for bad, message in cases:
        for a, c in ((bad, good), (good, bad)):
            with pytest.raises(TypeError, match=message):
                Pairs(a, c)
    for bad, message in [(good * np.nan, "6 NaN"), (good[0], "shape"), (good[:1], "the same shape")]:
        with pytest.raises(ValueError, match=message):
            Pairs(good, bad)
