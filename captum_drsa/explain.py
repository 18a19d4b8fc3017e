"""Step 2 of Note B: Captum methods that explain all K outputs of the relevance model at the cost of one."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from captum.attr import Attribution, DeepLift, FeatureAblation, NoiseTunnel
from drsa_core.layer import Request, drawn_again, gradients_at_inputs
from torch import Tensor

from ._captum import by_concept, call_forward, deep_lift_copy
from .relevance_model import RelevanceModel, args_of_rows


def explain_at_input(
    method: Attribution, request: Request, gradients: tuple[Tensor, ...], options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """K maps by a method that asks for one gradient at the input, which is known: shapes (N, K, …)."""
    attributor = copy.copy(method)
    attributor.gradient_func = lambda *args, **kwargs: gradients
    maps: Any = attributor.attribute(_leaves_with_concept_axis(request), **options)
    return tuple(m.detach() for m in maps)


def explain_by_gradient(
    method: Attribution, request: Request, model: RelevanceModel, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """K maps by a gradient method, shapes (N, K, …): one forward pass for K backward passes.

    The inputs get an axis of size 1 for the concepts, and the attributor's `gradient_func` is replaced by one
    that returns gradients (n, K, …). Captum's own code for paths, steps, noise and baselines then broadcasts.
    """
    inputs = _leaves_with_concept_axis(request)
    if "baselines" in options:
        options = {**options, "baselines": _with_concept_axis(options["baselines"])}
    if options.get("custom_attribution_func") is not None:
        options = {**options, "custom_attribution_func": by_concept(options["custom_attribution_func"])}
    attributor = _for_model(method, model)
    maps: Any = attributor.attribute(inputs, additional_forward_args=args_of_rows(request), **options)
    return tuple(m.detach() for m in maps)


def explain_by_perturbation(
    method: Attribution, request: Request, model: RelevanceModel, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """K maps by a method that perturbs the input, shapes (N, K, …): one run, as the output is (n, K)."""
    if isinstance(method, FeatureAblation) and len(request) > 1 and _has_rows(options, request.inputs):
        # With several outputs Captum's ablation takes one mask for all examples alone.
        return _explain_each(method, request, model, options)
    attributor = copy.copy(method)
    attributor.forward_func = model
    inputs = tuple(x.detach() for x in request.inputs)
    with torch.no_grad():
        maps: Any = attributor.attribute(inputs, additional_forward_args=args_of_rows(request), **options)
    # Captum's samplers keep the axes (N, K) of the output, its ablations merge them.
    shape = (len(request), model.n_concepts)
    return tuple(m.reshape(*shape, *x.shape[1:]) for m, x in zip(maps, inputs, strict=True))


def _has_rows(options: dict[str, Any], inputs: tuple[Tensor, ...]) -> bool:
    masks = options.get("feature_mask")
    masks = masks if isinstance(masks, tuple) else (masks,)
    return any(_is_of_examples(mask, x) for mask, x in zip(masks, inputs, strict=False))


def _is_of_examples(value: Any, x: Tensor) -> bool:
    """Whether a mask or baseline of an input has a row for each example; one of fewer axes is for all."""
    return isinstance(value, Tensor) and value.ndim == x.ndim and len(value) == len(x)


def _explain_each(
    method: Attribution, request: Request, model: RelevanceModel, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """The maps of one example after the other, each with its own rows of the options."""
    parts = []
    for i in range(len(request)):
        of_example = {name: _rows(value, request.inputs, i) for name, value in options.items()}
        alone = request.example(i)
        parts.append(explain_by_perturbation(method, alone, model.of_example(alone, i), of_example))
    return tuple(torch.cat(maps) for maps in zip(*parts, strict=True))


def _rows(value: Any, inputs: tuple[Tensor, ...], i: int) -> Any:
    """The part of an option, one for all inputs or a tuple of them, that belongs to example i."""
    given = value if isinstance(value, tuple) else (value,)
    if len(given) != len(inputs):
        return value
    pairs = zip(given, inputs, strict=True)
    rows = tuple(v[i : i + 1] if _is_of_examples(v, x) else v for v, x in pairs)
    return rows if isinstance(value, tuple) else rows[0]


def explain_by_surrogate(
    method: Attribution, request: Request, model: RelevanceModel, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """K maps by a method that fits a surrogate to one output (KernelShap), shapes (N, K, …).

    The network runs for the first concept only: the others begin with the same random numbers, so that they
    ask for the same perturbations. If they do not (a perturbation that draws from elsewhere), it runs again.
    """
    attributor = copy.copy(method)
    attributor.forward_func = recording = _Recording(model)
    inputs = tuple(x.detach() for x in request.inputs)
    concepts = []
    for k in range(model.n_concepts):
        recording.concept = k
        # The last concept leaves the generators as one run does, those before it as they were.
        with torch.no_grad(), drawn_again(inputs, k + 1 < model.n_concepts):
            maps: Any = attributor.attribute(inputs, additional_forward_args=args_of_rows(request), **options)
        concepts.append(maps if isinstance(maps, tuple) else (maps,))
    return tuple(torch.stack(parts, dim=1) for parts in zip(*concepts, strict=True))


class _Recording:
    """Output `concept` of the model, which runs once for the same tensors."""

    def __init__(self, model: RelevanceModel) -> None:
        self._model = model
        self._outputs: dict[bytes, Tensor] = {}
        self.concept = 0

    def __call__(self, *args: Any) -> Tensor:
        key = _digest(args)
        if key not in self._outputs:
            self._outputs[key] = self._model(*args)
        return self._outputs[key][:, self.concept]


def _digest(args: tuple[Any, ...]) -> bytes:
    """A hash of the tensors among the arguments: the perturbed inputs themselves would fill the memory."""
    digest = hashlib.blake2b()
    for tensor in args:
        if isinstance(tensor, Tensor):
            digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _leaves_with_concept_axis(request: Request) -> tuple[Tensor, ...]:
    return tuple(x.detach().unsqueeze(1).requires_grad_() for x in request.inputs)


def _with_concept_axis(baselines: Any) -> Any:
    if isinstance(baselines, tuple):
        return tuple(_with_concept_axis(baseline) for baseline in baselines)
    return baselines.unsqueeze(1) if isinstance(baselines, Tensor) else baselines


def _for_model(method: Attribution, model: RelevanceModel) -> Attribution:
    """A copy of the attributor that explains `model` in all concepts; the user's own stays as it is."""
    if isinstance(method, NoiseTunnel):
        tunnel = copy.copy(method)
        tunnel.attribution_method = _for_model(method.attribution_method, model)
        tunnel.forward_func = model
        return tunnel
    attributor = deep_lift_copy(method, model) if isinstance(method, DeepLift) else copy.copy(method)
    attributor.forward_func = model
    attributor.gradient_func = _joint_gradients(model)
    return attributor


def _joint_gradients(model: RelevanceModel) -> Callable[..., tuple[Tensor, ...]]:
    """A replacement for Captum's gradient function: gradients of all R̂_k, shapes (n, K, …)."""

    def gradient_func(
        forward_fn: Callable[..., Any],
        inputs: tuple[Tensor, ...],
        target_ind: object = None,
        additional_forward_args: object = None,
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            relevance = call_forward(forward_fn, inputs, additional_forward_args)
            n_concepts = relevance.shape[1]
            # DeepLift's backward hooks use up what its forward hooks have left on the modules.
            kept = [
                (module, module.input, module.output)
                for module in model.modules()
                if hasattr(module, "input") and hasattr(module, "output")
            ]
            gradients = []
            for k in range(n_concepts):
                for module, before, after in kept:
                    module.input, module.output = before, after
                gradients.append(
                    gradients_at_inputs(
                        relevance[:, k].sum(), inputs, model.layer_name, retain_graph=k + 1 < n_concepts
                    )
                )
        return tuple(torch.cat(parts, dim=1) for parts in zip(*gradients, strict=True))

    return gradient_func
