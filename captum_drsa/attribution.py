"""`DisentangledAttribution`: any Captum attributor, split into K concepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from captum.attr import LRP, Attribution, InputXGradient, LayerGradientXActivation, NoiseTunnel, Occlusion
from drsa_core import Explanation, Losses, Subspaces, model_fingerprint
from drsa_core.checks import as_int
from drsa_core.explainer import check_subspaces, single_input
from drsa_core.layer import (
    ContextMethod,
    Inputs,
    Request,
    copies,
    eager,
    find_layer,
    guarded,
    inputs_in_place,
    warn_of_training,
    with_batch_axes,
)
from drsa_core.provenance import describe_function, describe_target
from drsa_core.targets import Target, as_listed
from torch import Tensor, nn

from ._captum import logged, modules_with_hooks, rules_on
from .below_layer import FromLayer
from .context import measure_bypass
from .inputs import as_arguments, as_inputs, entries_per_feature
from .methods import choose_context, record_of, within_tunnels
from .steps import Steps, TwoSteps

_T = TypeVar("_T")


class DisentangledAttribution(Attribution, TwoSteps):  # type: ignore[misc]  # Captum is not typed for mypy here
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
        if self._record.at_input is not None:
            self._lower_layer = self._layer_of_method(attribution_method.layer)

    def _layer_of_method(self, layer: object) -> tuple[nn.Module, str]:
        """The layer of a layer method, and how to call it in messages."""
        if not isinstance(layer, nn.Module):
            raise TypeError(f"the layer method must have one layer, a module, got {type(layer).__name__}")
        if self._model is not None:
            name, layer = find_layer(self._model, layer)
        else:
            name = type(layer).__name__
        if layer is self.layer:
            raise ValueError(
                f"the layer method explains layer {name!r}, which is the concept layer itself; give it a "
                "layer below, such as the embedding. What each concept contributes at the concept layer is "
                "explain(...).position_relevance"
            )
        return layer, name

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
            raise ValueError(self._why_no_delta())
        self._check_target(inputs, target, additional_forward_args)

        def work(request: Request) -> tuple[Steps, Tensor | None]:
            options = self._options(request, kwargs)
            steps = self._both_steps(request, options)
            return steps, self._delta(request, steps, options) if return_convergence_delta else None

        steps, delta = self._guarded(work, inputs, target, additional_forward_args)
        one_map = not isinstance(inputs, tuple) or self._record.at_input is not None
        result = steps.maps[0] if one_map else steps.maps
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
        if self._record.at_input is None:
            inputs = single_input(inputs)
        args = kwargs.pop("additional_forward_args", None)
        self._check_target(inputs, target, args)

        def by_concept(request: Request) -> tuple[Steps, Tensor, float | None, Tensor | None]:
            with torch.no_grad():
                score = request.scores(request.forward(*copies((*request.inputs, *request.args))))
            options = self._options(request, kwargs)
            steps = self._both_steps(request, options)
            around = steps.share_around
            entries = None
            if options.get("return_input_shape", True):  # else there is one entry for each feature
                entries = entries_per_feature(options.get("feature_mask"), request.inputs[0])
            return steps, score, measure_bypass(request) if around is None else around, entries

        steps, score, around, entries = self._guarded(by_concept, inputs, target, args)
        # On its own: Captum's LRP leaves its rules on the model until the guard is left.
        by_itself = None
        if whole:
            by_itself = self._guarded(
                lambda r: self._whole(r, self._options(r, kwargs)), inputs, target, args
            )
        return Explanation(
            maps=steps.maps[0],
            whole=by_itself,
            concept_relevance=self._relevance(steps.activation, steps.context),
            score=score,
            subspaces=self._fitted(),
            provenance=self._used_for(describe_target(target, tuple_is_index=True)),
            losses=Losses(steps.lost, around),
            # Saliency takes absolute values, of which no sum is that of the parts.
            adds_up_by_pixel=isinstance(
                self.attribution_method, LRP | InputXGradient | LayerGradientXActivation
            )
            and (self._own_context or self._takes_one_pass),
            # Windows of Occlusion may overlap; smoothgrad_sq and vargrad are squares.
            is_relevance=bool(self.multiplies_by_inputs)
            and not isinstance(self.attribution_method, Occlusion)
            and kwargs.get("nt_type", "smoothgrad") == "smoothgrad",
            entries_per_feature=entries,
            **self._at_positions(inputs, steps.activation, steps.context),
        )

    # ------------------------------------------------------------------ what is known without step 2

    def context(
        self, inputs: Inputs, target: Target = None, additional_forward_args: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Step 1 alone: activations a and contexts c at the layer, shapes (N, …, D, …)."""
        return self._guarded(self._step_1, inputs, target, additional_forward_args, is_step_1=True)

    def concept_relevance(
        self, inputs: Inputs, target: Target = None, additional_forward_args: Any = None
    ) -> Tensor:
        """Relevance R_k = (U_kᵀa)ᵀ(U_kᵀc) of each concept, summed over positions, shape (N, K)."""
        self._check_target(inputs, target, additional_forward_args)
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
        self._check_target(inputs, target, additional_forward_args)

        def total(request: Request) -> Tensor:
            activation, context = self._step_1(request)
            self._check_fits(activation)
            return self._total(request, activation, context, self._drawn(request, baselines))

        return self._guarded(total, inputs, target, additional_forward_args)

    # ------------------------------------------------------------------ checks

    def _check_target(self, inputs: Inputs, target: Target, args: Any) -> None:
        """Compare where the subspaces were made with what they are used for."""
        self._check_use(target, 5, lambda: self._restored(self._request(inputs, None, args, True).n_outputs))

    def _why_no_delta(self) -> str:
        name, inner = type(self.attribution_method).__name__, within_tunnels(self.attribution_method)
        if inner is not self.attribution_method and inner.has_convergence_delta():
            return (
                f"{name} has no convergence delta here, as its noise is not known; put the noise outside: "
                f"NoiseTunnel(DisentangledAttribution({type(inner).__name__}(...), ...)) has a delta"
            )
        return f"{name} has no convergence delta; explain(...).certificate() says what the maps add up to"

    def _guarded(
        self,
        work: Callable[[Request], _T],
        inputs: Inputs,
        target: Target,
        args: Any,
        is_step_1: bool = False,
    ) -> _T:
        """`work` on a request, after which the model and its rules are as they were."""
        given = self._request(inputs, target, args, is_step_1)

        def on_request() -> _T:
            self._put_inputs_in_place()
            request = with_batch_axes(given)
            if self._record.at_input is None:
                return work(request)
            network = FromLayer(request, *self._lower_layer)
            try:
                return work(network.request())
            finally:
                network.release()

        if self._model is not None:
            warn_of_training(self._model)
        return self._restored(on_request)

    def _put_inputs_in_place(self) -> None:
        """For Captum's hooks, those of the method and of the context's; the guard takes these off."""
        if self._model is None:
            return
        of_context = (getattr(self._context_method, name, None) for name in ("method", "attributor"))
        for method in (within_tunnels(self.attribution_method), *of_context):
            inputs_in_place(modules_with_hooks(method, self._model))

    def _restored(self, work: Callable[[], _T]) -> _T:
        """`work()`, after which the model and its rules are as they were."""
        if self._model is None:
            # Modules that are noted as they run have hooks then, if the layer method has put some there.
            known = () if self._record.at_input is None else self._lower_layer[:1]
            return guarded(self.layer, work, known, is_whole=False)
        return guarded(self._model, work, [rule for _, rule in rules_on(self._model)])

    def _request(self, inputs: Inputs, target: Target, args: Any = None, is_step_1: bool = False) -> Request:
        must_be_floating = None
        if self._record.needs_gradient and self._record.at_input is None:
            must_be_floating = "some" if is_step_1 else "all"  # at the layer, masks are constants
        tensors = as_inputs(inputs, type(self.attribution_method).__name__, must_be_floating)
        further = as_arguments(args)
        has_batch_axis = (False,) * len(further)
        return Request(
            self._forward,
            self.layer,
            self.layer_name,
            tensors,
            as_listed(target),
            self.channel_dim,
            further,
            has_batch_axis,
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


def _module_of(forward: object) -> nn.Module | None:
    """The module that a forward function is, or whose method it is."""
    owner = getattr(forward, "__self__", forward)
    return eager(owner) if isinstance(owner, nn.Module) else None
