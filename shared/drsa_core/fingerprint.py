"""Digests that tell models and functions apart, and are the same in every process."""

from __future__ import annotations

import functools
import hashlib
import io
import operator
import types
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

# Values looked at in each tensor to notice a write that torch does not count.
_SAMPLE = 16
# Objects within objects are followed this far; state that is deeper does not tell models apart.
_MAX_DEPTH = 12

_CONSTANT = (bool, int, float, complex, str, bytes, tuple, frozenset, types.NoneType)
_SIMPLE = (*_CONSTANT, list, dict, set, Tensor, np.ndarray, np.generic, types.FunctionType)


class _Digest(Protocol):
    def update(self, data: Any, /) -> None: ...


# ---------------------------------------------------------------------- models


def model_fingerprint(model: nn.Module) -> str:
    """SHA-256 of names, shapes and values of the state dict: the same model, the same string.

    Buffers that are not saved do not count, nor do the wrappers of `torch.compile` and `DataParallel`.
    Tensors on the meta device count with their shape alone.

    Notes
    -----
    The digest is kept as long as every parameter and buffer is the same object at the same address with the
    same version counter, shape and type, so that a second call takes milliseconds. Torch does not count
    writes through `.data` or NumPy. A few values of each tensor are compared for that reason; a write that
    misses all of them is not noticed.
    """
    state = _state(model)
    version = _Version.of(state)
    entry = _CACHE.get(id(model))
    if entry is not None and entry.model() is model and entry.version.is_same(version):
        return entry.fingerprint
    digest = hashlib.sha256()
    for name, value in state.items():
        if isinstance(value, Tensor):
            _feed_tensor(digest, value, name)
        else:
            digest.update(f"{name}:".encode())
            feed(digest, value)
    fingerprint = digest.hexdigest()
    key = id(model)
    _CACHE[key] = _Entry(weakref.ref(model, lambda _: _CACHE.pop(key, None)), version, fingerprint)
    return fingerprint


def _state(model: nn.Module) -> dict[str, Any]:
    """The state dict with the very tensors of the model, under the names that they have without wrappers."""
    # The attribute that holds the wrapped module, by the wrapper's place in the model.
    wrappers = []
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        if "_orig_mod" in module._modules:
            wrappers.append((prefix, "_orig_mod."))
        elif isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            wrappers.append((prefix, "module."))
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    if not wrappers:
        return dict(state)
    renamed = {}
    for name, value in state.items():
        for prefix, attribute in reversed(wrappers):  # the innermost first: it stands at the end of the name
            if name.startswith(prefix + attribute):
                name = prefix + name[len(prefix + attribute) :]
        renamed[name] = value
    return renamed


@dataclass(frozen=True)
class _Version:
    """What changes when a parameter or buffer does, without reading all of it."""

    tensors: tuple[weakref.ref[Tensor], ...]
    facts: tuple[Any, ...]
    samples: bytes

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _Version:
        tensors: list[weakref.ref[Tensor]] = []
        facts: list[Any] = []
        samples: dict[Any, list[Tensor]] = {}
        rest = hashlib.sha256()
        for name, value in state.items():
            if not isinstance(value, Tensor):
                feed(rest, value)
                facts.append(name)
                continue
            tensors.append(weakref.ref(value))
            if _has_plain_memory(value):
                version = None if value.is_inference() else value._version
                shape = (value.shape, value.stride(), value.dtype, value.device)
                facts.append((name, value.data_ptr(), version, *shape))
                samples.setdefault((value.device, value.dtype), []).append(_sample(value))
            else:
                facts.append(name)
                _feed_tensor(rest, value, name)
        # One transfer for each type and device, not for each tensor.
        parts = [bytes_of(torch.cat(some)) for some in samples.values()]
        return cls(tuple(tensors), tuple(facts), b"".join([rest.digest(), *parts]))

    def is_same(self, other: _Version) -> bool:
        # Weak references compare what they refer to, and tensors compare their elements: only `is` will do.
        return (
            len(self.tensors) == len(other.tensors)
            and all(mine() is theirs() for mine, theirs in zip(self.tensors, other.tensors, strict=True))
            and self.facts == other.facts
            and self.samples == other.samples
        )


@dataclass(frozen=True)
class _Entry:
    model: weakref.ref[nn.Module]
    version: _Version
    fingerprint: str


# By identity: a module may define equality. An entry goes with its model.
_CACHE: dict[int, _Entry] = {}


def _has_plain_memory(tensor: Tensor) -> bool:
    return not (
        isinstance(tensor, UninitializedParameter | UninitializedBuffer)
        or tensor.is_meta
        or tensor.is_quantized
        or tensor.layout != torch.strided
    )


@torch.no_grad()
def _sample(tensor: Tensor) -> Tensor:
    """A few values at equal distances in memory, without a copy of the rest."""
    if not tensor.numel():
        return tensor.flatten()
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    step = max(1, -(-extent // _SAMPLE))
    return tensor.detach().as_strided((-(-extent // step),), (step,), tensor.storage_offset())


# ---------------------------------------------------------------------- contents


def function_digest(function: Any) -> str:
    """Short digest of what a function does: its code, constants, defaults and simple captured values.

    Simple values are numbers, strings, arrays, other functions and containers of them, from its closure. Of
    the names of its module only constants count. The same source gives the same digest in another process
    with the same version of Python.
    """
    digest = hashlib.sha256()
    feed(digest, function)
    return digest.hexdigest()[:12]


def feed(digest: _Digest, value: Any, within: tuple[int, ...] = ()) -> None:
    """Add a value to a digest, by content where it has one and else by its type. Addresses never count."""
    # A type in front of every value, so that 1, "1" and [1] differ.
    digest.update(f"<{type(value).__module__}.{type(value).__qualname__}>".encode())
    if id(value) in within or len(within) > _MAX_DEPTH:  # an object may hold itself
        return
    if isinstance(value, Tensor):
        _feed_tensor(digest, value, "")
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        digest.update(f"{array.shape}{array.dtype}".encode())
        digest.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
    elif value is None or isinstance(value, bool | int | float | complex | str | torch.dtype | torch.device):
        digest.update(repr(value).encode())
    elif isinstance(value, bytes | bytearray):
        digest.update(bytes(value))
    elif isinstance(value, io.BytesIO):
        digest.update(value.getvalue())
    else:
        for part in _parts(value):
            feed(digest, part, (*within, id(value)))
    digest.update(b"</>")


def _parts(value: Any) -> list[Any]:
    """What a container, a function or another object is made of, in an order that is always the same."""
    if isinstance(value, Mapping):
        return [part for key in sorted(value, key=repr) for part in (key, value[key])]
    elif isinstance(value, set | frozenset):
        return sorted(value, key=repr)  # their order changes from process to process
    elif isinstance(value, list | tuple):
        return list(value)
    elif isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    elif isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    elif isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    elif isinstance(value, types.CodeType):
        return [value.co_code, value.co_names, value.co_varnames, *value.co_consts]
    elif isinstance(value, operator.itemgetter | operator.attrgetter | operator.methodcaller):
        return list(value.__reduce__())[1:]
    elif isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
        return [getattr(value, "__module__", None) or "", getattr(value, "__qualname__", value.__name__)]
    elif isinstance(value, nn.Module):
        return []  # a model has a fingerprint of its own; here its type is enough
    # Of another object what is simple: whatever else it holds, a loader for instance, may change in use.
    own = {name: part for name, part in _attributes(value).items() if isinstance(part, _SIMPLE)}
    call = getattr(type(value), "__call__", None)  # noqa: B004 - the function itself is wanted
    return [own, *([call] if isinstance(call, types.FunctionType) else [])]


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes of an object, also those in the slots of its class and of the classes above."""
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            # Python writes the class into names with two underscores in front.
            is_private = name.startswith("__") and not name.endswith("__")
            name = f"_{cls.__name__.lstrip('_')}{name}" if is_private else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _global_names(code: types.CodeType) -> set[str]:
    """Names that a function looks up, also in generators, comprehensions and functions inside of it."""
    inner = [_global_names(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return set(code.co_names).union(*inner)


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    captured = []
    for cell in function.__closure__ or ():
        try:
            captured.append(cell.cell_contents)
        except ValueError:  # a name that is assigned later
            captured.append(None)
    # Of the module's names only constants: what they import has versions of its own.
    used = {name: function.__globals__.get(name) for name in _global_names(function.__code__)}
    constants = {name: value for name, value in used.items() if isinstance(value, _CONSTANT)}
    return [function.__code__, function.__defaults__, function.__kwdefaults__, captured, constants]


@torch.no_grad()
def _feed_tensor(digest: _Digest, tensor: Tensor, name: str) -> None:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        digest.update(f"{name}(uninitialised){tensor.dtype}".encode())
        return
    digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
    if tensor.is_meta:
        return
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        parts = [tensor.indices(), tensor.values()]
    elif tensor.layout != torch.strided:
        parts = [tensor.to_dense()]
    elif tensor.is_quantized:
        digest.update(str(tensor.qscheme()).encode())
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            digest.update(f"{tensor.q_scale()}{tensor.q_zero_point()}".encode())
            parts = [tensor.int_repr()]
        else:
            parts = [tensor.int_repr(), tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    else:
        parts = [tensor]
    for part in parts:
        digest.update(bytes_of(part))


def bytes_of(tensor: Tensor) -> memoryview:
    """The values of a tensor in row-major order, as they lie in memory."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
    return plain.view(torch.uint8).numpy().data
