"""What a user gives to `attribute`, checked: the inputs, and the additional forward arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from captum.attr import Attribution, NoiseTunnel
from drsa_core.layer import Inputs, Request, copies
from drsa_core.targets import Target, as_listed
from torch import Tensor, nn


def as_inputs(inputs: Inputs, method: str, must_be_floating: str | None) -> tuple[Tensor, ...]:
    """Inputs (N, …) as a tuple of tensors that can be differentiated.

    Parameters
    ----------
    method : str
        What the inputs are for, for the message.
    must_be_floating : {"all", "some", None}
        Which of the inputs must be floating point.
    """
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    if not tensors or not all(isinstance(x, Tensor) and x.ndim > 0 for x in tensors):
        raise TypeError(
            f"inputs must be a tensor (N, …) or a tuple of tensors, got {type(inputs).__name__}; NumPy "
            "arrays and lists become tensors with torch.as_tensor"
        )
    if len({len(x) for x in tensors}) > 1 or not len(tensors[0]):
        raise ValueError(
            "all inputs must have the same number of examples, at least 1, along the first axis, got "
            f"shapes {[tuple(x.shape) for x in tensors]}"
        )
    floating = [x.is_floating_point() for x in tensors]
    if (must_be_floating == "all" and not all(floating)) or (
        must_be_floating == "some" and not any(floating)
    ):
        dtype = next(x.dtype for x, is_floating in zip(tensors, floating, strict=True) if not is_floating)
        raise TypeError(
            f"{method} needs floating-point inputs, got {dtype}; convert images with .float(). For token "
            "numbers wrap a layer method on the embedding, such as LayerIntegratedGradients, or a "
            "perturbation method; pass masks as additional_forward_args"
        )
    with torch.inference_mode(False):  # a copy made outside of it can be differentiated
        return tuple(x.clone() if x.is_inference() else x for x in tensors)


def as_arguments(additional_forward_args: Any) -> tuple[Any, ...]:
    """Additional forward arguments as a tuple, as Captum reads them."""
    if additional_forward_args is None:
        return ()
    given = (
        additional_forward_args if isinstance(additional_forward_args, tuple) else (additional_forward_args,)
    )
    with torch.inference_mode(False):  # as the inputs: a graph may need them
        return tuple(v.clone() if isinstance(v, Tensor) and v.is_inference() else v for v in given)


def entries_per_feature(feature_mask: Any, x: Tensor) -> Tensor | None:
    """How many entries of an input (N, …) belong to the feature of each, shape (1, …) or (N, …).

    None without a mask: each entry is a feature then.
    """
    mask = feature_mask[0] if isinstance(feature_mask, tuple) else feature_mask
    if mask is None:
        return None
    mask = mask if mask.ndim == x.ndim else mask[None]  # one of fewer axes is for all examples
    counts = []
    for row in mask:
        _, feature, sizes = torch.unique(row.expand(x.shape[1:]), return_inverse=True, return_counts=True)
        counts.append(sizes[feature])
    return torch.stack(counts)


def as_captum_target(target: Target) -> Any:
    """A target in a form that Captum itself takes: it knows neither arrays nor all negative numbers.

    Of a list of tuples Captum takes any index of an output, of a list of numbers only those from 0 on.
    """
    target = as_listed(target)
    if target is None or callable(target) or isinstance(target, tuple):
        return target
    if isinstance(target, list) and target and isinstance(target[0], tuple):
        return target
    numbers = torch.as_tensor(target).reshape(-1).tolist()
    return numbers[0] if len(numbers) == 1 else [(number,) for number in numbers]


def for_own_arguments(method: Attribution, request: Request) -> Attribution:
    """The method, with a model that gets the additional arguments as they are, in copies of its own.

    To be used inside `guarded`, which gives a module its own `forward` back.
    """
    if not request.args:
        return method
    if isinstance(request.forward, nn.Module):
        forward = request.forward.forward
        # Not in a hook: that of DeepLift on the model, which repeats the arguments, would come after it.
        vars(request.forward)["forward"] = lambda *args: forward(*own_arguments(request, args))
        return method
    return of_function(method, lambda *args: request.forward(*own_arguments(request, args)))


def own_arguments(request: Request, args: Sequence[Any]) -> tuple[Any, ...]:
    """What the forward function is to get of the inputs and additional arguments that Captum hands to it.

    Captum repeats all arguments with the inputs, also those that are the same for all examples. And it hands
    the same ones to every forward pass, while a model may work in place on them.
    """
    n_inputs = len(request.inputs)
    further = zip(args[n_inputs:], request.args, request.has_batch_axis, strict=True)
    return copies((*args[:n_inputs], *(given if batched else own for given, own, batched in further)))


def of_function(method: Attribution, forward: Callable[..., Tensor]) -> Attribution:
    """A copy of the method that explains another function, also inside of a `NoiseTunnel`."""
    method = copy.copy(method)
    method.forward_func = forward
    if isinstance(method, NoiseTunnel):
        method.attribution_method = of_function(method.attribution_method, forward)
    return method
