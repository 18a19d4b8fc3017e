"""Runs side by side: order, errors, and torch's threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
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
