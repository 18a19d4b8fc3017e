"""`DisentangledAttribution`: any Captum attributor, split into K concepts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from captum.attr import LRP, Attribution, DeepLift, InputXGradient, NoiseTunnel
from drsa_core import Explanation, Losses, Subspaces, model_fingerprint
from drsa_core.explainer import Explainer, check_subspaces, single_input
from drsa_core.fingerprint import function_digest
from drsa_core.layer import (
    BackwardPass,
    ContextMethod,
    GradientContext,
    Inputs,
    Request,
    copies,
    eager,
    find_layer,
    guarded,
    warn_of_training,
    with_batch_axes,
)
from drsa_core.parameters import as_int
from drsa_core.provenance import describe_target
from drsa_core.target import Target
from drsa_core.validation import check_finite
from torch import Tensor, nn

from ._captum import draw_baselines, logged, rules_on
from .context import ShapleyContext, measure_bypass
from .explain import explain_at_input
from .lrp import LRPPass
from .methods import Explain, choose_context, record_of, within_tunnels
from .relevance_model import RelevanceModel, baseline_relevance

_T = TypeVar("_T")


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
        `Lime`, `FeatureAblation` or `Occlusion`.
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
    >>> da = DisentangledAttribution(IntegratedGradients(model), layer="features.22")  # doctest: +SKIP
    >>> da.fit(loader, target=430, solver=DRSA(n_subspaces=4))                         # doctest: +SKIP
    >>> maps = da.attribute(x, target=430, n_steps=10)        # (N, 4, 3, 224, 224)    # doctest: +SKIP
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
        self._model = _module_of(self.forward_func)
        self._forward: Callable[..., Any] = self.forward_func
        if isinstance(self.forward_func, nn.Module) and self._model is not None:
            self._forward = self._model  # of a compiled module, the one that hooks can reach
        if self._model is not None:
            self.layer_name, self.layer = find_layer(self._model, layer)
        elif isinstance(layer, nn.Module):
            self.layer_name, self.layer = type(layer).__name__, layer
        else:
            raise ValueError(
                f"a layer can be named only if the attributor wraps a module, but its forward function is a "
                f"{type(self.forward_func).__name__}; give the layer as a module"
            )
        self.subspaces = check_subspaces(subspaces)
        self.channel_dim = as_int(channel_dim, "channel_dim")
        self.strict = strict
        self._context_method = choose_context(context_method, attribution_method, self._model, self.layer)
        self._own_context = context_method is None

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
    def attribute(
        self,
        inputs: Inputs,
        *,
        target: Target = None,
        additional_forward_args: Any = None,
        return_convergence_delta: bool = False,
        **kwargs: Any,
    ) -> Any:
        """K maps for each input.

        Parameters
        ----------
        inputs : tensor, shape (N, …), or tuple of such tensors
        target : int, tuple, tensor, list or callable, optional
            One of Captum's forms, or a function from the model's output (n, …), for any n, to the scores
            (n,), e.g. `lambda y: y[:, 3] - y[:, 5]`.
        additional_forward_args : any, optional
            Further arguments of the model, as in Captum.
        return_convergence_delta : bool
            Also return what the maps miss of the exact total relevance of Note B.3, shape (N, K).
        **kwargs
            Keywords of the wrapped `attribute`: `baselines`, `n_steps`, `feature_mask`, …

        Returns
        -------
        tensor, shape (N, K, …), or tuple of such tensors, one for each input
            With `return_convergence_delta`, a pair of that and delta (N, K), with Captum's signs:
            Σ_p R_pk − (φ(x) − φ(x̃))ᵀU_kU_kᵀc, with the mean of φ(x̃) where the baselines are a distribution
            (`GradientShap`, `DeepLiftShap`); for `LRP` R_k − Σ_p R_pk.
        """
        if return_convergence_delta and not self.has_convergence_delta():
            raise ValueError(
                f"{type(self.attribution_method).__name__} has no convergence delta here; exact_totals() "
                "gives the exact total of the maps, and NoiseTunnel(DisentangledAttribution(...)) has a delta"
            )
        self._check_use(target, stacklevel=4)

        def work(request: Request) -> tuple[_Steps, Tensor | None]:
            steps = self._both_steps(request, kwargs)
            return steps, self._delta(request, steps, kwargs) if return_convergence_delta else None

        steps, delta = self._guarded(work, inputs, target, additional_forward_args)
        result = steps.maps if isinstance(inputs, tuple) else steps.maps[0]
        return (result, delta) if return_convergence_delta else result

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
        single_input(inputs)
        args = kwargs.pop("additional_forward_args", None)
        self._check_use(target, stacklevel=4)

        def by_concept(request: Request) -> tuple[_Steps, Tensor, float | None]:
            with torch.no_grad():
                score = request.select(request.forward(*copies(request.inputs), *request.args))
            around = measure_bypass(request)
            return self._both_steps(request, dict(kwargs)), score, around

        steps, score, around = self._guarded(by_concept, inputs, target, args)
        # On its own: Captum's LRP leaves its rules on the model until the guard is left.
        by_itself = None
        if whole:
            by_itself = self._guarded(lambda r: self._whole(r, kwargs), inputs, target, args)
        return Explanation(
            maps=steps.maps[0],
            whole=by_itself,
            concept_relevance=self._relevance(steps.activation, steps.context),
            score=score,
            subspaces=self._fitted(),
            provenance=self._used_for(describe_target(target, tuple_is_index=True)),
            losses=Losses(steps.lost, around),
            # Saliency takes absolute values, of which no sum is that of the parts.
            adds_up_by_pixel=isinstance(self.attribution_method, LRP | InputXGradient)
            and (self._own_context or self._takes_one_pass),
            is_relevance=bool(self.multiplies_by_inputs),
        )

    # ------------------------------------------------------------------ what is known without step 2

    def context(
        self, inputs: Inputs, target: Target = None, additional_forward_args: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Step 1 alone: activations a and contexts c at the layer, shapes (N, …, D, …)."""
        return self._guarded(self._step_1, inputs, target, additional_forward_args)

    def concept_relevance(
        self, inputs: Inputs, target: Target = None, additional_forward_args: Any = None
    ) -> Tensor:
        """Relevance R_k = (U_kᵀa)ᵀ(U_kᵀc) of each concept, summed over positions, shape (N, K)."""
        self._check_use(target, stacklevel=4)
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
        as in the wrapped `attribute`; default 0.
        """
        self._check_use(target, stacklevel=4)

        def total(request: Request) -> Tensor:
            activation, context = self._step_1(request)
            self._check_fits(activation)
            return self._total(request, activation, context, self._drawn(request, baselines))

        return self._guarded(total, inputs, target, additional_forward_args)

    # ------------------------------------------------------------------ the two steps

    def _both_steps(self, request: Request, options: dict[str, Any]) -> _Steps:
        if self._record.explain is None:
            return self._lrp(request, **options)
        if self._takes_one_pass:
            return self._one_pass(request, options)
        return self._two_steps(request, self._record.explain, options)

    def _lrp(self, request: Request, verbose: bool = False) -> _Steps:
        own = None if self._own_context else self._step_1(request)[1]  # before Captum's hooks are there
        backward = LRPPass(self.attribution_method, request, verbose)
        context = backward.context if own is None else own
        self._check_step_1(request, backward.activation, context)
        self._check_fits(backward.activation)
        maps = backward.through(context, self._fitted(), self.channel_dim)
        return _Steps(maps, backward.activation, context, backward.lost)

    def _one_pass(self, request: Request, options: dict[str, Any]) -> _Steps:
        """Step 2 goes on with the forward pass of step 1, as the method asks for no other."""
        backward = BackwardPass(request)
        self._check_step_1(request, backward.activation, backward.context)
        self._check_fits(backward.activation)
        gradients = backward.through(self._fitted(), self.channel_dim)
        maps = explain_at_input(self.attribution_method, request, gradients, options)
        return _Steps(maps, backward.activation, backward.context)

    def _two_steps(self, request: Request, explain: Explain, options: dict[str, Any]) -> _Steps:
        activation, context = self._step_1(request, bool(options.get("show_progress")))
        self._check_fits(activation)
        if "baselines" in options:
            # In place: the convergence delta needs the baselines that were drawn here.
            options["baselines"] = self._drawn(request, options["baselines"])
        model = RelevanceModel(request, context, self._fitted(), self._record.needs_gradient)
        return _Steps(explain(self.attribution_method, request, model, options), activation, context)

    def _delta(self, request: Request, steps: _Steps, options: dict[str, Any]) -> Tensor:
        total = _sum_of_pixels(steps.maps)
        if self._record.explain is None:
            return self._relevance(steps.activation, steps.context) - total
        return total - self._total(request, steps.activation, steps.context, options.get("baselines"))

    def _whole(self, request: Request, options: dict[str, Any]) -> Tensor | None:
        """The map of the wrapped method by itself; None where Captum has none for a callable target."""
        method, target = copy.copy(self.attribution_method), request.target
        if callable(target):
            if isinstance(within_tunnels(method), DeepLift | LRP):
                return None
            method.forward_func, target = lambda *args: request.select(request.forward(*args)), None
        whole: Tensor = method.attribute(
            request.inputs[0].detach().clone(),
            target=target,
            additional_forward_args=request.args or None,
            **options,
        )
        return whole.detach()

    def _step_1(self, request: Request, show_progress: bool = False) -> tuple[Tensor, Tensor]:
        method = self._context_method
        if show_progress and isinstance(method, ShapleyContext):
            method = replace(method, show_progress=True)  # it may take longer than step 2
        activation, context = method(request)
        self._check_step_1(request, activation, context)
        return activation, context

    def _total(self, request: Request, activation: Tensor, context: Tensor, baselines: Any) -> Tensor:
        model = RelevanceModel(request, context, self._fitted())
        with torch.no_grad():
            example = torch.arange(len(request), device=activation.device)
            at_input = model.relevance(activation, example)
            return at_input - baseline_relevance(request, model, baselines, self._record.draws_baselines)

    def _drawn(self, request: Request, baselines: Any) -> Any:
        """Baselines as Captum takes them, drawn now if they are a distribution given as a function."""
        if not self._record.draws_baselines or baselines is None:
            return baselines
        return draw_baselines(baselines, request.inputs if len(request.inputs) > 1 else request.inputs[0])

    @property
    def _takes_one_pass(self) -> bool:
        in_tunnel = isinstance(self.attribution_method, NoiseTunnel)
        return (
            self._record.in_one_pass and not in_tunnel and isinstance(self._context_method, GradientContext)
        )

    # ------------------------------------------------------------------ checks

    def _guarded(self, work: Callable[[Request], _T], inputs: Inputs, target: Target, args: Any) -> _T:
        """`work` on a request, after which the model and its rules are as they were."""
        request = self._request(inputs, target, args)
        if self._model is None:
            return guarded(self.layer, lambda: work(with_batch_axes(request)), is_whole=False)
        warn_of_training(self._model)
        rules = [rule for _, rule in rules_on(self._model)]
        return guarded(self._model, lambda: work(with_batch_axes(request)), rules)

    def _request(self, inputs: Inputs, target: Target, additional_forward_args: Any) -> Request:
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
        for x in tensors:
            if not x.is_floating_point() and self._record.needs_gradient:
                raise TypeError(
                    f"{type(self.attribution_method).__name__} needs floating-point inputs, got {x.dtype}; "
                    "convert images with .float(), and for token numbers pass the embeddings or wrap a "
                    "perturbation method"
                )
        if additional_forward_args is None:
            args: tuple[Any, ...] = ()
        elif isinstance(additional_forward_args, tuple):
            args = additional_forward_args
        else:
            args = (additional_forward_args,)
        with torch.inference_mode(False):  # a copy made outside of it can be differentiated
            tensors = tuple(x.clone() if x.is_inference() else x for x in tensors)
        return Request(
            self._forward,
            self.layer,
            self.layer_name,
            tensors,
            target,
            self.channel_dim,
            args,
            (False,) * len(args),
        )

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

    def _check_step_1(self, request: Request, activation: Tensor, context: Tensor) -> None:
        if len(activation) != len(request) or activation.shape != context.shape:
            raise ValueError(
                f"layer {self.layer_name!r} must give an activation (N, …) for the {len(request)} examples "
                f"and the context method a context of its shape, got {tuple(activation.shape)} and "
                f"{tuple(context.shape)}"
            )
        check_finite(activation, f"the activation of layer {self.layer_name!r}")
        check_finite(context, f"the context at layer {self.layer_name!r}")


@dataclass(frozen=True)
class _Steps:
    """What both steps gave: maps (N, K, …), one for each input, and a, c at the layer."""

    maps: tuple[Tensor, ...]
    activation: Tensor
    context: Tensor
    lost: float = 0.0


def _module_of(forward: object) -> nn.Module | None:
    """The module that a forward function is, or whose method it is."""
    owner = getattr(forward, "__self__", forward)
    return eager(owner) if isinstance(owner, nn.Module) else None


def _sum_of_pixels(maps: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([m.reshape(*m.shape[:2], -1).sum(2) for m in maps]).sum(0)
