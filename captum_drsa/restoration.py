"""Leaving the user's model as it was, whatever happens in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ._captum import PropagationRule


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put back on exit: parameters, buffers, hooks, children and attributes of all modules of `model`.

    Captum's LRP replaces weights, deletes the user's rules and leaves activations on the modules; DeepLift
    leaves attributes after an error; a forward pass in training mode moves the statistics of batch norms.
    Also on exceptions and on KeyboardInterrupt.
    """
    modules = list(model.modules())
    attributes = [_attributes(module) for module in modules]
    rules = {id(rule): (rule, dict(vars(rule))) for rule in _rules(modules)}
    # `.data` shares the storage: a rule assigns new data, so the old values need no copy.
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, (values, dicts) in zip(modules, attributes, strict=True):
            _restore_attributes(module, values, dicts)
        for rule, content in rules.values():
            _restore_dict(vars(rule), content)
        for parameter, data in parameters:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
        with torch.no_grad():
            for buffer, data in buffers:
                # Only if need be: a write would bump the version that a graph of the user's may rely on.
                if not torch.equal(buffer, data):
                    buffer.copy_(data)


def _attributes(module: nn.Module) -> tuple[dict[str, Any], dict[str, dict[Any, Any]]]:
    """Attributes by name, and the contents of those that are dicts: hooks, parameters, buffers, children."""
    values = dict(vars(module))
    return values, {name: dict(value) for name, value in values.items() if isinstance(value, dict)}


def _restore_attributes(module: nn.Module, values: dict[str, Any], dicts: dict[str, dict[Any, Any]]) -> None:
    for name, content in dicts.items():
        _restore_dict(values[name], content)
    _restore_dict(vars(module), values)


def _restore_dict(current: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key in current.keys() - before.keys():
        del current[key]
    # Hooks run in the order of their dict: rebuild it if one was taken out and has to go back.
    if current.keys() != before.keys():
        current.clear()
    current.update(before)


def _rules(modules: list[nn.Module]) -> list[PropagationRule]:
    """Captum's LRP writes relevance and hook handles on the rules that the user put on the modules."""
    return [
        value for module in modules for value in vars(module).values() if isinstance(value, PropagationRule)
    ]
