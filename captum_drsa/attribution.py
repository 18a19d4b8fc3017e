"""`DisentangledAttribution`: any Captum attributor, split into K concepts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Self, TypeVar

import torch
from captum.attr import Attribution, NoiseTunnel
from drsa_core import DRSA, Pairs, PairStore, Provenance, Subspaces, check_provenance, model_fingerprint
from drsa_core.collect import collect_pairs
from drsa_core.fingerprint import function_digest
from drsa_core.layer import (
    BackwardPass,
    ContextMethod,
    GradientContext,
    Inputs,
    Request,
    check_fits,
    eager,
    find_layer,
    guarded,
    sum_over_positions,
    warn_of_training,
    with_batch_axes,
)
from drsa_core.parameters import as_int
from drsa_core.provenance import describe_target
from drsa_core.solvers import Solver, learn_subspaces
from drsa_core.target import Target
from drsa_core.validation import check_finite
from torch import Tensor, nn

from ._captum import draw_baselines, logged, rules_on
from .context import ShapleyContext
from .explain import explain_at_input
from .lrp import LRPPass
from .methods import choose_context, record_of
from .relevance_model import RelevanceModel, baseline_relevance

_T = TypeVar("_T")


class DisentangledAttribution(Attribution):  # type: ignore[misc]  # Captum is not typed for mypy here
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
        How step 1 is done. Default: Integrated Gradients from 0 with 100 steps for `IntegratedGradients`;
        LRP for `LRP`; Shapley values of the feature maps, 25 permutations, for methods that perturb the
        input; the gradient for the others. To override it: "gradient", "integrated_gradients", "shapley" or
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
        if subspaces is not None and not isinstance(subspaces, Subspaces):
            raise TypeError(
                f"subspaces must be a drsa_core.Subspaces, got {type(subspaces).__name__}; use "
                "Subspaces(basis, dims), Subspaces.load(path), or the subspaces_ of a fitted solver"
            )
        self.subspaces = subspaces
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
                f"{type(self.attribution_method).__name__} has no convergence delta here; total_relevance() "
                "gives the exact total of the maps, and NoiseTunnel(DisentangledAttribution(...)) has a delta"
            )
        subspaces = self._fitted_for(target)

        def maps_and_delta(request: Request) -> tuple[tuple[Tensor, ...], Tensor | None]:
            if self._record.explain is None:
                return self._attribute_lrp(request, subspaces, return_convergence_delta, **kwargs)
            if self._takes_one_pass:
                return self._attribute_in_one_pass(request, subspaces, kwargs), None
            return self._attribute_two_steps(request, subspaces, return_convergence_delta, kwargs)

        maps, delta = self._guarded(maps_and_delta, inputs, target, additional_forward_args)
        result = maps if isinstance(inputs, tuple) else maps[0]
        return (result, delta) if return_convergence_delta else result

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
        subspaces = self._fitted_for(target)
        activation, context = self.context(inputs, target, additional_forward_args)
        return self._relevance(activation, context, subspaces)

    def total_relevance(
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
        subspaces = self._fitted_for(target)

        def total(request: Request) -> Tensor:
            activation, context = self._step_1(request)
            check_fits(activation, subspaces.n_features, self.layer_name, self.channel_dim)
            model = RelevanceModel(request, context, subspaces)
            return self._total(request, model, activation, self._drawn(request, baselines))

        return self._guarded(total, inputs, target, additional_forward_args)

    # ------------------------------------------------------------------ learning the concepts

    def collect(
        self,
        loader: Iterable[Any],
        target: Target | str,
        positions: int | None = 20,
        random_state: int | None = None,
        progress: bool | None = None,
        store: PairStore | None = None,
    ) -> Pairs:
        """Pairs (a, c) at random positions of every image of a loader; see `captum_drsa.collect`."""
        owner = self.layer if self._model is None else self._model
        parameter = next(owner.parameters(), None)
        return collect_pairs(
            lambda inputs, of_batch: self.context(inputs, of_batch),
            loader,
            target,
            positions=positions,
            random_state=random_state,
            store=store,
            progress=progress,
            device=None if parameter is None else parameter.device,
            channel_dim=self.channel_dim,
            **self._origin(),
        )

    def fit(
        self,
        loader: Iterable[Any],
        target: Target | str,
        solver: Solver | None = None,
        positions: int | None = 20,
        random_state: int | None = None,
        progress: bool | None = None,
        store: PairStore | None = None,
    ) -> Self:
        """Collect pairs from a loader and learn `subspaces` from them.

        Parameters
        ----------
        loader, target, positions, random_state, progress, store
            As in `captum_drsa.collect`.
        solver : PRCA, DRSA, …, optional
            Default `DRSA(n_subspaces=4)`.
        """
        solver = DRSA(n_subspaces=4, random_state=random_state) if solver is None else solver
        pairs = self.collect(loader, target, positions, random_state, progress, store)
        self.subspaces = learn_subspaces(solver, pairs)
        return self

    # ------------------------------------------------------------------ the two steps

    def _attribute_lrp(
        self, request: Request, subspaces: Subspaces, with_delta: bool, verbose: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        own = None if self._own_context else self._step_1(request)[1]  # before Captum's hooks are there
        backward = LRPPass(self.attribution_method, request, verbose)
        context = backward.context if own is None else own
        self._check_step_1(request, backward.activation, context)
        check_fits(backward.activation, subspaces.n_features, self.layer_name, self.channel_dim)
        maps = backward.through(context, subspaces, self.channel_dim)
        if not with_delta:
            return maps, None
        return maps, self._relevance(backward.activation, context, subspaces) - _sum_of_pixels(maps)

    def _attribute_in_one_pass(
        self, request: Request, subspaces: Subspaces, options: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """Step 2 goes on with the forward pass of step 1, as the method asks for no other."""
        backward = BackwardPass(request)
        self._check_step_1(request, backward.activation, backward.context)
        check_fits(backward.activation, subspaces.n_features, self.layer_name, self.channel_dim)
        gradients = backward.through(subspaces, self.channel_dim)
        return explain_at_input(self.attribution_method, request, gradients, options)

    def _attribute_two_steps(
        self, request: Request, subspaces: Subspaces, with_delta: bool, options: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        activation, context = self._step_1(request, bool(options.get("show_progress")))
        check_fits(activation, subspaces.n_features, self.layer_name, self.channel_dim)
        if "baselines" in options:
            options = {**options, "baselines": self._drawn(request, options["baselines"])}
        model = RelevanceModel(request, context, subspaces, self._record.needs_gradient)
        explain = self._record.explain
        if explain is None:
            raise TypeError("LRP is filtered in its backward pass; it has no second step")
        maps = explain(self.attribution_method, request, model, options)
        if not with_delta:
            return maps, None
        total = self._total(request, model, activation, options.get("baselines"))
        return maps, _sum_of_pixels(maps) - total

    def _relevance(self, activation: Tensor, context: Tensor, subspaces: Subspaces) -> Tensor:
        """R_k summed over positions, shape (N, K)."""
        check_fits(activation, subspaces.n_features, self.layer_name, self.channel_dim)
        per_position = subspaces.relevance(activation, context, self.channel_dim)
        return sum_over_positions(per_position, self.channel_dim)

    def _step_1(self, request: Request, show_progress: bool = False) -> tuple[Tensor, Tensor]:
        method = self._context_method
        if show_progress and isinstance(method, ShapleyContext):
            method = replace(method, show_progress=True)  # it may take longer than step 2
        activation, context = method(request)
        self._check_step_1(request, activation, context)
        return activation, context

    def _total(self, request: Request, model: RelevanceModel, activation: Tensor, baselines: Any) -> Tensor:
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
        tensors = tuple(x.detach().clone() if x.is_inference() else x for x in tensors)
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
        """Where pairs and maps of this attributor come from, for their provenance."""
        method = self._context_method
        is_function = not hasattr(type(method), "__dataclass_fields__")
        return {
            "backend": "captum",
            "method": f"function {function_digest(method)}" if is_function else repr(method),
            "layer": self.layer_name,
            "model": None if self._model is None else model_fingerprint(self._model),
        }

    def _fitted_for(self, target: Target) -> Subspaces:
        """The subspaces, compared with what they are going to be used for."""
        subspaces = self._fitted()
        if subspaces.provenance is not None:
            used = Provenance(
                **self._origin(),
                channel_dim=self.channel_dim,
                target=describe_target(target, tuple_is_index=True),
            )
            check_provenance(subspaces.provenance, used, "subspaces", self.strict, stacklevel=4)
        return subspaces

    def _fitted(self) -> Subspaces:
        if self.subspaces is None:
            raise ValueError(
                "there are no subspaces yet: call fit(loader, target), or pass subspaces=Subspaces.load(path)"
            )
        return self.subspaces

    def _check_step_1(self, request: Request, activation: Tensor, context: Tensor) -> None:
        if len(activation) != len(request) or activation.shape != context.shape:
            raise ValueError(
                f"layer {self.layer_name!r} must give an activation (N, …) for the {len(request)} examples "
                f"and the context method a context of its shape, got {tuple(activation.shape)} and "
                f"{tuple(context.shape)}"
            )
        check_finite(activation, f"the activation of layer {self.layer_name!r}")
        check_finite(context, f"the context at layer {self.layer_name!r}")


def _module_of(forward: object) -> nn.Module | None:
    """The module that a forward function is, or whose method it is."""
    owner = getattr(forward, "__self__", forward)
    return eager(owner) if isinstance(owner, nn.Module) else None


def _sum_of_pixels(maps: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([m.reshape(*m.shape[:2], -1).sum(2) for m in maps]).sum(0)
