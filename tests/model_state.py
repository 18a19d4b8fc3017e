"""Everything about a model that a plugin must leave as it found it, as one comparable value."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def model_state(model: nn.Module) -> dict[str, Any]:
    """Weights and buffers bit for bit, identities of modules and parameters, hooks, flags, attributes."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        state[f"{name}: module"] = (id(module), type(module), module.training)
        state[f"{name}: children"] = [(child, id(m)) for child, m in module._modules.items()]
        for hooks in _HOOKS:
            state[f"{name}: {hooks}"] = list(getattr(module, hooks, ()))
        # Instance attributes, a replaced forward method among them.
        state[f"{name}: attributes"] = sorted(
            (key, id(value))
            for key, value in vars(module).items()
            if key not in {"_parameters", "_buffers", "_modules", "training", *_HOOKS}
        )
        tensors = [*module._parameters.items(), *module._buffers.items()]
        for key, tensor in tensors:
            if tensor is None:
                state[f"{name}.{key}"] = None
                continue
            bits = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            gradient = None if tensor.grad is None else tensor.grad.clone().numpy().tobytes()
            state[f"{name}.{key}"] = (id(tensor), tensor.requires_grad, tensor.dtype, bits, gradient)
    return state
