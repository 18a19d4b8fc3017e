"""`restored(model)`: the user's model comes back after success, an exception and Ctrl-C.

Explaining exchanges what modules hold (parameters, children, hooks, `forward`) and never writes into a
tensor, so that references are enough to put everything back. What the model itself writes in its `forward`,
such as a counter or a cache, stays.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_F = TypeVar("_F", bound=Callable[..., Any])

_HOOKS = tuple(
    name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, dict)
)
# Rules and canonizers replace these attributes of a module, and hide parameters behind attributes of their
# names.
_ATTRIBUTES = ("forward", "eps", "training", "_is_full_backward_hook", "_compiled_call_impl")
_MISSING = object()
# One lock per model. On the model it would be copied and saved with it.
_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()
# PyTorch's fused attention leaves out the hooks on modules inside. It is one switch for the whole process,
# off as long as any context is entered; and whether it was on before.
_entered: set[int] = set()
_was_fused = True
_held: set[CodeType] = set()


def held_back(function: _F) -> _F:
    """Hold Ctrl-C back while this function runs inside a `restored` context; decorator."""
    _held.add(function.__code__)
    return function


class restored:
    """Context in which a model may be changed; afterwards it is as before.

    One thread at a time may change a model; another one waits on entering. Ctrl-C is held back on the way in
    and out, and delivered afterwards. Compiled parts run eagerly, as hooks need it.

    Parameters
    ----------
    model : module
        The model, or the part of it that is known.
    enter, leave : function, optional
        Called on the way in, after the state was noted, and out, before it is put back.
    also : iterable
        Further modules, and other objects whose attributes are put back, such as Captum's rules.
    attributes : iterable of str
        Further attributes of modules that are put back.
    """

    def __init__(
        self,
        model: nn.Module,
        enter: Callable[[], Any] | None = None,
        leave: Callable[[], Any] | None = None,
        also: Iterable[object] = (),
        attributes: Iterable[str] = (),
    ) -> None:
        self._model, self._enter, self._leave = model, enter, leave
        self._also, self._attributes = tuple(also), (*_ATTRIBUTES, *attributes)
        self._lock: Any = None
        self._previous: Any = None  # the handler of SIGINT before
        self._is_on = self._is_pending = self._is_noted = False

    @held_back
    def __enter__(self) -> nn.Module:
        global _was_fused
        # Python runs signal handlers in the main thread only; without a Python handler no exception can come.
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(previous):
            self._previous, self._is_on = previous, True
            signal.signal(signal.SIGINT, self._handle)
        try:
            with _locks_lock:
                lock = _locks.setdefault(self._model, threading.RLock())
            while self._lock is None and not self._is_pending:
                self._lock = lock if lock.acquire(timeout=0.1) else None
            if not self._is_pending:
                with _locks_lock:
                    if not _entered:
                        _was_fused = torch.backends.mha.get_fastpath_enabled()
                        torch.backends.mha.set_fastpath_enabled(False)
                    _entered.add(id(self))
                self._note()
                self._is_noted = True
                if self._enter is not None:
                    self._enter()
        except BaseException:
            self._finish()
            raise
        if self._is_pending:
            self.__exit__()
            return self.__enter__()  # the user's handler raised nothing, and the body is to run
        return self._model

    @held_back
    def __exit__(self, *error: object) -> None:
        if (interrupted := sys.exception()) is not None:
            _close_generators(interrupted)
        self._finish()
        if self._is_pending:
            self._is_pending = False
            # As if it came to the caller: a context around this one must not hold it back for what is over.
            self._previous(signal.SIGINT, sys._getframe(1))

    def _finish(self) -> None:
        try:
            if self._leave is not None and self._is_noted:
                self._leave()
        finally:
            if self._is_noted:
                self._put_back()
            with _locks_lock:
                if _entered == {id(self)}:
                    torch.backends.mha.set_fastpath_enabled(_was_fused)
                _entered.discard(id(self))
            if self._lock is not None:
                self._lock.release()
            if self._is_on and signal.getsignal(signal.SIGINT) == self._handle:
                previous = self._previous
                while isinstance(other := getattr(previous, "__self__", None), restored) and not other._is_on:
                    previous = other._previous  # of a context that ended before this one
                signal.signal(signal.SIGINT, previous)
            self._lock, self._is_on, self._is_noted = None, False, False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        above = frame if self._is_on else None  # afterwards it may still be called by a later handler
        while above is not None:
            if above.f_code in _held:
                self._is_pending = True
                return
            above = above.f_back
        self._previous(number, frame)

    def _note(self) -> None:
        """Note what modules and other objects hold."""
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._values: list[tuple[dict[str, Any], str, Any]] = []
        self._tensors: dict[Tensor, tuple[Tensor, bool]] = {}
        self._statistics: dict[Tensor, Tensor] = {}
        modules: dict[nn.Module, None] = dict.fromkeys(self._model.modules())
        for thing in self._also:
            if isinstance(thing, nn.Module):
                modules.update(dict.fromkeys(thing.modules()))
            else:
                self._dicts.append((vars(thing), dict(vars(thing))))
        for module in modules:
            own = vars(module)
            is_norm = isinstance(module, nn.modules.batchnorm._NormBase)
            for name in ("_parameters", "_modules", *_HOOKS):
                self._dicts.append((own[name], dict(own[name])))
            if is_norm:  # buffers of others may be caches of the model
                self._dicts.append((module._buffers, dict(module._buffers)))
            for name in {*self._attributes, *module._parameters, *module._buffers}:
                self._values.append((own, name, own.get(name, _MISSING)))
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is None:
                    continue
                self._tensors[tensor] = tensor.data, tensor.requires_grad
                if is_norm and module.training and not tensor.requires_grad:
                    # In training mode norms write into their statistics; passes here are no training.
                    self._statistics[tensor] = tensor.detach().clone()
            # Compiled code does not know the hooks that are about to come.
            if own.get("_compiled_call_impl") is not None:
                own["_compiled_call_impl"] = None
            if "forward" in own and (original := module._modules.get("_orig_mod")) is not None:
                own["forward"] = original.__call__

    def _put_back(self) -> None:
        for tensor, (data, requires_grad) in self._tensors.items():
            if tensor.layout == torch.strided and _is_exchanged(tensor, data):
                tensor.data = data
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
        with torch.no_grad():
            for tensor, before in self._statistics.items():
                tensor.copy_(before)
        for current, content in self._dicts:
            # Hooks run in the order of their dict.
            same_values = [*map(id, current.values())] == [*map(id, content.values())]
            if not same_values or list(current) != list(content):
                current.clear()
                current.update(content)
        for own, name, value in self._values:
            if value is _MISSING:
                own.pop(name, None)
            elif own.get(name) is not value:
                own[name] = value


def _is_exchanged(tensor: Tensor, data: Tensor) -> bool:
    """Whether a tensor has another storage than it had; sparse ones have no address, and no rule for them."""
    if data.layout != torch.strided or tensor.data_ptr() != data.data_ptr() or tensor.dtype != data.dtype:
        return True
    return tensor.shape != data.shape or tensor.stride() != data.stride()


def _close_generators(error: BaseException | None) -> None:
    """Finish what an interrupt left half-way: a generator in its traceback would write to the model later."""
    while error is not None:
        if not isinstance(error, Exception):
            traceback.clear_frames(error.__traceback__)
        error = error.__context__
