"""`DisentangledAttribution`: any Captum attributor, split into K concepts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol, Self

import torch
from captum.attr import (
    LRP,
    Attribution,
    DeepLiftShap,
    GradientShap,
    InputXGradient,
    NoiseTunnel,
    Saliency,
)
from drsa_core import DRSA, Pairs, PairStore, Subspaces, find_layer, model_fingerprint
from drsa_core.validation import check_finite
from torch import Tensor, nn

from ._captum import draw_baselines, logged
from .context import ContextMethod, GradientContext, ShapleyContext
from .explain import explain_at_input, explain_by_gradient, explain_by_perturbation, explain_by_surrogate
from .gradient_pass import GradientPass
from .lrp import LRPPass
from .methods import Family, choose_context, family_of, innermost
from .pairs import pairs_from_loader
from .relevance_model import RelevanceModel, baseline_relevance
from .request import Inputs, Request, Target
from .restoration import preserved

_EXPLAIN = {
    Family.GRADIENT: explain_by_gradient,
    Family.PERTURBATION: explain_by_perturbation,
    Family.SURROGATE: explain_by_surrogate,
}


class Solver(Protocol):
    """What `fit` needs of a solver: PRCA, DRSA and the baselines of the core have it."""

    subspaces_: Subspaces

    def fit(self, a: Tensor, c: Tensor) -> Any:
        """Learn `subspaces_` from activations and contexts (N, D)."""


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
    ) -> None:
        self._family = family_of(attribution_method)
        super().__init__(attribution_method.forward_func)
        self.attribution_method = attribution_method
        self._model = _module_of(self.forward_func)
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
        self.channel_dim = channel_dim
        self._context_method = choose_context(context_method, attribution_method, self._model)
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
        subspaces = self._fitted()
        request = self._request(inputs, target, additional_forward_args)
        with preserved(self._model or self.layer):
            if isinstance(self.attribution_method, LRP):
                maps, delta = self._attribute_lrp(request, subspaces, return_convergence_delta, **kwargs)
            elif self._looks_at_the_input_alone and isinstance(self._context_method, GradientContext):
                maps, delta = self._attribute_in_one_pass(request, subspaces, kwargs), None
            else:
                maps, delta = self._attribute_two_steps(request, subspaces, return_convergence_delta, kwargs)
        result = maps if isinstance(inputs, tuple) else maps[0]
        return (result, delta) if return_convergence_delta else result

    # ------------------------------------------------------------------ what is known without step 2

    def context(
        self, inputs: Inputs, target: Target = None, additional_forward_args: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Step 1 alone: activations a and contexts c at the layer, shapes (N, …, D, …)."""
        request = self._request(inputs, target, additional_forward_args)
        with preserved(self._model or self.layer):
            return self._step_1(request)

    def concept_relevance(
        self, inputs: Inputs, target: Target = None, additional_forward_args: Any = None
    ) -> Tensor:
        """Relevance R_k = (U_kᵀa)ᵀ(U_kᵀc) of each concept, summed over positions, shape (N, K)."""
        subspaces = self._fitted()
        activation, context = self.context(inputs, target, additional_forward_args)
        self._check_fits(activation, subspaces)
        relevance = subspaces.relevance(activation, context, self.channel_dim)
        return relevance.movedim(self.channel_dim, 1).flatten(2).sum(2)

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
        subspaces = self._fitted()
        request = self._request(inputs, target, additional_forward_args)
        with preserved(self._model or self.layer):
            activation, context = self._step_1(request)
            self._check_fits(activation, subspaces)
            model = RelevanceModel(request, context, subspaces)
            return self._total(request, model, activation, baselines)

    # ------------------------------------------------------------------ learning the concepts

    def collect(
        self,
        loader: Iterable[Any],
        target: Target,
        positions: int | None = 20,
        random_state: int | None = None,
        progress: bool = False,
        store: PairStore | None = None,
    ) -> Pairs:
        """Pairs (a, c) at random positions of every image of a loader; see `captum_drsa.collect`."""
        if isinstance(target, list) or (isinstance(target, Tensor) and target.numel() > 1):
            raise ValueError(
                "collect takes one target for all batches (an int, a tuple or a function of the output), got "
                f"{len(target)}; collect once for each class, or let the loader give one class at a time"
            )
        parameter = next((self._model or self.layer).parameters(), None)
        return pairs_from_loader(
            lambda inputs: self.context(inputs, target),
            loader,
            positions,
            random_state,
            progress,
            store,
            self.channel_dim,
            None if parameter is None else parameter.device,
        )

    def fit(
        self,
        loader: Iterable[Any],
        target: Target,
        solver: Solver | None = None,
        positions: int | None = 20,
        random_state: int | None = None,
        progress: bool = False,
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
        solver.fit(pairs.a, pairs.c)
        provenance: dict[str, Any] = {
            "backend": "captum",
            "attribution_method": type(self.attribution_method).__name__,
            "layer": self.layer_name,
            "target": target if isinstance(target, int) else getattr(target, "__name__", str(target)),
        }
        if self._model is not None:
            provenance["model"] = model_fingerprint(self._model)
        self.subspaces = solver.subspaces_.with_metadata(**provenance)
        return self

    # ------------------------------------------------------------------ the two steps

    def _attribute_lrp(
        self, request: Request, subspaces: Subspaces, with_delta: bool, verbose: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        own = None if self._own_context else self._step_1(request)[1]  # before Captum's hooks are there
        backward = LRPPass(self.attribution_method, request, verbose)
        context = backward.context if own is None else own
        self._check_step_1(request, backward.activation, context)
        self._check_fits(backward.activation, subspaces)
        maps = backward.through(context, subspaces, self.channel_dim)
        if not with_delta:
            return maps, None
        relevance = subspaces.relevance(backward.activation, context, self.channel_dim)
        return maps, relevance.movedim(self.channel_dim, 1).flatten(2).sum(2) - _sum_of_pixels(maps)

    def _attribute_in_one_pass(
        self, request: Request, subspaces: Subspaces, options: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """Step 2 goes on with the forward pass of step 1, as the method asks for no other."""
        backward = GradientPass(request)
        self._check_step_1(request, backward.activation, backward.context)
        self._check_fits(backward.activation, subspaces)
        gradients = backward.through(subspaces, self.channel_dim)
        return explain_at_input(self.attribution_method, request, gradients, options)

    def _attribute_two_steps(
        self, request: Request, subspaces: Subspaces, with_delta: bool, options: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        activation, context = self._step_1(request, bool(options.get("show_progress")))
        self._check_fits(activation, subspaces)
        if self._baselines_are_a_distribution and "baselines" in options:
            inputs = request.inputs if len(request.inputs) > 1 else request.inputs[0]
            options = {**options, "baselines": draw_baselines(options["baselines"], inputs)}
        model = RelevanceModel(request, context, subspaces, self._family is Family.GRADIENT)
        maps = _EXPLAIN[self._family](self.attribution_method, request, model, options)
        if not with_delta:
            return maps, None
        total = self._total(request, model, activation, options.get("baselines"))
        return maps, _sum_of_pixels(maps) - total

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
            distribution = self._baselines_are_a_distribution
            return at_input - baseline_relevance(request, model, baselines, distribution)

    @property
    def _looks_at_the_input_alone(self) -> bool:
        return isinstance(self.attribution_method, InputXGradient | Saliency)

    @property
    def _baselines_are_a_distribution(self) -> bool:
        return isinstance(innermost(self.attribution_method), GradientShap | DeepLiftShap)

    # ------------------------------------------------------------------ checks

    def _request(self, inputs: Inputs, target: Target, additional_forward_args: Any) -> Request:
        tensors = inputs if isinstance(inputs, tuple) else (inputs,)
        if not tensors or not all(isinstance(x, Tensor) and x.ndim > 0 for x in tensors):
            raise TypeError(
                f"inputs must be a tensor (N, …) or a tuple of tensors, got {type(inputs).__name__}"
            )
        if len({len(x) for x in tensors}) > 1 or not len(tensors[0]):
            raise ValueError(
                "all inputs must have the same number of examples, at least 1, along the first axis, got "
                f"shapes {[tuple(x.shape) for x in tensors]}"
            )
        for x in tensors:
            if not x.is_floating_point() and self._family in (Family.GRADIENT, Family.LRP):
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
        return Request(
            self.forward_func, self.layer, self.layer_name, tensors, args, target, self.channel_dim
        )

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

    def _check_fits(self, activation: Tensor, subspaces: Subspaces) -> None:
        dim, shape = self.channel_dim, tuple(activation.shape)
        if not -len(shape) <= dim < len(shape) or shape[dim] != subspaces.n_features:
            raise ValueError(
                f"the subspaces have {subspaces.n_features} features, but the activation of layer "
                f"{self.layer_name!r} has shape {shape} with the features along dim {dim}; use the layer "
                "that they were learned at, or set channel_dim (-1 for tokens)"
            )


def _module_of(forward: object) -> nn.Module | None:
    """The module that a forward function is, or whose method it is."""
    owner = getattr(forward, "__self__", forward)
    return owner if isinstance(owner, nn.Module) else None


def _sum_of_pixels(maps: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([m.flatten(2).sum(2) for m in maps]).sum(0)
