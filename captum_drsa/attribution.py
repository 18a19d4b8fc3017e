"""`DisentangledAttribution`: any Captum attributor, split into K concepts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from inspect import signature
from itertools import product
from typing import Any

import numpy as np
import torch
from captum.attr import (
    LRP,
    Attribution,
    DeepLift,
    GradientShap,
    InputXGradient,
    LayerGradientXActivation,
    NoiseTunnel,
    Occlusion,
)
from drsa_core import Explanation, Losses, Pairs, PairStore, Subspaces, model_fingerprint
from drsa_core.checks import as_int, check_finite
from drsa_core.contexts import ContextMethod, GradientContext
from drsa_core.distributed import ALONE, Ranks
from drsa_core.explainer import Explainer, as_subspaces, refuse_noise_on_padding, single_input
from drsa_core.fingerprint import function_digest
from drsa_core.layer import Inputs, Request, Split, check_fits, eager, find_layer, warn_of_training
from drsa_core.model_state import restored
from drsa_core.targets import Target, as_listed
from torch import Tensor, nn

from ._captum import (
    ATTRIBUTES,
    Network,
    draw_baselines,
    for_network,
    hand_inputs_on_by_place,
    logged,
    rules_on,
)
from .contexts import LayerAttributionContext, ShapleyContext, bare_pass, lrp_split
from .embeddings import FromLayer
from .methods import (
    RelevanceModel,
    choose_context,
    entries_per_feature,
    explain_at_input,
    record_of,
    within_tunnels,
)


@dataclass(frozen=True)
class _Steps:
    """What both steps give: maps (N, K, …), one for each input, a, c at the layer, and what the maps miss.

    `output` of the model and `around` are None where the method does not come by them.
    """

    maps: tuple[Tensor, ...]
    activation: Tensor
    context: Tensor
    lost: float = 0.0
    around: float | None = None
    output: Any = None


class DisentangledAttribution(Attribution, Explainer):  # type: ignore[misc]  # Captum is not typed for mypy here
    """Wraps a Captum attributor, as `NoiseTunnel` does; `attribute` returns K maps (N, K, *input).

    Step 1 (Note B) finds the context c of the activations at `layer`; step 2 has the wrapped method explain
    R̂_k(x) = (U_kᵀφ(x))ᵀ(U_kᵀ[c]) with [c] constant. For LRP the backward pass is filtered at the layer.
    The model and the wrapped attributor are left as they were.

    Parameters
    ----------
    attribution_method : captum.attr.Attribution
        `IntegratedGradients`, `InputXGradient`, `Saliency`, `GradientShap`, `DeepLift`, `DeepLiftShap`, a
        `NoiseTunnel` around one of these; `LRP`, `ShapleyValueSampling`, `ShapleyValues`, `KernelShap`,
        `Lime`, `FeatureAblation` or `Occlusion`. For inputs without a gradient, such as token numbers, also
        `LayerIntegratedGradients`, `LayerGradientXActivation`, `LayerDeepLift` and `LayerFeatureAblation` on
        a layer below `layer`, such as the embedding: maps then have the shape of its output, (N, K, T, E).
    layer : str or module
        The module whose output is the activation, or its dotted name.
    subspaces : Subspaces, optional
        The concepts. Without them, call `fit` before `attribute`.
    context_method : str, callable or LayerAttribution, optional
        How step 1 is done. Default: Integrated Gradients from 0 for `IntegratedGradients`, with as many
        steps as each example needs for an error of 1 % (`IntegratedGradientsContext(100)`: the paper's); LRP
        for `LRP`; Shapley values of the feature maps, 25 permutations, for methods that perturb the input;
        the gradient for the others. To override it: "gradient", "integrated_gradients", "shapley" or
        "lrp"; an object such as `ShapleyContext(n_samples=100)`; or a Captum layer attributor such as
        `LayerDeepLift`, whose relevance R gives c = R ⊘ a.
    channel_dim : int
        Axis of the features in the activation: 1 for (N, D, H, W), -1 for tokens (N, T, D).
    strict : bool
        Whether subspaces that were learned for another model, layer, target or context method are an error
        instead of a `ProvenanceWarning`.

    Examples
    --------
    >>> method = DisentangledAttribution(IntegratedGradients(model), layer="features.22")
    >>> method = method.fit(loader, target=430, solver=DRSA(n_subspaces=4, random_state=0))
    >>> tuple(method.attribute(images, target=430, n_steps=10).shape)
    (2, 4, 3, 32, 32)
    """

    def __init__(
        self,
        attribution_method: Attribution,
        layer: str | nn.Module,
        subspaces: Subspaces | None = None,
        context_method: str | ContextMethod | Attribution | None = None,
        channel_dim: int = 1,
        strict: bool = False,
    ) -> None:
        self._record = record_of(attribution_method)
        super().__init__(attribution_method.forward_func)
        self.attribution_method = attribution_method
        # The module that the forward function is, or whose method it is.
        owner = getattr(self.forward_func, "__self__", self.forward_func)
        self._model = eager(owner) if isinstance(owner, nn.Module) else None
        is_module = isinstance(self.forward_func, nn.Module)
        self._forward: Callable[..., Any] = self._model if is_module and self._model else self.forward_func
        self.layer_name, self.layer = self._found(layer)
        self.subspaces, self.channel_dim = as_subspaces(subspaces), as_int(channel_dim, "channel_dim")
        self.strict = strict
        self._context_method = choose_context(context_method, attribution_method, self._model, self.layer)
        self._own_context = context_method is None
        if self._record.at_input is not None:
            if not isinstance(attribution_method.layer, nn.Module):
                kind = type(attribution_method.layer).__name__
                raise TypeError(f"the layer method must have one layer, a module, got {kind}")
            self._lower_name, self._lower_layer = self._found(attribution_method.layer)
            if self._lower_layer is self.layer:
                raise ValueError(
                    f"the layer method explains layer {self.layer_name!r}, which is the concept layer itself; give "
                    "it a layer below, such as the embedding. What each concept contributes at the concept layer "
                    "is explain(...).position_relevance"
                )

    def _found(self, layer: str | nn.Module) -> tuple[str, nn.Module]:
        if self._model is not None:
            return find_layer(self._model, layer)
        if isinstance(layer, nn.Module):
            return type(layer).__name__, layer
        raise ValueError(
            "a layer can be named only if the attributor wraps a module, but its forward function is a "
            f"{type(self.forward_func).__name__}; give the layer as a module"
        )

    # ------------------------------------------------------------------ what Captum asks of an attributor

    @property
    def multiplies_by_inputs(self) -> bool:
        """As of the wrapped method."""
        return bool(self.attribution_method.multiplies_by_inputs)

    def has_convergence_delta(self) -> bool:
        """As of the wrapped method, except that a wrapped `NoiseTunnel` has none: its noise is not known."""
        if isinstance(self.attribution_method, NoiseTunnel):
            return False
        return bool(self.attribution_method.has_convergence_delta())

    @logged
    def attribute(self, inputs: Inputs, *args: Any, **kwargs: Any) -> Any:
        """K maps for each input.

        Parameters
        ----------
        inputs : tensor, shape (N, …), or tuple of such tensors
        *args, **kwargs
            Those of the wrapped `attribute`, in its order or by keyword: `baselines`, `n_steps`,
            `feature_mask`, …, among them:
        target : int, tuple, tensor, list or callable, optional
            One of Captum's forms, or a function from the model's output (n, …), for any n, to the scores
            (n,), e.g. `lambda y: y[:, 3] - y[:, 5]`.
        additional_forward_args : any, optional
            Further arguments of the model. As in Captum, tensors with N rows hold one row for each example.
        return_convergence_delta : bool
            Also return what the maps miss of the exact total relevance of Note B.3, shape (N, K).

        Returns
        -------
        tensor, shape (N, K, …), or tuple of such tensors, one for each input
            With `return_convergence_delta`, a pair of that and delta (N, K), with Captum's signs:
            Σ_p R_pk − (φ(x) − φ(x̃))ᵀU_kU_kᵀc, with the mean of φ(x̃) where the baselines are a distribution
            (`GradientShap`, `DeepLiftShap`); for `LRP` R_k − Σ_p R_pk.

        Notes
        -----
        A `custom_attribution_func` of DeepLift's gets multipliers of shape (N, K, …), and inputs and baselines
        of shape (N, 1, …).
        """
        given = self._by_name(args, kwargs)
        target, further = given.pop("target", None), _as_arguments(given.pop("additional_forward_args", None))
        with_delta = given.pop("return_convergence_delta", False)
        if with_delta and not self.has_convergence_delta():
            raise ValueError(self._why_no_delta())
        self._check_use(target, inputs, further)
        with torch.inference_mode(False), self._restored():
            request = self._prepared(inputs, target, further)
            options = self._options(request, given)
            steps = self._steps(request, options)
            delta = self._delta(request, steps, options.get("baselines")) if with_delta else None
        one_map = not isinstance(inputs, tuple) or self._record.at_input is not None
        maps = steps.maps[0] if one_map else steps.maps
        return (maps, delta) if with_delta else maps

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments after the inputs by name, those without one in the order of the wrapped `attribute`."""
        parameters = signature(self.attribution_method.attribute).parameters.values()
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
        twice = sorted(set(names[: len(args)]) & set(kwargs))
        if len(args) > len(names) or twice:
            what = f"{twice[0]!r} twice" if twice else f"{len(args)} arguments after the inputs"
            raise TypeError(
                f"{type(self.attribution_method).__name__} takes {', '.join(names)}, but got {what}"
            )
        return dict(zip(names, args, strict=False)) | kwargs

    # ------------------------------------------------------------------ as both adapters

    def explain(
        self, inputs: Inputs, target: Target = None, *, whole: bool = True, **kwargs: Any
    ) -> Explanation:
        """K maps (N, K, *input), with the whole map and what adds up to what.

        Parameters
        ----------
        inputs : tensor, shape (N, …)
        target
            As in `attribute`.
        whole : bool
            Whether to compute the map of the wrapped method as well, at the price of one more map.
        **kwargs
            As in `attribute`.
        """
        if self._record.at_input is None:
            inputs = single_input(inputs)
        further = _as_arguments(kwargs.pop("additional_forward_args", None))
        self._check_use(target, inputs, further)
        with torch.inference_mode(False), self._restored():
            request = self._prepared(inputs, target, further)
            options = self._options(request, kwargs)
            steps = self._steps(request, options)
            # A method that shares no pass with the model does not come by these.
            if steps.output is None:
                _, score, around = bare_pass(request)
            else:
                score, around = request.scores(steps.output).detach(), steps.around
            entries = None
            if options.get("return_input_shape", True):  # else there is one entry for each feature
                entries = entries_per_feature(options.get("feature_mask"), request.inputs[0])
        whole_map = None
        if whole:
            with (
                torch.inference_mode(False),
                self._restored(),
            ):  # LRP's rules are on the model until it is restored
                request = self._prepared(inputs, target, further)
                whole_map = self._whole(request, self._options(request, kwargs))
        return self._explanation(
            inputs,
            steps.activation,
            steps.context,
            target,
            maps=steps.maps[0],
            whole=whole_map,
            score=score,
            losses=Losses(steps.lost, around),
            # Saliency takes absolute values, of which no sum is that of the parts.
            adds_up_by_pixel=isinstance(
                self.attribution_method, LRP | InputXGradient | LayerGradientXActivation
            )
            and (self._own_context or self._takes_one_pass),
            # Windows of Occlusion may overlap; smoothgrad_sq and vargrad are squares.
            is_relevance=self.multiplies_by_inputs
            and not isinstance(self.attribution_method, Occlusion)
            and kwargs.get("nt_type", "smoothgrad") == "smoothgrad",
            entries_per_feature=entries,
        )

    def context(
        self, inputs: Inputs, target: Target = None, additional_forward_args: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Step 1: activations a and contexts c at the layer, shapes (N, …, D, …)."""
        with torch.inference_mode(False), self._restored():
            # At the layer masks among the inputs are constants.
            request = self._prepared(inputs, target, _as_arguments(additional_forward_args), is_step_1=True)
            return self._step_1(request)[:2]

    def concept_relevance(
        self, inputs: Inputs, target: Target = None, additional_forward_args: Any = None
    ) -> Tensor:
        """Relevance R_k = (U_kᵀa)ᵀ(U_kᵀc) of each concept, summed over positions, shape (N, K)."""
        self._check_use(target, inputs, _as_arguments(additional_forward_args))
        return self._relevance(*self.context(inputs, target, additional_forward_args))

    def exact_totals(
        self,
        inputs: Inputs,
        target: Target = None,
        baselines: Any = None,
        additional_forward_args: Any = None,
    ) -> Tensor:
        """Exact total Σ_p R_pk = (φ(x) − φ(x̃))ᵀU_kU_kᵀc of each map (Note B.3), shape (N, K).

        For methods that conserve, such as Integrated Gradients, DeepLift and the Shapley value. `baselines` x̃
        as in the wrapped `attribute`; default 0. (Those of `LayerFeatureAblation` are outputs of its layer.)
        """
        further = _as_arguments(additional_forward_args)
        self._check_use(target, inputs, further)
        with torch.inference_mode(False), self._restored():
            request = self._prepared(inputs, target, further)
            activation, context, _ = self._step_1(request)
            check_fits(activation, self._fitted().n_features, self.layer_name, self.channel_dim)
            at_input = self._record.at_input
            if at_input is not None:
                baselines = at_input.baselines(request.forward, baselines)  # type: ignore[arg-type]
            else:
                baselines = self._drawn(request, baselines)
            return self._total(request, activation, context, baselines)

    # ------------------------------------------------------------------ the two steps

    def _steps(self, request: Request, options: dict[str, Any]) -> _Steps:
        """K maps from a request; the model is restored afterwards."""
        record, method, subspaces = self._record, self._method_for(request), self._fitted()
        adds_noise = isinstance(method, GradientShap) and bool(np.any(options.get("stdevs", 0)))
        if adds_noise or isinstance(method, NoiseTunnel):
            for x in request.inputs:
                refuse_noise_on_padding(self._known_model(), x)
        if record.explain is None or self._takes_one_pass:
            context = None
            if record.explain is None:
                if not self._own_context:
                    with self._restored():  # Captum's LayerLRP takes the user's rules off the model
                        context = self._step_1(request)[1]
                split, output = lrp_split(method, request, **options)
            else:
                split = Split(request)
                output = split.output
            split.context = split.context if context is None else context
            self._check_step_1(request, split.activation, split.context)
            maps = split.through(subspaces, self.channel_dim)
            if record.explain is not None:
                maps = explain_at_input(method, request, maps, options)
            return _Steps(maps, split.activation, split.context, split.lost, split.around, output)
        activation, context, lost = self._step_1(request, bool(options.get("show_progress")))
        check_fits(activation, subspaces.n_features, self.layer_name, self.channel_dim)
        model = RelevanceModel(request, context, subspaces, record.needs_gradient)
        return _Steps(record.explain(method, model, options), activation, context, lost)

    def _step_1(self, request: Request, show_progress: bool = False) -> tuple[Tensor, Tensor, float]:
        """a, c, and the share of the relevance that sits on zero activations; gradients lose none."""
        method, lost = self._context_method, 0.0
        if show_progress and isinstance(method, ShapleyContext):
            method = replace(method, show_progress=True)  # it may take longer than step 2
        if isinstance(method, LayerAttributionContext):
            activation, context, lost = method.with_loss(request)
        else:
            activation, context = method(request)
        self._check_step_1(request, activation, context)
        return activation, context, lost

    def _check_step_1(self, request: Request, activation: Tensor, context: Tensor) -> None:
        if len(activation) != len(request) or activation.shape != context.shape:
            raise ValueError(
                f"the context method must give activations (N, …) of layer {self.layer_name!r} for the "
                f"{len(request)} examples and contexts of their shape, got {tuple(activation.shape)} and "
                f"{tuple(context.shape)}"
            )
        check_finite(activation, f"the activation of layer {self.layer_name!r}")
        check_finite(context, f"the context at layer {self.layer_name!r}")

    @property
    def _takes_one_pass(self) -> bool:
        """Whether step 2 goes on with the forward pass of step 1, as the method asks for no other."""
        in_tunnel = isinstance(self.attribution_method, NoiseTunnel)
        return (
            self._record.in_one_pass and not in_tunnel and isinstance(self._context_method, GradientContext)
        )

    def _method_for(self, request: Request) -> Any:
        """The wrapped method; of a layer method its counterpart, for a request that has e as its input."""
        if self._record.at_input is None:
            return self.attribution_method
        return self._record.at_input.attributor(self.attribution_method, request.forward)  # type: ignore[arg-type]

    def _options(self, request: Request, given: dict[str, Any]) -> dict[str, Any]:
        """Keywords of the wrapped method as those of `_method_for(request)`, with its baselines drawn."""
        if self._record.at_input is not None:
            return self._record.at_input.options(request.forward, given)  # type: ignore[arg-type]
        if "baselines" not in given:
            return dict(given)
        is_distribution = bool(given.get("draw_baseline_from_distrib"))
        return {**given, "baselines": self._drawn(request, given["baselines"], is_distribution)}

    def _drawn(self, request: Request, baselines: Any, is_distribution: bool = False) -> Any:
        """Baselines as Captum takes them, drawn now if they are a distribution given as a function."""
        if self._record.draws_baselines and baselines is not None:
            baselines, is_distribution = draw_baselines(baselines, request.inputs), True
        # Captum would print the whole tensors.
        pairs = zip(baselines if isinstance(baselines, tuple) else (baselines,), request.inputs, strict=False)
        for b, x in pairs if self._record.needs_gradient else ():
            if isinstance(b, Tensor) and not (
                b.ndim == x.ndim
                and (is_distribution or len(b) in (1, len(x)))
                and all(m in (1, n) for m, n in zip(b.shape[1:], x.shape[1:], strict=True))
            ):
                n = "n" if is_distribution else len(x)
                shapes = f"({n}, {', '.join(map(str, x.shape[1:]))})"
                raise ValueError(
                    f"baselines of an input {tuple(x.shape)} must have the shape {shapes}, or one row, got "
                    f"{tuple(b.shape)}"
                )
        return baselines

    def _whole(self, request: Request, options: dict[str, Any]) -> Tensor | None:
        """The map of the wrapped method; None for LRP of a function, which begins otherwise in Captum."""
        method, scores = self._method_for(request), Network(request)
        if isinstance(method, LRP) and callable(request.target):
            return None
        x = request.inputs[0].detach().clone().requires_grad_(self._record.needs_gradient)
        whole: Tensor = for_network(method, scores).attribute(
            x, additional_forward_args=scores.additional_args, **options
        )
        return whole.detach()

    def _delta(self, request: Request, steps: _Steps, baselines: Any) -> Tensor:
        exact = torch.promote_types(steps.maps[0].dtype, torch.float32)
        of_inputs = [m.reshape(*m.shape[:2], -1).sum(2, dtype=exact) for m in steps.maps]
        total = torch.stack(of_inputs).sum(0)
        if self._record.explain is None:
            return self._relevance(steps.activation, steps.context) - total
        return total - self._total(request, steps.activation, steps.context, baselines)

    def _total(self, request: Request, activation: Tensor, context: Tensor, baselines: Any) -> Tensor:
        model, together = RelevanceModel(request, context, self._fitted()), None
        if self._record.draws_baselines:  # GradientShap draws those of each input by themselves
            is_shap = isinstance(within_tunnels(self.attribution_method), GradientShap)
            together = product if is_shap else zip
        with torch.no_grad():
            example = torch.arange(len(request), device=activation.device)
            return model.relevance(activation, example) - model.at_baselines(baselines, together)

    # ------------------------------------------------------------------ the door

    def _restored(self) -> restored:
        """Context after which the model and its rules are as they were."""
        if self._model is not None:
            rules = [rule for _, rule in rules_on(self._model)]
            return restored(self._model, also=rules, attributes=ATTRIBUTES)
        lower = () if self._record.at_input is None else (self._lower_layer,)
        return restored(self.layer, also=lower, attributes=ATTRIBUTES)

    def _prepared(
        self, inputs: Inputs, target: Target, args: tuple[Any, ...], is_step_1: bool = False
    ) -> Request:
        """What is explained, for a method of inputs; to be used inside `_restored`."""
        request = replace(self._request(inputs, target), args=tuple(map(_outside_inference_mode, args)))
        is_floating = [x.is_floating_point() for x in request.inputs]
        if self._record.needs_gradient and self._record.at_input is None:
            if not (any(is_floating) if is_step_1 else all(is_floating)):
                dtype = next(x.dtype for x in request.inputs if not x.is_floating_point())
                raise TypeError(
                    f"{type(self.attribution_method).__name__} needs floating-point inputs, got {dtype}; convert "
                    "images with .float(). For token numbers wrap a layer method on the embedding, such as "
                    "LayerIntegratedGradients, or a perturbation method; pass masks as additional_forward_args"
                )
        if self._model is not None:
            warn_of_training(self._model)
            of_context = (getattr(self._context_method, name, None) for name in ("method", "attributor"))
            for method in (within_tunnels(self.attribution_method), *of_context):
                hand_inputs_on_by_place(method, self._model)
        if self._record.at_input is None:
            return request
        return FromLayer(request, self._lower_layer, self._lower_name).request()

    def _request(self, inputs: Any, target: Target) -> Request:
        tensors = inputs if isinstance(inputs, tuple) else (inputs,)
        if not tensors or not all(isinstance(x, Tensor) and x.ndim > 0 for x in tensors):
            raise TypeError(
                f"inputs must be a tensor (N, …) or a tuple of tensors, got {type(inputs).__name__}; NumPy arrays and "
                "lists become tensors with torch.as_tensor"
            )
        if len({len(x) for x in tensors}) > 1 or not len(tensors[0]):
            raise ValueError(
                "all inputs must have the same number of examples, at least 1, along the first axis, got shapes "
                f"{[tuple(x.shape) for x in tensors]}"
            )
        tensors = tuple(map(_outside_inference_mode, tensors))
        return Request(
            self._forward, self.layer, self.layer_name, tensors, as_listed(target), self.channel_dim
        )

    def _why_no_delta(self) -> str:
        name, inner = type(self.attribution_method).__name__, within_tunnels(self.attribution_method)
        if inner is not self.attribution_method and inner.has_convergence_delta():
            return (
                f"{name} has no convergence delta here, as its noise is not known; put the noise outside: "
                f"NoiseTunnel(DisentangledAttribution({type(inner).__name__}(...), ...)) has a delta"
            )
        return f"{name} has no convergence delta; explain(...).certificate() says what the maps add up to"

    def _origin(self) -> dict[str, Any]:
        method = self._context_method
        is_function = not hasattr(type(method), "__dataclass_fields__")
        return {
            "backend": "captum",
            "method": f"function {function_digest(method)}" if is_function else repr(method),
            "layer": self.layer_name,
            "model": None if self._model is None else model_fingerprint(self._model),
        }

    def _known_model(self) -> nn.Module:
        return self.layer if self._model is None else self._model


def _as_arguments(additional_forward_args: Any) -> tuple[Any, ...]:
    """Additional forward arguments as a tuple, as Captum reads them."""
    if additional_forward_args is None:
        return ()
    return (
        additional_forward_args if isinstance(additional_forward_args, tuple) else (additional_forward_args,)
    )


def _outside_inference_mode(value: Any) -> Any:
    """A tensor of inference mode as one that a graph may need."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def collect(
    attribution_method: Attribution,
    layer: str | nn.Module,
    loader: Iterable[Any],
    target: Target | str,
    positions: int | None = 20,
    *,
    context_method: str | ContextMethod | Attribution | None = None,
    channel_dim: int = 1,
    random_state: int | None = None,
    progress: bool | None = None,
    store: PairStore | None = None,
    skip_tokens: int = 0,
    ranks: Ranks = ALONE,
) -> Pairs:
    """Pairs (a, c) at random positions of every example of a loader, without an attributor to keep (Note E).

    Parameters
    ----------
    attribution_method, layer, context_method, channel_dim
        As in `DisentangledAttribution`.
    loader, target, positions, random_state, progress, store, skip_tokens, ranks
        As in `DisentangledAttribution.collect`.
    """
    wrapped = DisentangledAttribution(
        attribution_method, layer, context_method=context_method, channel_dim=channel_dim
    )
    return wrapped.collect(loader, target, positions, random_state, progress, store, skip_tokens, ranks)
