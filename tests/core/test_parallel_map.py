"""Runs side by side: order, errors, torch's threads, and a fit that does not depend on their number."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from drsa_core import DRSA
from drsa_core.distributed import parallel_map


def test_results_come_in_order_from_two_threads_with_one_thread_each(two_threads: None) -> None:
    both = threading.Barrier(2)  # passed only if two are under way at once

    def run(number: int) -> tuple[int, int, str]:
        both.wait(timeout=30)
        return number, torch.get_num_threads(), threading.current_thread().name

    found = parallel_map(run, range(6))
    assert [number for number, _, _ in found] == list(range(6))
    assert {n_threads for _, n_threads, _ in found} == {1}
    assert len({name for _, _, name in found}) == 2
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modes_are_those_of_the_caller(two_threads: None, mode: Any) -> None:
    with mode():
        here = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        there = parallel_map(lambda _: (torch.is_inference_mode_enabled(), torch.is_grad_enabled()), range(3))
    assert there == [here] * 3


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_ends_it_and_leaves_the_threads(two_threads: None, kind: type[BaseException]) -> None:
    begun = []

    def run(number: int) -> int:
        begun.append(number)
        if number == 0:
            raise kind("here")
        threading.Event().wait(0.01)
        return number

    with pytest.raises(kind, match="here"):
        parallel_map(run, range(1000))
    assert len(begun) < 1000
    assert torch.get_num_threads() == 2


def test_a_fit_does_not_depend_on_how_many_starts_run_at_once() -> None:
    generator = np.random.default_rng(0)
    spectrum = 1 / (1 + np.arange(160))  # few directions hold most of the energy: there is a reduced problem
    a = (generator.exponential(size=(600, 160)) * spectrum).astype(np.float32)
    c = a * generator.random((600, 160), dtype=np.float32)
    before, models = torch.get_num_threads(), []
    try:
        for n_threads in (1, 3):
            torch.set_num_threads(n_threads)
            models.append(DRSA(4, n_init=5, tol=1e-2, random_state=0).fit(a, c))
            assert torch.get_num_threads() == n_threads
    finally:
        torch.set_num_threads(before)
    one, three = (model.reduced_results_ for model in models)
    assert len(one) == 5
    for first, second in zip(one, three, strict=True):
        assert torch.equal(first.basis, second.basis)
        assert first.history == second.history
