"""Which Captum methods can be wrapped, and step 2 of Note B with each: K maps at the cost of one."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from captum import attr
from drsa_core import Subspaces, filter_context
from drsa_core.checks import full_precision
from drsa_core.contexts import ContextMethod, GradientContext, IntegratedGradientsContext
from drsa_core.layer import Request, check_fits, eager, replay_rng
from torch import Tensor, nn

from ._captum import Network, for_network
from .contexts import LayerAttributionContext, LRPContext, ShapleyContext
from .embeddings import ABLATION, DEEP_LIFT, GRADIENT, PATH, AtInput, as_tensors

_Images = TypeVar("_Images", Tensor, tuple[Tensor, ...])

# ---------------------------------------------------------------------- the relevance model


class RelevanceModel(Network):
    """x ↦ R̂_k(x) = (U_kᵀφ(x))ᵀ(U_kᵀ[c]): the network up to the layer, read out by the filtered contexts.

    `context` is [c], of shape (N, …, D, …).
    """

    def __init__(
        self, request: Request, context: Tensor, subspaces: Subspaces, has_concept_axis: bool = False
    ) -> None:
        super().__init__(request, has_concept_axis)
        check_fits(context, subspaces.n_features, request.layer_name, request.channel_dim)
        if context.dtype == torch.float16:  # which has no digits left for gradients of 1e-5
            self.scale = 2.0 ** -math.frexp(float(context.abs().amax()))[1]
        # Methods that perturb take differences of outputs, of which half precision leaves a digit or two.
        context = context.detach().to(torch.promote_types(context.dtype, torch.float32))
        filtered = filter_context(context, subspaces, request.channel_dim)  # (K, N, …, D, …)
        self._filtered, self.n_concepts = filtered.transpose(0, 1).flatten(2), len(filtered)

    def of_example(self, i: int) -> RelevanceModel:
        """The relevance model of example i."""
        model = copy.copy(self)
        Network.__init__(model, self.request.example(i), self._has_concept_axis)
        model._filtered = self._filtered[i : i + 1]
        return model

    def read(self, args: tuple[Any, ...], example: Tensor) -> Tensor:
        """R̂_k of every row, shape (n, K)."""
        return self.relevance(self.request.activation(*args), example)

    @full_precision()
    def relevance(self, activation: Tensor, example: Tensor) -> Tensor:
        """R̂_k of activations (n, …, D, …) under the contexts of the examples named, shape (n, K).

        In float32 for half precision.
        """
        rows = activation.flatten(1).to(self._filtered.dtype)
        if len(self._filtered) == 1:
            return rows @ self._filtered[0].T
        # Example by example, so that no context is copied for every row.
        relevance = rows.new_zeros(len(rows), self.n_concepts)
        for i in range(len(self._filtered)):
            relevance[example == i] = rows[example == i] @ self._filtered[i].T
        return relevance

    def at_baselines(
        self, baselines: Any, together: Callable[..., Iterable[tuple[Tensor, ...]]] | None
    ) -> Tensor:
        """R̂_k(x̃) under the context of each example, shape (N, K); the mean if x̃ is a distribution.

        `together` says which rows of the baselines of several inputs make one x̃ then: `zip`, or all
        combinations.
        """
        request, references = self.request, as_tensors(self.request, baselines)
        example = torch.arange(len(request), device=request.inputs[0].device)
        relevance = []
        for part in [references] if together is None else together(*(r.split(1) for r in references)):
            inputs = tuple(r.expand_as(x) for r, x in zip(part, request.inputs, strict=True))
            relevance.append(self.relevance(replace(request, inputs=inputs).activation(), example))
        return torch.stack(relevance).mean(0)


# ---------------------------------------------------------------------- step 2


def by_known_gradient(
    method: Any, request: Request, gradients: tuple[Tensor, ...], options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """K maps by a method that asks for one gradient at the input, which is known: shapes (N, K, …)."""
    attributor = copy.copy(method)
    attributor.gradient_func = lambda *args, **kwargs: gradients
    inputs = tuple(x.detach().unsqueeze(1).requires_grad_() for x in request.inputs)
    maps: Any = attributor.attribute(inputs, **options)
    return tuple(m.detach() for m in maps)


def by_gradient(method: Any, model: RelevanceModel, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """K maps by a gradient method, shapes (N, K, …): one forward pass for K backward passes.

    The inputs get an axis of size 1 for the concepts, and the attributor's `gradient_func` is replaced by one
    that returns gradients (n, K, …). Captum's own code for paths, steps, noise and baselines then broadcasts.
    """
    if "baselines" in options:
        given = options["baselines"]
        every = given if isinstance(given, tuple) else (given,)
        every = tuple(b.unsqueeze(1) if isinstance(b, Tensor) else b for b in every)
        options = {**options, "baselines": every if isinstance(given, tuple) else every[0]}
    inputs = tuple(x.detach().unsqueeze(1).requires_grad_() for x in model.request.inputs)
    maps: Any = for_network(method, model, has_concepts=True).attribute(
        inputs, additional_forward_args=model.additional_args, **options
    )
    return tuple(m.detach() for m in maps)


def by_perturbation(method: Any, model: RelevanceModel, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """K maps by a method that perturbs the input, shapes (N, K, …): one run, as the output is (n, K)."""
    request = model.request
    masks = options.get("feature_mask")
    masks = masks if isinstance(masks, tuple) else (masks,)
    of_examples = any(_has_rows(m, x) for m, x in zip(masks, request.inputs, strict=False))
    if isinstance(method, attr.FeatureAblation) and len(request) > 1 and of_examples:
        # With several outputs Captum's ablation takes one mask for all examples.
        parts = [
            by_perturbation(
                method, model.of_example(i), {key: _rows(v, request.inputs, i) for key, v in options.items()}
            )
            for i in range(len(request))
        ]
        return tuple(torch.cat(maps) for maps in zip(*parts, strict=True))
    inputs = tuple(x.detach() for x in request.inputs)
    with torch.no_grad():
        maps: Any = for_network(method, model).attribute(
            inputs, additional_forward_args=model.additional_args, **options
        )
    # Captum's samplers keep the axes (N, K) of the output, its ablations merge them.
    shape = (len(request), model.n_concepts)
    return tuple(m.reshape(*shape, *x.shape[1:]) for m, x in zip(maps, inputs, strict=True))


def _has_rows(value: Any, x: Tensor) -> bool:
    """Whether a mask or baseline of an input has a row for each example; one of fewer axes is for all."""
    return isinstance(value, Tensor) and value.ndim == x.ndim and len(value) == len(x)


def _rows(value: Any, inputs: tuple[Tensor, ...], i: int) -> Any:
    """The part of an option, one for all inputs or a tuple of them, that belongs to example i."""
    given = value if isinstance(value, tuple) else (value,)
    if len(given) != len(inputs):
        return value
    rows = tuple(v[i : i + 1] if _has_rows(v, x) else v for v, x in zip(given, inputs, strict=True))
    return rows if isinstance(value, tuple) else rows[0]


def by_surrogate(method: Any, model: RelevanceModel, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """K maps by a method that fits a surrogate to one output (KernelShap), shapes (N, K, …).

    The network runs for the first concept only: the others begin with the same random numbers, so that they
    ask for the same perturbations. If they do not (a perturbation that draws from elsewhere), it runs again.
    """
    inputs = tuple(x.detach() for x in model.request.inputs)
    outputs: dict[bytes, Tensor] = {}
    concepts = []
    for k in range(model.n_concepts):

        def output(*args: Any, k: int = k) -> Tensor:
            digest = hashlib.blake2b()  # the perturbed inputs themselves would fill the memory
            for tensor in args:
                digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
            key = digest.digest()
            if key not in outputs:
                outputs[key] = model(*args)
            return outputs[key][:, k]

        attributor = copy.copy(method)
        attributor.forward_func = output
        # The last concept leaves the generators as one run does, those before it as they were.
        with torch.no_grad(), replay_rng(inputs, k + 1 < model.n_concepts):
            maps: Any = attributor.attribute(inputs, additional_forward_args=model.additional_args, **options)
        concepts.append(maps if isinstance(maps, tuple) else (maps,))
    return tuple(torch.stack(parts, dim=1) for parts in zip(*concepts, strict=True))


# ---------------------------------------------------------------------- the table of methods


Explain: TypeAlias = Callable[[attr.Attribution, RelevanceModel, dict[str, Any]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Method:
    """What there is to know about a Captum method.

    Attributes
    ----------
    kind : type
        Subclasses count, unless they have a record of their own.
    explain : function or None
        How it explains the K outputs of the relevance model (step 2). None: LRP, which has no step 2.
    context : type
        Its context method (step 1).
    in_one_pass : bool
        Whether it asks for one gradient at the input only, so that both steps come from one forward pass.
    draws_baselines : bool
        Whether its baselines are a distribution.
    at_input : AtInput or None
        Of a layer method, how it becomes one for inputs. Subclasses of it do not count: what they change
        would be lost.
    """

    kind: type[attr.Attribution]
    explain: Explain | None
    context: Callable[..., ContextMethod]
    in_one_pass: bool = False
    draws_baselines: bool = False
    at_input: AtInput | None = None

    def fits(self, method: object) -> bool:
        """Whether this is the record of a method."""
        if self.at_input is not None:
            return type(method) is self.kind
        inner = attr.LayerAttribution | attr.NeuronAttribution
        return isinstance(method, self.kind) and not isinstance(method, inner)

    @property
    def needs_gradient(self) -> bool:
        """Whether inputs must be floating point. Such methods broadcast over an axis of concepts."""
        return self.explain in (None, by_gradient)

    @property
    def fits_a_tunnel(self) -> bool:
        """Whether the method may stand inside a `NoiseTunnel`, which puts noise on the input."""
        return self.explain is by_gradient and self.at_input is None


# Subclasses stand before the classes that they come from.
METHODS = (
    Method(attr.IntegratedGradients, by_gradient, IntegratedGradientsContext),
    Method(attr.InputXGradient, by_gradient, GradientContext, in_one_pass=True),
    Method(attr.Saliency, by_gradient, GradientContext, in_one_pass=True),
    Method(attr.GradientShap, by_gradient, GradientContext, draws_baselines=True),
    Method(attr.DeepLiftShap, by_gradient, GradientContext, draws_baselines=True),
    Method(attr.DeepLift, by_gradient, GradientContext),
    Method(attr.LRP, None, LRPContext),
    Method(attr.ShapleyValues, by_perturbation, ShapleyContext),
    Method(attr.ShapleyValueSampling, by_perturbation, ShapleyContext),
    Method(attr.Occlusion, by_perturbation, ShapleyContext),
    Method(attr.FeatureAblation, by_perturbation, ShapleyContext),
    Method(attr.KernelShap, by_surrogate, ShapleyContext),
    Method(attr.Lime, by_surrogate, ShapleyContext),
    Method(attr.LayerIntegratedGradients, by_gradient, IntegratedGradientsContext, at_input=PATH),
    Method(attr.LayerGradientXActivation, by_gradient, GradientContext, in_one_pass=True, at_input=GRADIENT),
    Method(attr.LayerDeepLift, by_gradient, GradientContext, at_input=DEEP_LIFT),
    Method(attr.LayerFeatureAblation, by_perturbation, ShapleyContext, at_input=ABLATION),
)


def within_tunnels(method: Any) -> Any:
    """The method inside a `NoiseTunnel`, or the method itself."""
    return within_tunnels(method.attribution_method) if isinstance(method, attr.NoiseTunnel) else method


def record_of(method: object) -> Method:
    """The record of a method, or an error that says which methods can be wrapped."""
    in_tunnel, inner = isinstance(method, attr.NoiseTunnel), within_tunnels(method)
    for record in METHODS:
        if record.fits(inner) and (not in_tunnel or record.fits_a_tunnel):
            return record
    name = f"NoiseTunnel({type(inner).__name__})" if in_tunnel else type(inner).__name__
    hint = "; NoiseTunnel(DisentangledAttribution(...)) takes any of them" if in_tunnel else ""
    tunnels = [record.kind.__name__ for record in METHODS if record.fits_a_tunnel]
    others = [record.kind.__name__ for record in METHODS if not record.fits_a_tunnel]
    raise TypeError(
        f"{name} cannot be split into concepts. These can: {', '.join(tunnels)}, NoiseTunnel around one of "
        f"those; {', '.join(others)}{hint}"
    )


def choose_context(
    choice: str | ContextMethod | attr.Attribution | None,
    method: attr.Attribution,
    model: nn.Module | None,
    layer: nn.Module,
) -> ContextMethod:
    """The context method that the user names, or the one that goes with the attribution method.

    `model` is the module that the attribution method explains, or whose bound method it explains, or None.
    """
    # A bound method may be another function of the model than the one that LRP and layer attributors explain.
    is_bound = model is not None and not isinstance(method.forward_func, nn.Module)
    if choice is None:
        context = record_of(method).context
        return context(within_tunnels(method)) if context is LRPContext else context()
    if choice == "lrp" and model is not None and not is_bound:
        return LRPContext(attr.LRP(model))
    if isinstance(choice, attr.LayerAttribution):
        is_other = choice.layer is not layer or (is_bound and choice.forward_func != method.forward_func)
        context_method: Any = LayerAttributionContext(choice)
    elif isinstance(choice, LRPContext):
        is_other = model is not None and (is_bound or eager(choice.method.model) is not model)
        context_method = choice
    else:
        by_name = {"gradient": GradientContext, "integrated_gradients": IntegratedGradientsContext}
        if isinstance(choice, str) and choice in (*by_name, "shapley"):
            return by_name.get(choice, ShapleyContext)()
        if not callable(choice) or isinstance(choice, type):
            raise ValueError(
                "context_method must be one of 'gradient', 'integrated_gradients', 'shapley' and (if the "
                "attributor wraps a module, not one of its methods) 'lrp', a context object such as "
                f"ShapleyContext(n_samples=100), or a Captum layer attributor, got {choice!r}"
            )
        is_other, context_method = False, choice
    if is_other:
        raise ValueError(
            f"context_method {type(choice).__name__} was made for another model, method of it or layer; make "
            "it with the model and the layer that are explained"
        )
    return context_method


# ---------------------------------------------------------------------- feature masks


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


def patch_mask(inputs: _Images, size: int | tuple[int, int] = 16) -> _Images:
    """Numbers of the patches of images (Note D), for the `feature_mask` of Captum's perturbation methods.

    Parameters
    ----------
    inputs : tensor, shape (N, C, H, W), or tuple of such tensors
        In a tuple the numbers go on counting, so that patches of different images are different features.
    size : int or pair of int
        Height and width of a patch. Patches at the right and lower edge are smaller if need be.

    Returns
    -------
    tensor of int, shape (1, 1, H, W), or tuple of such tensors
        16 × 16 patches of a 224 × 224 image are numbered 0 … 195, row by row.
    """
    height, width = (size, size) if isinstance(size, int) else size
    images: Any = inputs if isinstance(inputs, tuple) else (inputs,)
    if height < 1 or width < 1 or any(image.ndim != 4 for image in images):
        shapes = [tuple(image.shape) for image in images]
        raise ValueError(
            f"inputs must have shape (N, C, H, W) and size be at least 1, got {shapes} and {size}"
        )
    masks: Any = []
    first = 0
    for image in images:
        rows = torch.arange(image.shape[2], device=image.device) // height
        columns = torch.arange(image.shape[3], device=image.device) // width
        masks.append((first + rows[:, None] * (columns[-1] + 1) + columns)[None, None])
        first = int(masks[-1].max()) + 1
    return tuple(masks) if isinstance(inputs, tuple) else masks[0]
