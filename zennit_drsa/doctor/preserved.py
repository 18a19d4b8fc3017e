"""A model that comes back as it was, also if a canonizer of someone else fails half-way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore attributes, children, hooks and parameters of all modules at the end.

    Zennit's canonizers replace the data of parameters, and forget what they did if they fail while they
    register. No tensor is copied: nothing here or in Zennit writes into the values of one.
    """
    modules = [(module, _attributes(module)) for module in model.modules()]
    tensors = [
        (tensor, tensor.data, tensor.requires_grad) for tensor in (*model.parameters(), *model.buffers())
    ]
    try:
        yield
    finally:
        for tensor, data, requires_grad in tensors:
            _restore_tensor(tensor, data, requires_grad)
        for module, attributes in modules:
            _restore_attributes(module, attributes)


def _attributes(module: nn.Module) -> dict[str, Any]:
    # The dictionaries of parameters, buffers, children and hooks are changed in place: keep their content.
    return {key: (value, _content(value)) for key, value in vars(module).items()}


def _content(value: object) -> dict[Any, Any] | None:
    return dict(value) if isinstance(value, dict) else None


def _restore_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    namespace = vars(module)
    for key in namespace.keys() - attributes.keys():
        del namespace[key]
    for key, (value, content) in attributes.items():
        namespace[key] = value
        if content is not None and not _same(value, content):
            value.clear()
            value.update(content)


def _same(value: dict[Any, Any], content: dict[Any, Any]) -> bool:
    return list(value) == list(content) and all(value[key] is content[key] for key in content)


def _restore_tensor(tensor: Tensor, data: Tensor, requires_grad: bool) -> None:
    if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
        tensor.data = data
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)
