"""Leaving the user's model as it was: after success, an exception and Ctrl-C.

Explaining changes a model for a while: hooks, merged weights, rules, attributes. A `Guard` takes a snapshot
before the first change (`begin`) and restores it in one place (`end`). Ctrl-C is held back while that runs.
Both adapters use it and nothing else to give a model back: `guarded` for one call, a `Guard` of its own for
Zennit's composites, which stay registered between `__enter__` and `__exit__`.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FrameType, FunctionType
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .losses import warn_of_training

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Handler: TypeAlias = "Callable[[int, FrameType | None], Any]"

# One lock per model. It cannot live on the model, where it would be copied and saved with it.
_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()

# Guards that have switched PyTorch's fused attention off, and whether it was on before the first of them did.
# It is one switch for the whole process, and guards of different models may end in any order.
_without_fused_attention: set[int] = set()
_had_fused_attention = True


def guarded(
    model: nn.Module, work: Callable[[], _T], also: Iterable[object] = (), is_whole: bool = True
) -> _T:
    """Return `work()`; the model is afterwards as it was before, whatever happens.

    A function rather than a context manager: an interrupt between a block and its `__exit__` would skip the
    latter, while the two `finally` clauses here cover for each other.

    Parameters
    ----------
    model : module
        The model, or the part of it that is known.
    work : function
        What to do. It runs outside of inference mode, and without PyTorch's fused attention, which would
        leave out the hooks on the modules inside.
    also : iterable of objects
        Objects outside the tree of modules whose attributes are to be kept, such as Captum's rules, and
        further modules.
    is_whole : bool
        Whether `model` is all that runs. If not (a forward function that is no module), further modules are
        noted as they run.
    """
    guard = Guard(model, also, is_whole)
    try:
        try:
            guard.begin()
            with torch.inference_mode(False):
                return work()
        finally:
            guard.end()
    finally:
        guard.end()


class Guard:
    """A model's state from `begin` to `end`, the lock that keeps other threads out, and a hold on Ctrl-C.

    `end` may be called at any time and more than once. One thread at a time may work on a model; another one
    waits in `begin`.

    Parameters
    ----------
    model, also, is_whole
        As in `guarded`.
    """

    def __init__(self, model: nn.Module, also: Iterable[object] = (), is_whole: bool = True) -> None:
        self._model, self._also, self._is_whole = model, tuple(also), is_whole
        self._interrupts = _Interrupts()
        self._lock: Any = None
        self._state: ModelState | None = None
        self._watch: Any = None

    @property
    def is_active(self) -> bool:
        """Whether `begin` was called, and `end` was not yet."""
        return self._state is not None

    def begin(self) -> None:
        """Note the state of the model. Waits if another thread works on it."""
        self._interrupts.install()
        self._acquire()
        self._switch_fused_attention_off()
        self._interrupts.deliver()
        self._state = state = ModelState(self._model, self._also)
        if not self._is_whole:
            self._watch = register_module_forward_pre_hook(_watching(state))
        state.run_eagerly()

    @property
    def was_interrupted(self) -> bool:
        """Whether an interrupt is held back at the moment."""
        return self._interrupts.is_holding

    def end(self) -> None:
        """Restore the model, let other threads in, and deliver an interrupt that came meanwhile."""
        _close_generators(sys.exception())
        self._restore()
        self._interrupts.deliver()

    def _acquire(self) -> None:
        # Uninterrupted, so that the lock is not taken without being noted; hence not one long wait.
        lock = _lock_of(self._model)
        while not lock.acquire(timeout=0.1):
            self._interrupts.deliver()
        self._lock = lock

    def _switch_fused_attention_off(self) -> None:
        global _had_fused_attention
        with _locks_lock:
            if not _without_fused_attention:
                _had_fused_attention = torch.backends.mha.get_fastpath_enabled()
            _without_fused_attention.add(id(self))
            torch.backends.mha.set_fastpath_enabled(False)

    def _give_fused_attention_back(self) -> None:
        # A second `end` holds no interrupt back. One that came in the block below would leave the lock taken.
        if id(self) not in _without_fused_attention:
            return
        with _locks_lock:
            _without_fused_attention.remove(id(self))
            if not _without_fused_attention:
                torch.backends.mha.set_fastpath_enabled(_had_fused_attention)

    def _restore(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
        if self._state is not None:
            self._state.restore()
            self._state = None
        self._give_fused_attention_back()
        if self._lock is not None:
            lock, self._lock = self._lock, None
            lock.release()
        self._interrupts.uninstall()


def uninterrupted(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Hold Ctrl-C back in this method while a `Guard` is active; `Guard.end` delivers it."""

    @functools.wraps(method)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return method(*args, **kwargs)

    _UNINTERRUPTED.add(cast(FunctionType, wrapper).__code__)
    return wrapper


# Code in which Ctrl-C is held back; all wrappers of `uninterrupted` share one code object.
_UNINTERRUPTED: set[CodeType] = {
    function.__code__
    for function in (Guard._acquire, Guard._switch_fused_attention_off, Guard._restore, Guard.end)
}


class _Interrupts:
    """A handler of SIGINT that holds it back in `_UNINTERRUPTED` code and else does what was done before.

    Python runs signal handlers in the main thread alone; in other threads there is nothing to hold back.
    """

    def __init__(self) -> None:
        self._previous: _Handler | None = None
        self._is_installed = False
        self._is_holding = False

    @property
    def is_holding(self) -> bool:
        return self._is_holding

    def install(self) -> None:
        if self._is_installed or not _is_main_thread():
            return
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous):  # else it is ignored, or left to the system, and no exception can come
            self._previous, self._is_installed = previous, True
            signal.signal(signal.SIGINT, self._handle)

    def uninstall(self) -> None:
        self._is_installed = False
        # Another handler that was installed in between stays. It may call this one, which passes all on.
        if self._previous is None or not _is_main_thread() or signal.getsignal(signal.SIGINT) != self._handle:
            return
        previous = self._previous
        # Guards may end in any order: those before this one may be through.
        while isinstance(owner := getattr(previous, "__self__", None), _Interrupts):
            if owner._is_installed or owner._previous is None:
                break
            previous = owner._previous
        signal.signal(signal.SIGINT, previous)

    def deliver(self) -> None:
        """Hand an interrupt that was held back to the handler before, as if it came to the caller's caller.

        Not as if it came where it came: the guard around this one would hold it back for what is over now.
        """
        if self._is_holding and self._previous is not None:
            self._is_holding = False
            self._previous(signal.SIGINT, sys._getframe(2))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # One that was taken off may still be called by handlers that were installed after it.
        is_on = self._is_installed or signal.getsignal(signal.SIGINT) == self._handle
        above = frame if is_on else None
        while above is not None:
            if above.f_code in _UNINTERRUPTED:
                self._is_holding = True
                return
            above = above.f_back
        if self._previous is not None:
            self._previous(number, frame)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class ModelState:
    """All that explaining may change about modules, as it was when this was made.

    Parameters, buffers, hooks, children, attributes and flags of all modules, and the attributes of the
    objects in `also`. Parameters are kept by reference: what replaces them (`parameter.data = …`) leaves the
    old values alone. Buffers are copied, since batch norms in training mode write to them.
    """

    def __init__(self, model: nn.Module, also: Iterable[object] = ()) -> None:
        self._modules: dict[nn.Module, tuple[dict[str, Any], dict[str, dict[Any, Any]]]] = {}
        self._parameters: dict[nn.Parameter, tuple[Tensor, bool]] = {}
        self._buffers: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._objects: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.add(model)
        for thing in also:
            if isinstance(thing, nn.Module):
                self.add(thing)
            else:
                self._objects.append((vars(thing), dict(vars(thing))))

    def add(self, model: nn.Module) -> bool:
        """Take in the modules of another model, as they are now; says whether there was a new one."""
        n_known = len(self._modules)
        for module in model.modules():
            if module in self._modules:
                continue
            values = dict(vars(module))
            contents = {name: dict(value) for name, value in values.items() if isinstance(value, dict)}
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._parameters.setdefault(parameter, (parameter.data, parameter.requires_grad))
            for buffer in module._buffers.values():
                # Sparse ones have no address to compare, and no module of torch writes to them.
                if buffer is not None and buffer.layout == torch.strided and buffer not in self._buffers:
                    self._buffers[buffer] = buffer.data, buffer.detach().clone()
            self._modules[module] = values, contents
        return len(self._modules) > n_known

    def run_eagerly(self) -> None:
        """Switch compiled graphs off: they do not know the hooks that are about to come.

        Those of `model.compile()`, and those of modules inside that `torch.compile` has wrapped.
        """
        for module in self._modules:
            if vars(module).get("_compiled_call_impl") is not None:
                vars(module)["_compiled_call_impl"] = None
            original = module._modules.get("_orig_mod")
            if original is not None and "forward" in vars(module):
                vars(module)["forward"] = original.__call__

    def restore(self) -> None:
        """Put everything back. May be called again, also after a call that was interrupted."""
        # Values first: should anything below fail, the network still computes what it did.
        for parameter, (data, requires_grad) in self._parameters.items():
            if not _is_same(parameter, data):
                parameter.data = data
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        for buffer, (data, copy) in self._buffers.items():
            if not _is_same(buffer, data):
                buffer.data = data
            # Only where needed: a write would bump the version that a graph of the user's may rely on.
            if not torch.equal(data, copy):
                with torch.no_grad():
                    data.copy_(copy)
        for module, (values, contents) in self._modules.items():
            for name, content in contents.items():
                _restore_dict(values[name], content)
            _restore_dict(vars(module), values)
        for current, before in self._objects:
            _restore_dict(current, before)


def _is_same(tensor: Tensor, data: Tensor) -> bool:
    """Whether a tensor still has these values, at the same address and in the same order."""
    if tensor.layout != torch.strided or data.layout != torch.strided:
        return tensor.layout == data.layout  # sparse parameters have no address; rules are for dense ones
    if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape or tensor.dtype != data.dtype:
        return False
    return tensor.stride() == data.stride()


def _restore_dict(current: dict[Any, Any], before: dict[Any, Any]) -> None:
    # What was added is taken out one by one: another thread may be reading the module meanwhile.
    for key in [key for key in current if key not in before]:
        del current[key]
    if list(current) == list(before):
        for key, value in before.items():
            if current[key] is not value:
                current[key] = value
        return
    # Hooks run in the order of their dict: it is rebuilt where one was taken out and has to go back.
    current.clear()
    current.update(before)


def _close_generators(error: BaseException | None) -> None:
    """Finish what an interrupt left half-way, before the model is restored rather than after.

    An interrupt between the `__enter__` of a generator's context and its block (`zennit.core.ParamMod` is
    one) leaves the generator to the traceback: it would write to the model when the traceback is forgotten.
    """
    while error is not None:
        if not isinstance(error, Exception):
            traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _watching(state: ModelState) -> Callable[[nn.Module, Any], None]:
    thread = threading.get_ident()

    def note(module: nn.Module, args: Any) -> None:
        # The hook is global, but other threads' models are not ours.
        if threading.get_ident() == thread and state.add(module):
            warn_of_training(module)

    return note


def _lock_of(model: nn.Module) -> Any:
    with _locks_lock:
        return _locks.setdefault(model, threading.RLock())
