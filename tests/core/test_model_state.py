"""`restored`: what was done to a model is undone, what the model itself does stays; Ctrl-C and threads."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from captum.attr import LRP, InputXGradient
from drsa_core.model_state import held_back, restored
from torch import nn
from zennit.attribution import Gradient
from zennit.composites import EpsilonPlus

from captum_drsa import DisentangledAttribution
from tests.model_state import model_state
from tests.toys import subspaces
from zennit_drsa import DisentangledAttributor


def network() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval()
    model[0].register_forward_hook(lambda *_: None)
    model[0].register_forward_hook(lambda *_: None)
    model[3].bias.requires_grad_(False)
    return model


def parameters_exchanged(model: Any) -> None:
    model[0].weight.data = model[0].weight.data * 2
    model[0].bias = nn.Parameter(torch.zeros(6))
    model[3].weight.data = model[3].weight.data.t()
    del model[3].bias


def norms_merged(model: Any) -> None:
    """As Zennit's canonizers do: 0.5.1 by other data, 1.0.0 by attributes that hide what is registered."""
    model[1].running_mean = torch.zeros(6)
    model[1].running_var.data = torch.ones(6)
    model[1].eps = 0.0
    object.__setattr__(model[3], "weight", torch.ones(3, 6))


def hooks_changed(model: Any) -> None:
    first = next(iter(model[0]._forward_hooks))
    removed = model[0]._forward_hooks.pop(first)
    model[0].register_forward_hook(lambda *_: None, prepend=True)
    model[0]._forward_hooks[first] = removed  # there again, but at the end
    model[2].register_forward_pre_hook(lambda *_: None)
    model.register_full_backward_hook(lambda *_: None)


def children_changed(model: Any) -> None:
    model[0].child = nn.Linear(2, 2)
    model.append(nn.ReLU())
    model[1] = nn.Identity()


def flags_changed(model: Any) -> None:
    model.train()
    model[0].forward = lambda x: x
    for parameter in model.parameters():
        parameter.requires_grad_(not parameter.requires_grad)


CHANGES = (parameters_exchanged, norms_merged, hooks_changed, children_changed, flags_changed)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_undone(change, error):
    model = network()
    before = model_state(model)
    with suppress(ValueError, KeyboardInterrupt), restored(model) as entered:
        assert entered is model
        change(model)
        assert model_state(model) != before
        if error is not None:
            raise error
    assert model_state(model) == before


def test_on_the_way_in_and_out():
    model = network()
    events: list[str] = []
    before = model_state(model)

    def enter() -> None:
        events.append("in")
        hooks_changed(model)

    context = restored(model, enter=enter, leave=lambda: events.append("out"))
    with context:
        assert events == ["in"]
    assert events == ["in", "out"]

    def fails() -> None:
        flags_changed(model)
        raise RuntimeError("on the way")

    for first, last in ((fails, None), (None, fails)):
        with pytest.raises(RuntimeError, match="on the way"), restored(model, first, last):
            parameters_exchanged(model)
        assert model_state(model) == before


class Counting(nn.Module):
    """Counts its passes and keeps the last input, as models do."""

    n_rows: torch.Tensor
    last: torch.Tensor | None
    cache: dict[str, torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.body, self.n_passes, self.cache = network(), 0, {}
        self.register_buffer("n_rows", torch.tensor(0))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_passes += 1
        self.cache["input"] = x.detach().clone()
        self.n_rows += len(x)
        self.last = x.detach().clone()
        scores: torch.Tensor = self.body(x)
        return scores


@pytest.mark.parametrize("adapter", ["zennit", "captum", "none"])
def test_what_the_model_itself_writes_stays(adapter):
    model, x = Counting(), torch.rand(2, 4)
    if adapter == "zennit":
        run: Any = DisentangledAttributor(Gradient(model, EpsilonPlus()), "body.2", subspaces(6))
    elif adapter == "captum":
        run = DisentangledAttribution(InputXGradient(model), "body.2", subspaces(6))
    else:

        def explain(x: torch.Tensor, target: int) -> None:
            with restored(model):
                model(x)

        run = SimpleNamespace(explain=explain)
    body = model_state(model.body)
    run.explain(x, 1)
    n_passes = model.n_passes
    assert n_passes >= 1
    assert model.n_rows >= 2
    run.explain(x + 1, 1)
    assert model.n_passes > n_passes
    assert model.last is not None
    assert torch.equal(model.last, x + 1)
    assert torch.equal(model.cache["input"], x + 1)
    assert model_state(model.body) == body


def test_nested_contexts_go_back_to_their_own_beginning():
    model = network()
    before = model_state(model)
    with restored(model):
        parameters_exchanged(model)
        between = model_state(model)
        with suppress(ValueError), restored(model):
            hooks_changed(model)
            flags_changed(model)
            raise ValueError
        assert model_state(model) == between
    assert model_state(model) == before


def test_other_modules_objects_and_attributes():
    model, other, rule = network(), network(), SimpleNamespace(kept=1)
    model[2].rule = before_rule = object()
    before = model_state(other)
    with restored(model, also=[other, rule], attributes=["rule"]):
        hooks_changed(other)
        rule.kept, rule.added = 2, 3
        model[2].rule, model[3].rule = object(), object()
    assert model_state(other) == before
    assert vars(rule) == {"kept": 1}
    assert model[2].rule is before_rule
    assert not hasattr(model[3], "rule")


def test_statistics_of_norms_in_training_mode():
    model, x = network().train(), torch.rand(5, 4)
    before = model_state(model)
    for run in (
        DisentangledAttributor(Gradient(model), "2", subspaces(6)),
        DisentangledAttribution(InputXGradient(model), "2", subspaces(6)),
    ):
        with pytest.warns(UserWarning, match=r"'1' \(BatchNorm1d\) is in training mode"):
            run.explain(x, 1)
        assert model_state(model) == before


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_buffers(layout):
    model = network()
    model.register_buffer("adjacency", torch.eye(4).to_sparse(layout=layout))
    model[0].register_parameter("scale", nn.Parameter(torch.eye(4).to_sparse()))
    kept, n_hooks = model.adjacency, len(model[2]._forward_hooks)
    run = DisentangledAttribution(InputXGradient(model), "2", subspaces(6))
    assert run.attribute(torch.rand(2, 4), target=1).shape == (2, 3, 4)
    assert model.adjacency is kept
    assert len(model[2]._forward_hooks) == n_hooks


def test_fused_attention_is_off_until_the_last_context_ends():
    """It would leave out hooks. It is one switch for the whole process."""
    torch.backends.mha.set_fastpath_enabled(True)
    first, second = restored(network()), restored(network())
    with first:
        second.__enter__()
    assert not torch.backends.mha.get_fastpath_enabled()  # the second still needs it off
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("layer", ["0", "2"])
def test_compiled_modules_inside_of_a_model_run_eagerly(layer):
    """A compiled graph does not run hooks on what is inside of it: rules there had no effect."""

    def maps(is_compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        inner: Any = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU())
        model: Any = nn.Sequential(inner, nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
        x = torch.rand(2, 4)
        if is_compiled:
            torch._dynamo.reset()  # graphs of other tests may fit
            model[0] = torch.compile(inner, backend="eager")
            model(x.clone().requires_grad_())  # as in training: hooks that come later are not in this graph
        before = model_state(model)
        zennit = DisentangledAttributor(Gradient(model, EpsilonPlus()), layer, subspaces(6)).explain(x, 1)
        captum = DisentangledAttribution(LRP(model), layer, subspaces(6)).attribute(x, target=1)
        assert model_state(model) == before
        return [zennit.maps, captum]

    for found, expected in zip(maps(True), maps(False), strict=True):
        assert torch.equal(found, expected)  # the same operations


class Empty(nn.Module):
    """A model that is false as a truth value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def __len__(self) -> int:
        return 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.body(x)
        return scores


@pytest.mark.parametrize("compiled", [False, True])
def test_models_that_are_false_or_compiled(compiled):
    model = Empty()
    explained: Any = torch.compile(model, backend="eager") if compiled else model
    before, x = model_state(model), torch.rand(2, 4)
    for run in (
        DisentangledAttribution(InputXGradient(explained), model.body[2], subspaces(6)),
        DisentangledAttributor(Gradient(explained, EpsilonPlus()), model.body[2], subspaces(6)),
    ):
        assert run.explain(x, 1).maps.shape == (2, 3, 4)
        assert model_state(model) == before


# ---------------------------------------------------------------------- Ctrl-C


class Handler:
    """A user's handler of SIGINT that counts."""

    def __init__(self, raises: bool) -> None:
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


@pytest.mark.parametrize("way", ["enter", "leave"])
def test_an_interrupt_on_the_way_is_delivered_once_afterwards(handler, way):
    """Where the user's handler only makes a note, the body runs as if nothing had been."""
    model, events = network(), []
    before = model_state(model)

    def enter() -> None:
        events.append("in")
        parameters_exchanged(model)
        interrupt("enter")

    def leave() -> None:
        events.append("out")
        interrupt("leave")

    def interrupt(where: str) -> None:
        if where == way and not handler.n:
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
            assert handler.n == 0

    with suppress(KeyboardInterrupt), restored(model, enter, leave):
        events.append("body")
        assert model_state(model) != before
    assert handler.n == 1
    assert model_state(model) == before
    before_the_body = ["in", "out"] if way == "enter" else []
    rest = [] if way == "enter" and handler.raises else ["in", "body", "out"]
    assert events == [*before_the_body, *rest]


def test_functions_that_are_held_back_are_not_interrupted(handler):
    @held_back
    def finishes() -> str:
        signal.raise_signal(signal.SIGINT)
        assert handler.n == 0
        return "finished"

    with suppress(KeyboardInterrupt), restored(network()):
        assert finishes() == "finished"
    assert handler.n == 1


def test_inside_an_interrupt_is_handled_at_once(handler):
    model = network()
    with suppress(KeyboardInterrupt), restored(model), restored(network()):
        signal.raise_signal(signal.SIGINT)
        assert handler.n == 1
        assert not handler.raises
    assert handler.n == 1


@pytest.mark.parametrize("first", [0, 1])
def test_contexts_of_two_models_may_end_in_any_order(handler, first):
    contexts = [restored(network()), restored(network())]
    for context in contexts:
        context.__enter__()
    for n, context in enumerate([contexts[first], contexts[1 - first]], 1):
        context.__exit__(None, None, None)
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert handler.n == n


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_signals_that_python_does_not_handle_stay_so(ignored):
    before = signal.signal(signal.SIGINT, ignored)
    try:
        with restored(network()):
            pass
        assert signal.getsignal(signal.SIGINT) is ignored
    finally:
        signal.signal(signal.SIGINT, before)


# ---------------------------------------------------------------------- threads


def hold(model: nn.Module) -> tuple[threading.Thread, threading.Event]:
    """A thread that is inside until the event is set."""
    inside, go_on = threading.Event(), threading.Event()

    def work() -> None:
        with restored(model):
            inside.set()
            assert go_on.wait(30)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert inside.wait(30)
    return thread, go_on


def test_one_thread_waits_for_the_other():
    model, events = network(), []
    before = model_state(model)
    first, go_on = hold(model)

    def work() -> None:
        with restored(model):
            parameters_exchanged(model)
            events.append(first.is_alive())

    second = threading.Thread(target=work, daemon=True)
    second.start()
    second.join(0.3)
    assert second.is_alive()
    with restored(network()):  # another model is free
        pass
    go_on.set()
    for thread in (first, second):
        thread.join(30)
    assert len(events) == 1
    assert model_state(model) == before


def test_an_interrupt_ends_the_wait(handler):
    if not handler.raises:
        pytest.skip("such a handler ends nothing")
    model = network()
    other, go_on = hold(model)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt), restored(model):
        pass
    go_on.set()
    for thread in (other, timer):
        thread.join(30)
    assert handler.n == 1
