"""Patch flipping in batches side by side: the same curves, errors, and torch's threads afterwards."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from drsa_core.evaluation import patch_flipping
from drsa_core.evaluation._onednn import available
from drsa_core.evaluation.fills import FILLS, Array
from drsa_core.evaluation.pace import FIRST, Pace, Paces
from torch import Tensor, nn

from tests.model_state import model_state

OPTIONS: dict[str, Any] = {"patch_size": 4, "schedule": "single"}
UNITS = (0.0, 1.0)


@pytest.fixture
def model() -> nn.Module:
    """One that can be packed, with outputs that depend on all of the image."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 4))
    return nn.Sequential(*layers).eval()


@pytest.fixture
def images() -> Tensor:
    return torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))


class Watched:
    """The mean as a fill, which notes who calls it; at the first two calls it waits until both are there."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.both = threading.Barrier(2)

    def __call__(self, image: Array, mask: Array, neutral: Array) -> Array:
        me = (threading.current_thread().name, torch.get_num_threads())
        first = me not in self.seen
        self.seen.append(me)
        if first and me[0] != threading.main_thread().name:
            self.both.wait(timeout=30)
        return FILLS["mean"](image, mask, neutral)


@pytest.mark.skipif(not available(), reason="this torch has no oneDNN")
def test_batches_of_a_packed_network_run_side_by_side_with_one_thread_each(
    two_threads: None, model: nn.Module, images: Tensor
) -> None:
    state, fill = model_state(model), Watched()
    found = patch_flipping(model, images, images, 1, UNITS, fill=fill, batch_size=51, **OPTIONS)
    assert len({name for name, _ in fill.seen}) == 2
    assert {n_threads for _, n_threads in fill.seen} == {1}
    assert torch.get_num_threads() == 2
    assert model_state(model) == state
    expected = patch_flipping(model.forward, images, images, 1, UNITS, fill="mean", **OPTIONS)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-5, atol=1e-6)
    assert float(expected.scores.std()) > 0.01
    assert found.network_seconds > 0
    assert found.fill_seconds > 0


@pytest.mark.skipif(not available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("batch_size", [None, 1, 4, 7, 1000])
def test_every_image_and_step_is_run_once(
    two_threads: None, model: nn.Module, images: Tensor, batch_size: int | None
) -> None:
    seen: list[bytes] = []

    def fill(image: Array, mask: Array, neutral: Array) -> Array:
        seen.append(image.tobytes() + mask.tobytes())
        return FILLS["mean"](image, mask, neutral)

    curves = patch_flipping(model, images, images, 1, UNITS, fill=fill, batch_size=batch_size, **OPTIONS)
    assert sorted(seen) == sorted(set(seen))
    assert len(seen) == 6 * 16
    expected = patch_flipping(model.forward, images, images, 1, UNITS, fill="mean", **OPTIONS)
    torch.testing.assert_close(curves.scores, expected.scores, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not available(), reason="this torch has no oneDNN")
def test_a_given_batch_size_gives_the_same_bits(two_threads: None, model: nn.Module, images: Tensor) -> None:
    options = {**OPTIONS, "fill": "mean", "batch_size": 5}
    first, second = (patch_flipping(model, images, images, 1, UNITS, **options).scores for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_inside_of_modes_of_torch(two_threads: None, model: nn.Module, images: Tensor, mode: Any) -> None:
    options = {**OPTIONS, "fill": "mean", "batch_size": 4}
    expected = patch_flipping(model, images, images, 1, UNITS, **options)
    with mode():
        found = patch_flipping(model, images, images, 1, UNITS, **options)
    assert torch.equal(found.scores, expected.scores)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_ends_all_and_leaves_the_threads(
    two_threads: None, model: nn.Module, images: Tensor, kind: type[BaseException]
) -> None:
    calls: list[int] = []

    def fill(image: Array, mask: Array, neutral: Array) -> Array:
        calls.append(1)
        if len(calls) == 9:
            raise kind("here")
        return np.zeros_like(image)

    n_before = threading.active_count()
    with pytest.raises(kind, match="here"):
        patch_flipping(model, images, images, 1, UNITS, fill=fill, batch_size=2, **OPTIONS)
    assert len(calls) < 6 * 16
    assert torch.get_num_threads() == 2
    assert threading.active_count() == n_before


def test_a_pace_that_is_asked_for_stays() -> None:
    paces = Paces(5, (torch.contiguous_format,))
    assert paces.found
    paces.note(1.0)
    assert paces.now == Pace(5, None)


def test_a_pace_is_looked_for_until_it_is_found() -> None:
    paces, sizes = Paces(None, (torch.contiguous_format,)), []
    while not paces.found:
        sizes.append(paces.now.batch_size)
        paces.note(abs(paces.now.batch_size - 8) + 1.0)
    assert sizes == [FIRST] * 3 + [8] * 3 + [16] * 3
    assert paces.now == Pace(8, torch.contiguous_format)
