"""Where pairs and subspaces come from, so that they are not used for something else unnoticed."""

from __future__ import annotations

import hashlib
import operator
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from .checks import as_int, warn_user
from .targets import LABEL, Target

# What must agree between learning subspaces and explaining with them.
USE = ("model", "layer", "channel_dim", "method", "canonizers", "target")
# What must agree between the batches of one collection.
COLLECTION = (*USE, "backend", "target_order", "positions", "random_state", "skip_tokens")

TargetDescription: TypeAlias = int | list[int] | str | None


class ProvenanceWarning(UserWarning):
    """Subspaces or pairs are used with another model, layer, target or method than they were made for."""


@dataclass(frozen=True)
class Provenance:
    """How pairs (a, c) were collected. Subspaces learned from them carry it in their metadata.

    Attributes
    ----------
    backend : str
        "zennit" or "captum".
    method : str
        How contexts are found: the context method or composite, with its rules.
    layer : str
        Dotted name of the layer.
    channel_dim : int
        Axis of the features in the layer's output.
    target : int, list of int, str or None
        The explained outputs as `describe_target` gives them. None in a use that does not say.
    model : str or None
        `model_fingerprint` of the model; None if there is only a function.
    positions, random_state : int or None
        Positions per example (None for all) and the seed that chose them.
    target_order : str or None
        `target_order` of targets that differ from example to example.
    skip_tokens : int or None
        First tokens of each example that were left out; None for parts that differ in it.
    canonizers : str or None
        What changed the form of the model before rules were applied, "none" if nothing did; None if that is
        not known.
    """

    backend: str
    method: str
    layer: str
    channel_dim: int
    target: TargetDescription
    model: str | None = None
    positions: int | None = None
    random_state: int | None = None
    target_order: str | None = None
    skip_tokens: int | None = 0
    canonizers: str | None = None

    def __post_init__(self) -> None:
        for name in ("channel_dim", "positions", "random_state", "skip_tokens"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_int(value, name))  # JSON takes no integers of NumPy
        if not isinstance(self.target, str):
            object.__setattr__(self, "target", describe_target(self.target))

    def as_dict(self) -> dict[str, Any]:
        """As a mapping that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Provenance:
        """The inverse of `as_dict`; unknown entries are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in entries.items() if name in known})

    @property
    def counts_from_the_end(self) -> bool:
        """Whether there is a negative target."""
        targets = self.target if isinstance(self.target, list) else [self.target]
        return any(isinstance(target, int) and target < 0 for target in targets)

    def with_outputs(self, n_outputs: int | None) -> Provenance:
        """With negative targets, which count from the end of `n_outputs`, as what they stand for."""
        n = n_outputs or 0
        if isinstance(self.target, int):
            return replace(self, target=self.target + n if -n <= self.target < 0 else self.target)
        if isinstance(self.target, list):
            return replace(self, target=describe_target([i + n if -n <= i < 0 else i for i in self.target]))
        return self

    def differences(self, other: Provenance, names: Iterable[str] = USE, exact: bool = False) -> list[str]:
        """One line for each named field in which `other` differs, e.g. "layer: 'a' there, 'b' here".

        A model or canonizers that one side does not know are no difference. Nor are, unless `exact`, a target
        that one side does not know and some of the targets of `self`.
        """
        lines = []
        for name in names:
            mine, theirs = getattr(self, name), getattr(other, name)
            unknown = mine is None or theirs is None
            if mine == theirs or (name in ("model", "canonizers") and unknown):
                continue
            # Which labels a loader gave is not known: "label" stands for any of them.
            if name == "target" and not exact and (unknown or mine == LABEL or _is_part(theirs, mine)):
                continue
            lines.append(f"{name}: {_shown(name, mine)} there, {_shown(name, theirs)} here")
        return lines


def _is_part(some: TargetDescription, of: TargetDescription) -> bool:
    """Whether targets are among those of a list."""
    if not isinstance(of, list) or isinstance(some, str | None):
        return False
    return {some} <= set(of) if isinstance(some, int) else set(some) <= set(of)


def _shown(name: str, value: Any) -> str:
    if name == "model" and value is not None:
        return f"weights {value[:8]}…"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def common_provenance(parts: Sequence[Provenance | None]) -> Provenance | None:
    """The provenance of pairs that are joined, from those of the parts; ValueError if they contradict."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    # A part that does not know its model agrees with every other, but those must agree with each other.
    first = replace(known[0], model=next((part.model for part in known if part.model), None))
    for other in known[1:]:
        if differences := first.differences(other, exact=True):
            raise ValueError(
                f"the parts were not collected in one way: {'; '.join(differences)}. To join them all the "
                "same, give up what is known about them: part.with_provenance(None)"
            )
    free: dict[str, Any] = {
        name: getattr(first, name) if len({getattr(part, name) for part in known}) == 1 else None
        for name in ("positions", "random_state", "target_order", "skip_tokens")
    }
    return replace(first, **free)


def check_provenance(made: Provenance | None, used: Provenance, what: str, strict: bool = False) -> None:
    """Compare where something was made with where it is used.

    Parameters
    ----------
    made, used : Provenance
        Nothing can be compared if `made` is None.
    what : str
        What was made, in the plural, for the message: "subspaces".
    strict : bool
        Whether a difference is an error.

    Raises
    ------
    ValueError
        If they differ and `strict`; otherwise a `ProvenanceWarning` is given.
    """
    differences = [] if made is None else made.differences(used)
    if not differences:
        return
    message = f"the {what} were made for something else: {'; '.join(differences)}"
    if strict:
        raise ValueError(message)
    warn_user(message, ProvenanceWarning)


# Targets ------------------------------------------------------------------------------------------------


def describe_target(target: Target, tuple_is_index: bool = False) -> TargetDescription:
    """The explained outputs as something that can be compared and written to a file.

    Parameters
    ----------
    target : int, sequence, tensor, array, function or None
        One output, one for each example, or a function that gives them.
    tuple_is_index : bool
        Whether a tuple is an index into an output with several axes, as in Captum, instead of one target for
        each example.

    Returns
    -------
    int, list of int, str or None
        The different outputs in rising order, or the only one. A string for indices into an output with
        several axes, and for functions: the qualified name, with a digest of captured values.
    """
    if target is None:
        return None
    if callable(target):
        return describe_function(target)
    entries = _integers(target)
    if isinstance(entries, int):
        return entries
    if not entries:
        raise TypeError("target is an empty sequence; give an output, or one for each example")
    if tuple_is_index and isinstance(target, tuple) and all(isinstance(i, int) for i in entries):
        return str(tuple(entries))
    different: list[Any] = sorted({tuple(e) if isinstance(e, list) else e for e in entries})
    if not isinstance(different[0], int):
        return str(different)
    return different[0] if len(different) == 1 else different


def target_order(target: Target) -> str | None:
    """Digest of the targets example by example; None if there is one for all, or a function.

    `describe_target` forgets which example had which target. A collection that goes on must know.
    """
    if target is None or callable(target) or isinstance(entries := _integers(target), int):
        return None
    return hashlib.sha256(repr(entries).encode()).hexdigest()[:12]


def _integers(target: Any) -> Any:
    """An int, or nested lists of int."""
    if isinstance(target, Sequence) and not isinstance(target, str):
        return [_integers(entry) for entry in target]
    if isinstance(target, Tensor | np.ndarray):
        return _integers(target.tolist())
    try:
        return as_int(target, "target")
    except ValueError:
        raise TypeError(
            "target must be an integer, one for each example (a sequence, tensor or array), a function or "
            f"None, got {target!r}"
        ) from None


# Fingerprints -------------------------------------------------------------------------------------------

_FINGERPRINTS: WeakKeyDictionary[nn.Module, tuple[Any, str]] = WeakKeyDictionary()


def model_fingerprint(model: nn.Module) -> str:
    """SHA-256 of names, shapes and values of the state dict: the same model, the same string.

    The wrappers of `torch.compile` and `DataParallel` do not count.

    A second call takes milliseconds: the digest is remembered until a tensor has another address or version
    counter. Torch does not count writes through `.data` or NumPy; for these, 16 values of each tensor are
    compared.
    """
    state, version = {}, []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            state[name.replace("_orig_mod.", "").replace("module.", "")] = tensor
            version.append((name, *_version(tensor)))
    known = _FINGERPRINTS.get(model)
    if known is None or known[0] != version:
        digest = hashlib.sha256()
        for name, tensor in state.items():
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(bytes_of(tensor))
        known = _FINGERPRINTS[model] = version, digest.hexdigest()
    return known[1]


@torch.no_grad()
def _version(tensor: Tensor) -> tuple[Any, ...]:
    """What changes when a tensor does, without reading all of it."""
    facts = (tensor.shape, tensor.dtype, tensor.device, None if tensor.is_inference() else tensor._version)
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return facts
    # Values at equal distances in memory: no copy of the rest, whatever the strides.
    extent = 1 + sum(map(operator.mul, [n - 1 for n in tensor.shape], tensor.stride()))
    step = -(-extent // 16)
    sample = tensor.detach().as_strided((-(-extent // step),), (step,), tensor.storage_offset())
    return (*facts, tensor.data_ptr(), bytes(bytes_of(sample)))


def bytes_of(tensor: Tensor) -> memoryview:
    """The values of a tensor in row-major order; none on the meta device."""
    plain = tensor.detach()
    if plain.is_meta:
        return memoryview(b"")
    plain = plain.dequantize() if plain.is_quantized else plain.to_dense()
    plain = plain.cpu().resolve_conj().resolve_neg().contiguous().flatten()
    return plain.view(torch.uint8).numpy().data


def describe_function(function: Any) -> str:
    """Qualified name of a function, with a digest of the values that it captured."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None)}.{name} {content_digest(function)}"


_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_SETTINGS = (*_PLAIN, list, tuple, dict, set, Tensor, np.ndarray, np.generic, types.FunctionType)


def content_digest(*values: Any) -> str:
    """Short digest of settings, the same in every process.

    Containers, tensors and arrays count with their content, functions with their qualified name, defaults and
    captured values, other objects with their type and such attributes.
    """
    return hashlib.sha256(repr(_content(values, 0)).encode()).hexdigest()[:12]


def _content(value: Any, depth: int) -> Any:
    """A value as nested lists of texts."""
    parts: Iterable[Any] = ()
    text = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Tensor):
        text += f"{tuple(value.shape)}{value.dtype}{hashlib.sha256(bytes_of(value)).hexdigest()}"
    elif isinstance(value, np.ndarray | np.generic):
        text += f"{value.shape}{value.dtype}{hashlib.sha256(value.tobytes()).hexdigest()}"
    elif isinstance(value, _PLAIN):
        text += repr(value)
    elif isinstance(value, Mapping):
        parts = [part for key in sorted(value, key=repr) for part in (key, value[key])]
    elif isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, set | frozenset):
        parts = sorted(value, key=repr)
    elif isinstance(value, partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, types.MethodType):
        parts = [value.__func__, value.__self__]
    elif isinstance(value, type | types.BuiltinFunctionType | types.FunctionType):
        text += f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            parts = [value.__defaults__, value.__kwdefaults__, cells]
    elif not isinstance(value, nn.Module):  # whatever else it holds may change in use
        parts = [{name: v for name, v in getattr(value, "__dict__", {}).items() if isinstance(v, _SETTINGS)}]
    # An object may hold itself.
    return [text, [_content(part, depth + 1) for part in parts] if depth < 8 else None]
