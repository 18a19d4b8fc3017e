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
_ATTRIBUTES = ("forward", "eps", "_is_full_backward_hook", "_compiled_call_impl")
_MISSING = object()
# One lock per model. On the model it would be copied and saved with it.
_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()
# PyTorch's fused attention leaves out the hooks on modules inside. It is one switch for the whole process, off
# as long as any context is entered; and whether it was on before.
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
        self._state: _State | None = None
        self._lock: Any = None
        self._previous: Any = None  # the handler of SIGINT before
        self._is_on = self._is_pending = False

    @held_back
    def __enter__(self) -> nn.Module:
        self._install()
        try:
            with _locks_lock:
                lock = _locks.setdefault(self._model, threading.RLock())
            while self._lock is None and not self._is_pending:
                self._lock = lock if lock.acquire(timeout=0.1) else None
            if not self._is_pending:
                self._switch_fused_attention(off=True)
                self._state = _State(self._model, self._also, self._attributes)
                if self._enter is not None:
                    self._enter()
        except BaseException:
            self._finish()
            raise
        if self._is_pending:
            self._finish()
            self._deliver()
        return self._model

    @held_back
    def __exit__(self, *error: object) -> None:
        _close_generators(sys.exception())
        self._finish()
        self._deliver()

    def _finish(self) -> None:
        try:
            if self._leave is not None and self._state is not None:
                self._leave()
        finally:
            if self._state is not None:
                self._state.restore()
            self._switch_fused_attention(off=False)
            if self._lock is not None:
                self._lock.release()
            self._state = self._lock = None
            if self._is_on and signal.getsignal(signal.SIGINT) == self._handle:
                signal.signal(signal.SIGINT, self._previous)
            self._is_on = False

    def _switch_fused_attention(self, off: bool) -> None:
        global _was_fused
        with _locks_lock:
            if not _entered:
                _was_fused = torch.backends.mha.get_fastpath_enabled()
            _entered.add(id(self)) if off else _entered.discard(id(self))
            torch.backends.mha.set_fastpath_enabled(_was_fused and not _entered)

    def _install(self) -> None:
        # Python runs signal handlers in the main thread only; without a Python handler no exception can come.
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(previous):
            self._previous, self._is_on = previous, True
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        above = frame if self._is_on else None  # afterwards it may still be called by a later handler
        while above is not None:
            if above.f_code in _held:
                self._is_pending = True
                return
            above = above.f_back
        self._previous(number, frame)

    def _deliver(self) -> None:
        if self._is_pending:
            self._is_pending = False
            # As if it came to the caller: a context around this one must not hold it back for what is over.
            self._previous(signal.SIGINT, sys._getframe(2))


class _State:
    """What modules and other objects held when this was made."""

    def __init__(self, model: nn.Module, also: Iterable[object], attributes: Iterable[str]) -> None:
        trees = [model, *(thing for thing in also if isinstance(thing, nn.Module))]
        self._modules = {
            module: self._of_module(module, attributes) for tree in trees for module in tree.modules()
        }
        self._objects = [(vars(o), dict(vars(o))) for o in also if not isinstance(o, nn.Module)]
        self._tensors: dict[Tensor, tuple[Tensor, bool]] = {}
        self._statistics: dict[Tensor, Tensor] = {}
        for module in self._modules:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self._tensors[tensor] = tensor.data, tensor.requires_grad
            if module.training and isinstance(module, nn.modules.batchnorm._NormBase):
                # In training mode norms write into their statistics; passes here are no training.
                self._statistics |= {b: b.detach().clone() for b in module._buffers.values() if b is not None}
            self._run_eagerly(module)

    @staticmethod
    def _of_module(module: nn.Module, attributes: Iterable[str]) -> tuple[dict[str, Any], list[Any]]:
        names = {*attributes, *module._parameters, *module._buffers}
        values = {name: vars(module).get(name, _MISSING) for name in names}
        dicts = [vars(module)[name] for name in ("_parameters", "_modules", *_HOOKS)]
        if isinstance(module, nn.modules.batchnorm._NormBase):  # buffers of others may be caches of the model
            dicts.append(module._buffers)
        return values, [(content, dict(content)) for content in dicts]

    @staticmethod
    def _run_eagerly(module: nn.Module) -> None:
        if vars(module).get("_compiled_call_impl") is not None:
            vars(module)["_compiled_call_impl"] = None
        original = module._modules.get("_orig_mod")
        if original is not None and "forward" in vars(module):
            vars(module)["forward"] = original.__call__

    def restore(self) -> None:
        for tensor, (data, requires_grad) in self._tensors.items():
            if not _is_same(tensor, data):
                tensor.data = data
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
        with torch.no_grad():
            for tensor, before in self._statistics.items():
                tensor.copy_(before)
        for module, (values, dicts) in self._modules.items():
            for current, content in dicts:
                _restore(current, content)
            for name, value in values.items():
                if value is _MISSING:
                    vars(module).pop(name, None)
                elif vars(module).get(name) is not value:
                    vars(module)[name] = value
        for current, content in self._objects:
            _restore(current, content)


def _is_same(tensor: Tensor, data: Tensor) -> bool:
    """Whether a tensor still has this storage; sparse ones have no address, and no rule exchanges them."""
    if tensor.layout != torch.strided or data.layout != torch.strided:
        return tensor.layout == data.layout
    same = tensor.data_ptr() == data.data_ptr() and tensor.dtype == data.dtype
    return same and tensor.shape == data.shape and tensor.stride() == data.stride()


def _restore(current: dict[Any, Any], before: dict[Any, Any]) -> None:
    same_keys = list(current) == list(before)  # hooks run in the order of their dict
    if not same_keys or any(current[key] is not value for key, value in before.items()):
        current.clear()
        current.update(before)


def _close_generators(error: BaseException | None) -> None:
    """Finish what an interrupt left half-way: a generator in its traceback would write to the model later."""
    while error is not None:
        if not isinstance(error, Exception):
            traceback.clear_frames(error.__traceback__)
        error = error.__context__
