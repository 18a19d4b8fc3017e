"""`DisentangledAttribution`: any Captum attributor, split into K concepts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import product
from typing import Any

import numpy as np
import torch
from captum import attr
from drsa_core import Explanation, Losses, Pairs, PairStore, Subspaces, model_fingerprint
from drsa_core.checks import as_int, check_finite
from drsa_core.contexts import ContextMethod, GradientContext
from drsa_core.distributed import ALONE, Ranks
from drsa_core.explainer import Explainer, as_subspaces, refuse_noise_on_padding, single_input
from drsa_core.layer import Inputs, Request, Split, eager, find_layer, warn_of_training
from drsa_core.model_state import restored
from drsa_core.provenance import describe_function
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
    by_known_gradient,
    choose_context,
    entries_per_feature,
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


class DisentangledAttribution(attr.Attribution, Explainer):  # type: ignore[misc]  # Captum is not typed for mypy here
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
        attribution_method: attr.Attribution,
        layer: str | nn.Module,
        subspaces: Subspaces | None = None,
        context_method: str | ContextMethod | attr.Attribution | None = None,
        channel_dim: int = 1,
        strict: bool = False,
    ) -> None:
        self._record = record_of(attribution_method)
        super().__init__(attribution_method.forward_func)
        self.attribution_method, self._forward = attribution_method, self.forward_func
        # The module that the forward function is, or whose method it is.
        owner = getattr(self.forward_func, "__self__", self.forward_func)
        self._model = eager(owner) if isinstance(owner, nn.Module) else None
        if self._model is not None and isinstance(self.forward_func, nn.Module):
            self._forward = self._model
        self.layer_name, self.layer = self._found(layer)
        self.subspaces, self.channel_dim = as_subspaces(subspaces), as_int(channel_dim, "channel_dim")
        self.strict = strict
        self._context_method = choose_context(context_method, attribution_method, self._model, self.layer)
        self._own_context = context_method is None
        in_tunnel = isinstance(attribution_method, attr.NoiseTunnel)
        # Step 2 goes on with the forward pass of step 1 where the method asks for no other.
        self._in_one_pass = (
            self._record.in_one_pass and not in_tunnel and isinstance(self._context_method, GradientContext)
        )
        of_context = [getattr(self._context_method, name, None) for name in ("method", "attributor")]
        self._has_hooks = any(
            isinstance(method, attr.LRP | attr.DeepLift)
            for method in (within_tunnels(attribution_method), *of_context)
        )
        if self._record.at_input is not None:
            self._lower_name, self._lower_layer = self._found(attribution_method.layer)
            if self._lower_layer is self.layer:
                raise ValueError(
                    f"the layer method explains layer {self.layer_name!r}, which is the concept layer "
                    "itself; give it a layer below, such as the embedding. What each concept contributes at "
                    "the concept layer is explain(...).position_relevance"
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
        if isinstance(self.attribution_method, attr.NoiseTunnel):
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
            Further arguments of the model. As in Captum, tensors with N rows hold one row for each example;
            anything else is the same for all.
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
        A `custom_attribution_func` of DeepLift's gets multipliers of shape (N, K, …), and inputs and
        baselines of shape (N, 1, …).
        """
        given = self._by_name(args, kwargs) if args else dict(kwargs)
        target, further = given.pop("target", None), _as_tuple(given.pop("additional_forward_args", ()))
        with_delta = given.pop("return_convergence_delta", False)
        if with_delta and not self.has_convergence_delta():
            raise ValueError(
                f"{type(self.attribution_method).__name__} has no convergence delta here; "
                "explain(...).certificate() says what the maps add up to. Where a NoiseTunnel hides that of "
                "its method, put the noise outside: NoiseTunnel(DisentangledAttribution(...))"
            )
        self._check_use(target, inputs, further)
        with torch.inference_mode(False), self._restored():
            request, method, options = self._prepared(inputs, target, further, given)
            steps = self._steps(request, method, options)
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
            name, got = type(self.attribution_method).__name__, twice[0] if twice else f"{len(args)} values"
            raise TypeError(f"after the inputs {name} takes {', '.join(names)}, once each, but got {got}")
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
        further = _as_tuple(kwargs.pop("additional_forward_args", ()))
        self._check_use(target, inputs, further)
        with torch.inference_mode(False), self._restored():
            request, method, options = self._prepared(inputs, target, further, kwargs)
            steps = self._steps(request, method, options)
            if steps.output is None:  # a method that shares no pass with the model does not come by these
                _, score, around = bare_pass(request)
            else:
                score, around = request.scores(steps.output).detach(), steps.around
            entries = None
            if options.get("return_input_shape", True):  # else there is one entry for each feature
                entries = entries_per_feature(options.get("feature_mask"), request.inputs[0])
        whole_map = None
        # Captum's LRP of a function begins otherwise.
        if whole and not (isinstance(method, attr.LRP) and callable(target)):
            with torch.inference_mode(False), self._restored():  # only then LRP's rules are off the model
                request, method, options = self._prepared(inputs, target, further, kwargs)
                x, scores = request.inputs[0].detach().clone(), Network(request)
                x.requires_grad_(self._record.needs_gradient)  # else Captum does it, and warns
                method = for_network(method, scores)
                whole_map = method.attribute(
                    x, additional_forward_args=scores.additional_args, **options
                ).detach()
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
                self.attribution_method, attr.LRP | attr.InputXGradient | attr.LayerGradientXActivation
            )
            and (self._own_context or self._in_one_pass),
            # Windows of Occlusion may overlap; smoothgrad_sq and vargrad are squares.
            is_relevance=self.multiplies_by_inputs
            and not isinstance(self.attribution_method, attr.Occlusion)
            and kwargs.get("nt_type", "smoothgrad") == "smoothgrad",
            entries_per_feature=entries,
        )

    def context(
        self, inputs: Inputs, target: Target = None, additional_forward_args: Any = ()
    ) -> tuple[Tensor, Tensor]:
        """Step 1: activations a and contexts c at the layer, shapes (N, …, D, …)."""
        with torch.inference_mode(False), self._restored():
            request, *_ = self._prepared(inputs, target, _as_tuple(additional_forward_args))
            return self._step_1(request)[:2]

    def concept_relevance(
        self, inputs: Inputs, target: Target = None, additional_forward_args: Any = ()
    ) -> Tensor:
        """Relevance R_k = (U_kᵀa)ᵀ(U_kᵀc) of each concept, summed over positions, shape (N, K)."""
        self._check_use(target, inputs, _as_tuple(additional_forward_args))
        return self._relevance(*self.context(inputs, target, additional_forward_args))

    def exact_totals(
        self,
        inputs: Inputs,
        target: Target = None,
        baselines: Any = None,
        additional_forward_args: Any = (),
    ) -> Tensor:
        """Exact total Σ_p R_pk = (φ(x) − φ(x̃))ᵀU_kU_kᵀc of each map (Note B.3), shape (N, K).

        For methods that conserve, such as Integrated Gradients, DeepLift and the Shapley value. `baselines` x̃
        as in the wrapped `attribute`; default 0. (Those of `LayerFeatureAblation` are outputs of its layer.)
        """
        further = _as_tuple(additional_forward_args)
        self._check_use(target, inputs, further)
        with torch.inference_mode(False), self._restored():
            request, *_ = self._prepared(inputs, target, further, {})
            activation, context, _ = self._step_1(request)
            return self._total(request, activation, context, self._baselines(request, baselines))

    # ------------------------------------------------------------------ the two steps

    def _steps(self, request: Request, method: Any, options: dict[str, Any]) -> _Steps:
        """K maps; to be used inside `_restored`."""
        adds_noise = isinstance(method, attr.GradientShap) and bool(np.any(options.get("stdevs", 0)))
        if adds_noise or isinstance(method, attr.NoiseTunnel):
            for x in request.inputs:
                refuse_noise_on_padding(self._known_model(), x)
        if not (self._in_one_pass or self._record.explain is None):
            activation, context, lost = self._step_1(request, show_progress=options.get("show_progress"))
            model = RelevanceModel(request, context, self._fitted(), self._record.needs_gradient)
            return _Steps(self._record.explain(method, model, options), activation, context, lost)
        if self._in_one_pass:
            split = Split(request)
            output = split.output
        else:
            chosen = None
            if not self._own_context:
                with self._restored():  # Captum's LayerLRP takes the user's rules off the model
                    chosen = self._step_1(request)[1]
            split, output = lrp_split(method, request, **options)
            split.context = split.context if chosen is None else chosen
        self._step_1(request, split)
        maps = split.through(self._fitted(), self.channel_dim)
        if self._in_one_pass:
            maps = by_known_gradient(method, request, maps, options)
        return _Steps(maps, split.activation, split.context, split.lost, split.around, output)

    def _step_1(
        self, request: Request, split: Split | None = None, show_progress: Any = False
    ) -> tuple[Tensor, Tensor, float]:
        """a, c, and the share of the relevance that sits on zero activations; gradients lose none."""
        method, lost = self._context_method, 0.0
        if show_progress and isinstance(method, ShapleyContext):
            method = replace(method, show_progress=True)  # it may take longer than step 2
        if split is not None:
            activation, context, lost = split.activation, split.context, split.lost
        elif isinstance(method, LayerAttributionContext):
            activation, context, lost = method.with_loss(request)
        else:
            activation, context = method(request)
        if len(activation) != len(request) or activation.shape != context.shape:
            raise ValueError(
                f"the context method must give activations (N, …) of layer {self.layer_name!r} for the "
                f"{len(request)} examples and contexts of their shape, got {tuple(activation.shape)} and "
                f"{tuple(context.shape)}"
            )
        check_finite(activation, f"the activation of layer {self.layer_name!r}")
        check_finite(context, f"the context at layer {self.layer_name!r}")
        return activation, context, lost

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
            is_shap = isinstance(within_tunnels(self.attribution_method), attr.GradientShap)
            together = product if is_shap else partial(zip, strict=True)
        with torch.no_grad():
            example = torch.arange(len(request), device=activation.device)
            return model.relevance(activation, example) - model.at_baselines(baselines, together)

    def _baselines(self, request: Request, baselines: Any, is_distribution: bool = False) -> Any:
        """Baselines as Captum takes them, drawn now if they are a distribution given as a function."""
        if self._record.at_input is not None:
            return self._record.at_input.baselines(request.forward, baselines)  # type: ignore[arg-type]
        if self._record.draws_baselines and baselines is not None:
            baselines, is_distribution = draw_baselines(baselines, request.inputs), True
        given = baselines if isinstance(baselines, tuple) else (baselines,)
        for b, x in zip(given if self._record.needs_gradient else (), request.inputs, strict=False):
            shape, wanted = getattr(b, "shape", x.shape), x.shape
            pairs = zip(shape[is_distribution:], wanted[is_distribution:], strict=False)
            if len(shape) != len(wanted) or any(mine not in (1, theirs) for mine, theirs in pairs):
                rows = "any number of rows" if is_distribution else "as many rows, or one"
                raise ValueError(  # Captum would print the whole tensors
                    f"baselines of an input {tuple(wanted)} must have its shape with {rows}, got "
                    f"{tuple(shape)}"
                )
        return baselines

    # ------------------------------------------------------------------ the door

    def _restored(self) -> restored:
        """Context after which the model and its rules are as they were."""
        if self._model is not None:
            rules = [rule for _, rule in rules_on(self._model)]
            return restored(self._model, also=rules, attributes=ATTRIBUTES)
        lower = () if self._record.at_input is None else (self._lower_layer,)
        return restored(self.layer, also=lower, attributes=ATTRIBUTES)

    def _prepared(
        self, inputs: Inputs, target: Target, args: tuple[Any, ...], given: dict[str, Any] | None = None
    ) -> tuple[Request, Any, dict[str, Any]]:
        """What is explained, the method for inputs that explains it, and its keywords; inside `_restored`.

        `given` are the keywords of the wrapped method; None for step 1.
        """
        request = self._request(inputs, target, args)
        is_floating = [x.is_floating_point() for x in request.inputs]
        # At the layer, masks among the inputs are constants.
        fits = any(is_floating) if given is None else all(is_floating)
        if self._record.needs_gradient and self._record.at_input is None and not fits:
            raise TypeError(
                f"{type(self.attribution_method).__name__} needs floating-point inputs, got "
                f"{[x.dtype for x in request.inputs]}; convert images with .float(). For token numbers wrap "
                "a layer method on the embedding, such as LayerIntegratedGradients, or a perturbation "
                "method; pass masks as additional_forward_args"
            )
        warn_of_training(self._known_model())
        if self._has_hooks:
            hand_inputs_on_by_place(self._known_model())
        options, at_input = dict(given or {}), self._record.at_input
        if at_input is not None:
            network = FromLayer(request, self._lower_layer, self._lower_name)
            method = at_input.attributor(self.attribution_method, network)
            return network.request(), method, at_input.options(network, options)
        if "baselines" in options:
            is_distribution = bool(options.get("draw_baseline_from_distrib"))
            options["baselines"] = self._baselines(request, options["baselines"], is_distribution)
        return request, self.attribution_method, options

    def _request(self, inputs: Any, target: Target, args: tuple[Any, ...] = ()) -> Request:
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
        # Tensors of inference mode can be in no graph.
        plain = [v.clone() if isinstance(v, Tensor) and v.is_inference() else v for v in (*tensors, *args)]
        return Request(
            self._forward,
            self.layer,
            self.layer_name,
            tuple(plain[: len(tensors)]),
            as_listed(target),
            self.channel_dim,
            tuple(plain[len(tensors) :]),
        )

    def _origin(self) -> dict[str, Any]:
        method = self._context_method
        is_function = not hasattr(type(method), "__dataclass_fields__")
        return {
            "backend": "captum",
            "method": f"function {describe_function(method)}" if is_function else repr(method),
            "layer": self.layer_name,
            "model": None if self._model is None else model_fingerprint(self._model),
        }

    def _known_model(self) -> nn.Module:
        return self.layer if self._model is None else self._model


def _as_tuple(args: Any) -> tuple[Any, ...]:
    """Additional forward arguments as Captum reads them."""
    return () if args is None else args if isinstance(args, tuple) else (args,)


def collect(
    attribution_method: attr.Attribution,
    layer: str | nn.Module,
    loader: Iterable[Any],
    target: Target | str,
    positions: int | None = 20,
    *,
    context_method: str | ContextMethod | attr.Attribution | None = None,
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
