"""The guard and Ctrl-C: an interrupt is neither lost nor delivered twice, and threads wait for each other."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from captum.attr import InputXGradient
from drsa_core.layer import Guard, guarded, uninterrupted

from captum_drsa import DisentangledAttribution
from tests.captum_adapter.networks import subspaces
from tests.model_state import model_state

from .test_guard import network, parameters_replaced


class Handler:
    """A user's handler of SIGINT that counts."""

    def __init__(self, raises: bool = True) -> None:
        self.n, self.raises = 0, raises

    def __call__(self, number: int, frame: object) -> None:
        self.n += 1
        if self.raises:
            raise KeyboardInterrupt


@pytest.fixture(params=[True, False], ids=["raises", "returns"])
def handler(request):
    ours = Handler(request.param)
    before = signal.signal(signal.SIGINT, ours)
    yield ours
    assert signal.getsignal(signal.SIGINT) is ours
    signal.signal(signal.SIGINT, before)


@uninterrupted
def interrupted_where_it_is_held(handler: Handler) -> str:
    for _ in range(3):
        signal.raise_signal(signal.SIGINT)
    assert handler.n == 0
    return "finished"


def test_a_held_interrupt_is_delivered_once(handler):
    model, result = network(), []
    before = model_state(model)

    def work() -> None:
        parameters_replaced(model)
        result.append(interrupted_where_it_is_held(handler))

    with suppress(KeyboardInterrupt):
        guarded(model, work)
    assert result == ["finished"]
    assert handler.n == 1
    assert model_state(model) == before


def test_elsewhere_an_interrupt_is_handled_at_once(handler):
    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        assert handler.n == 1
        assert not handler.raises

    with suppress(KeyboardInterrupt):
        guarded(network(), work)
    assert handler.n == 1


def test_the_guard_around_does_not_hold_what_an_inner_one_delivers(handler):
    """Else Ctrl-C would wait for the end of the user's own `with` block."""
    model, outer = network(), Guard(network())
    outer.begin()
    try:
        with suppress(KeyboardInterrupt):
            guarded(model, lambda: interrupted_where_it_is_held(handler))
        assert handler.n == 1
    finally:
        outer.end()
    assert handler.n == 1


@pytest.mark.parametrize("first", [0, 1])
def test_guards_may_end_in_any_order(handler, first):
    guards = [Guard(network()), Guard(network())]
    for guard in guards:
        guard.begin()
    guards[first].end()
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert handler.n == 1
    guards[1 - first].end()
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert handler.n == 2


def test_end_may_be_called_at_any_time_and_again(handler):
    guard = Guard(network())
    guard.end()
    guard.begin()
    assert guard.is_active
    guard.end()
    guard.end()
    assert not guard.is_active
    assert handler.n == 0


def test_a_second_end_takes_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds no interrupt back: one that came inside would leave the lock taken, and all others waiting."""
    model = network()
    guard = Guard(model)
    guard.begin()
    guard.end()
    taken = threading.Lock()
    assert taken.acquire()
    monkeypatch.setattr(sys.modules[Guard.__module__], "_locks_lock", taken)
    thread = threading.Thread(target=guard.end, daemon=True)
    thread.start()
    thread.join(5.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_signals_that_python_does_not_handle_stay_so(ignored):
    before = signal.signal(signal.SIGINT, ignored)
    try:
        guarded(network(), lambda: None)
        assert signal.getsignal(signal.SIGINT) is ignored
    finally:
        signal.signal(signal.SIGINT, before)


# --------------------------------------------------------------------------------------------------- threads


def in_thread(work) -> list[Any]:
    """What `work` returned or raised in another thread."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    return found


def test_other_threads_have_no_signals_to_hold():
    model = network()
    before, handler = model_state(model), signal.getsignal(signal.SIGINT)
    assert in_thread(lambda: guarded(model, lambda: parameters_replaced(model))) == [None]
    assert model_state(model) == before
    assert signal.getsignal(signal.SIGINT) is handler


def test_one_thread_waits_for_the_other():
    model, events = network(), []
    inside, go_on = threading.Event(), threading.Event()

    def first() -> None:
        events.append("first begins")
        inside.set()
        assert go_on.wait(30)
        events.append("first ends")

    threads = [
        threading.Thread(target=guarded, args=(model, first)),
        threading.Thread(target=guarded, args=(model, lambda: events.append("second"))),
    ]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    threads[1].join(0.3)
    assert threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert events == ["first begins", "first ends", "second"]


def test_an_interrupt_ends_the_wait(handler):
    if not handler.raises:
        pytest.skip("such a handler ends nothing")
    model = network()
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        assert go_on.wait(30)

    other = threading.Thread(target=guarded, args=(model, hold))
    other.start()
    assert inside.wait(30)
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        guarded(model, lambda: None)
    go_on.set()
    other.join(30)
    timer.join(30)
    assert handler.n == 1


def test_a_plain_call_in_another_thread_sees_nothing_private():
    """The hooks of an explanation stop its own forward pass at the layer, not that of another thread."""
    model, x = network(), torch.rand(2, 4)
    expected, others = model(x), []

    def forward(input: torch.Tensor) -> torch.Tensor:
        others.extend(in_thread(lambda: model(x)))  # while the hooks of the explanation are there
        return model(input)

    da = DisentangledAttribution(
        InputXGradient(forward), model[2], subspaces(6), context_method="integrated_gradients"
    )
    da.attribute(x, target=1)
    assert len(others) > 1
    for other in others:
        assert torch.equal(other, expected)
