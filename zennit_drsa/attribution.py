"""`DisentangledAttributor`: K-way attributions from Zennit's attributors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from drsa_core import Explanation, Losses, Pairs, PairStore, Subspaces, model_fingerprint
from drsa_core.checks import as_int
from drsa_core.contexts import IntegratedGradientsContext
from drsa_core.explainer import Explainer, as_subspaces, refuse_noise_on_padding, single_input
from drsa_core.layer import (
    TOLERANCE,
    Inputs,
    Request,
    Split,
    eager,
    find_layer,
    gradients_at_inputs,
    replay_rng,
    warn_of_training,
)
from drsa_core.model_state import held_back, restored
from drsa_core.targets import Target, gradient_at_output, select_scores
from torch import Tensor, nn
from zennit.attribution import Attributor, Gradient, IntegratedGradients, Occlusion, SmoothGrad, constant
from zennit.core import Composite

from ._zennit import (
    describe_canonizers,
    describe_method,
    has_rule,
    holds_relevance,
    register,
    unregister,
)
from .composites import SubspaceFilter, check_signal
from .kept import KeptRelevance, keeps_relevance
from .outputs import (
    AttrOutput,
    ScoreOf,
    checked_start,
    first_nonfinite,
    gradient_of_score,
    is_attr_output,
    is_float,
    scores_as_output,
    targets_in,
    terms_of_score,
)
from .shared_passes import check_differentiable, shared_passes
from .validity import check_carriers, validate


@dataclass(frozen=True)
class _Step1:
    """The model's output, a and c at the layer, and what concept maps cannot hold."""

    output: Tensor
    activation: Tensor
    context: Tensor
    lost: float
    around: float | None


@dataclass(frozen=True)
class _Attribution(_Step1):
    """Step 1, and the maps (N, K, *input)."""

    maps: Tensor


class DisentangledAttributor(Attributor, Explainer):  # type: ignore[misc]
    """A Zennit attributor that returns one map for each concept.

    Parameters
    ----------
    attributor : Gradient, SmoothGrad, IntegratedGradients or Occlusion
        The attributor to wrap, with its model, composite and `attr_output`, or a subclass of these.
    layer : str or module
        The layer whose output is split, or its dotted name.
    subspaces : Subspaces, optional
        The K concepts. Without them, call `fit` first.
    channel_dim : int
        Axis of the D features in the layer's output.
    residual : bool
        Whether to append a map of what the concepts leave over, so that the maps add up to that of the
        wrapped attributor: subspaces not given, relevance on zero activations, paths around the layer.
    two_step : bool, optional
        Explain R̂_k(x) = (U_kᵀφ(x))ᵀ(U_kᵀ[c]) with the context c held constant (Note B). By default so for
        `Occlusion`, and for `IntegratedGradients` without relevance-passing rules. If False, each gradient on
        the path is filtered instead, and the maps add up to those of the wrapped attributor.
    context_steps : int, optional
        Steps of the path from 0 to a that gives the context of `IntegratedGradients` (Note B.2); 100 in the
        paper. Default: as many as each example needs, see `IntegratedGradientsContext`.
    signal, tolerance
        As in `SubspaceFilter`. `tolerance` also bounds what may go around the layer without a warning.
    strict : bool
        Whether subspaces that were learned for another model, layer, target or method are an error instead of
        a `ProvenanceWarning`.
    validated : bool
        Whether to leave out the check that the rules are valid on this model (`zennit_drsa.doctor.validate`),
        which is made once, at the first use.

    Notes
    -----
    The forward pass and the backward pass above the layer run once, only what lies below runs K times, with
    the modified forward passes of Zennit's rules shared (`shared_passes`). Rules that are not linear
    (`ReLUDeconvNet`, `ReLUGuidedBackprop`) let pass what they let pass of the whole.

    Examples
    --------
    >>> attributor = Gradient(model, EpsilonPlusFlat())
    >>> with DisentangledAttributor(attributor, "features.22", subspaces) as attributor:
    ...     output, relevance = attributor(images, one_hot)
    >>> tuple(relevance.shape)  # (N, K, *input)
    (2, 4, 3, 32, 32)
    """

    def __init__(
        self,
        attributor: Attributor,
        layer: str | nn.Module,
        subspaces: Subspaces | None = None,
        *,
        channel_dim: int = 1,
        residual: bool = False,
        two_step: bool | None = None,
        context_steps: int | None = None,
        signal: str | None = None,
        tolerance: float = TOLERANCE,
        strict: bool = False,
        validated: bool = False,
    ) -> None:
        if isinstance(attributor, DisentangledAttributor) or not isinstance(attributor, Gradient | Occlusion):
            raise TypeError(
                "attributor must be Zennit's Gradient, SmoothGrad, IntegratedGradients or Occlusion, "
                f"got {type(attributor).__name__}"
            )
        if not isinstance(attributor.model, nn.Module):
            raise TypeError(f"the attributor's model must be a module, got {type(attributor.model).__name__}")
        if two_step is not None and not isinstance(attributor, IntegratedGradients):
            raise ValueError(
                f"two_step is for IntegratedGradients; {type(attributor).__name__} is done in one way only"
            )
        model, composite = eager(attributor.model), attributor.composite
        super().__init__(model, Composite() if composite is None else composite, attributor.attr_output_fn)
        self.attributor = copy.copy(attributor)
        self.attributor.model = model
        self.layer_name, self.layer = find_layer(model, layer)
        self.subspaces, self.channel_dim = as_subspaces(subspaces), as_int(channel_dim, "channel_dim")
        self.residual, self.two_step = residual, two_step
        self.context_steps = None if context_steps is None else as_int(context_steps, "context_steps", 1)
        self.signal, self.tolerance, self.strict = check_signal(signal), tolerance, strict
        self.validated = validated
        self._registered: restored | None = None
        self._fingerprint: str | None = None
        self._compared: tuple[Any, ...] | None = None  # the use that was last found to fit the subspaces

    # ------------------------------------------------------------------ as Zennit's attributors are called

    @held_back
    def __enter__(self) -> Self:
        warn_of_training(self.model)
        self._fingerprint = model_fingerprint(self.model)  # before canonizers change weights
        registered = restored(
            self.model,
            enter=lambda: register(self.composite, self.model),
            leave=lambda: unregister(self.composite),
        )
        registered.__enter__()
        self._registered = registered
        return self

    @held_back
    def __exit__(self, *error: object) -> None:
        registered, self._registered = self._registered, None
        if registered is not None:
            registered.__exit__(*error)

    def __copy__(self) -> Self:
        copied = object.__new__(type(self))
        copied.__dict__.update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(vars(self), memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "Zennit's composites cannot be pickled, and neither can attributors; save the subspaces by "
            "subspaces.save(path), and wrap an attributor that is made anew"
        )

    def _session(self) -> AbstractContextManager[Any]:
        if self._registered is None:
            return self
        # Ctrl-C may leave a parameter exchanged or a hook behind, and may be caught inside the context.
        # Validation registers the composite anew.
        return restored(self.model, also=self.composite.hook_refs) if self.validated else nullcontext(self)

    def __call__(self, input: Tensor, attr_output: Tensor | AttrOutput | None = None) -> Any:
        """Output of the model and relevance (N, K, *input), (N, K + 1, *input) with the residual."""
        if not (attr_output is None or isinstance(attr_output, Tensor) or callable(attr_output)):
            raise TypeError(
                "attr_output must be a tensor of the output's shape, or a function of the output, got "
                f"{type(attr_output).__name__}; for class 3 of 10 pass torch.eye(10)[[3]]"
            )
        start = self.attr_output_fn if attr_output is None else attr_output
        with self._session():
            return self.forward(input, start if callable(start) else constant(start))

    def forward(self, input: Tensor, attr_output_fn: AttrOutput) -> tuple[Tensor, Tensor]:
        """As `__call__`, inside the attributor's context."""
        with torch.inference_mode(False):
            x, start = self._prepared(input), checked_start(attr_output_fn)
            with replay_rng([x]) if self.residual else nullcontext():
                result = self._attribute(x, start)
            self._check_start(result.output, start, None, x)
            relevance = result.maps
            if self.residual:
                whole = self._whole(x, terms_of_score(start) if self._perturbs else start)
                relevance = torch.cat([relevance, (whole - relevance.sum(1)).unsqueeze(1)], dim=1)
            self._check_finite((result.output, relevance), x, start)
            return result.output, relevance

    # ------------------------------------------------------------------ with a target, as both adapters

    def context(self, input: Inputs, target: Target | AttrOutput) -> tuple[Tensor, Tensor]:
        """Activations a and contexts c at the layer, shapes (N, …, D, …).

        The context is that at the input; for `IntegratedGradients` in two steps, that of the path. Relevance
        starts as the score itself, R = y (Note A), so that Σ aᵀc over all positions of an image is y where
        the rules conserve it.

        Parameters
        ----------
        target : int, list or tensor of int, function of the output
            One output for all examples, one for each, or a function from the output to the scores (N,).
        """
        with self._session(), torch.inference_mode(False):
            x = self._prepared(single_input(input))
            start = self._start(target, len(x))
            step = self._context(x, start, target)
            self._check_finite((step.activation, step.context), x, start)
            return step.activation, step.context

    def concept_relevance(self, input: Inputs, target: Target | AttrOutput = None) -> Tensor:
        """Relevance R_k = (U_kᵀa)ᵀ(U_kᵀc) of each concept, summed over positions, shape (N, K).

        `target` as in `context`, or an `attr_output` as Zennit takes it.
        """
        with self._session(), torch.inference_mode(False):
            x = self._prepared(single_input(input))
            start = self._start(target, len(x))
            step = self._context(x, start, target)
            self._check_start(step.output, start, target, x)
            relevance = self._relevance(step.activation, step.context)
            self._check_finite((step.output, relevance), x, start)
            return relevance

    def explain(self, input: Inputs, target: Target, *, whole: bool = True) -> Explanation:
        """K maps (N, K, *input), with the whole map and what adds up to what.

        One forward pass of the wrapped attributor, and a second one with `whole`.

        Parameters
        ----------
        input : tensor, shape (N, …)
        target
            As in `context`.
        whole : bool
            Whether to compute the map of the wrapped attributor as well, at the price of one more map.
        """
        with self._session(), torch.inference_mode(False):
            x = self._prepared(single_input(input))
            start = self._start(target, len(x))
            with replay_rng([x], whole):
                result = self._attribute(x, start, target)
            self._check_start(result.output, start, target, x)
            whole_map, absorbed = None, None
            if whole and self._perturbs:
                whole_map = self._whole(x, scores_as_output(target))
            elif whole:
                whole_map, absorbed = self._whole_and_absorbed(x, start)
            self._check_finite((result.output, result.maps), x, start)
            return self._explanation(
                x,
                result.activation,
                result.context,
                target,
                maps=result.maps.detach(),
                whole=whole_map,
                score=select_scores(result.output, target, len(x)).detach(),
                losses=Losses(result.lost, result.around),
                adds_up_by_pixel=not (self._perturbs or self._in_two_steps),
                is_relevance=isinstance(self.attributor, IntegratedGradients) or self._passes_relevance,
                absorbed=absorbed,
            )

    # ------------------------------------------------------------------ maps

    def _attribute(self, x: Tensor, start: AttrOutput, target: Any = None) -> _Attribution:
        if self._perturbs:
            return self._occlusion(x, start, target)
        if self._in_two_steps:
            return self._two_steps(x, start, target)
        return self._filtered(x, start)

    def _filtered(self, x: Tensor, start: AttrOutput) -> _Attribution:
        """Every gradient that Zennit's attributor asks for, filtered by concept (section 3)."""
        split: Split | None = None

        def gradient(point: Tensor, start: AttrOutput) -> tuple[Tensor, Tensor]:
            nonlocal split
            split, maps = self._filtered_gradient(point, start)
            return split.output, maps

        if type(self.attributor) is Gradient:
            split, maps = self._filtered_gradient(x, start)
            maps = maps.movedim(0, 1)
        else:
            if isinstance(self.attributor, SmoothGrad):
                refuse_noise_on_padding(self.model, x)
            maps = _by_concept(self.attributor, gradient, self._fitted().n_subspaces, x, start)
            assert split is not None, "an attributor asks for a gradient, the last time at the input"
        keeps_graph = self.attributor.create_graph or self.attributor.retain_graph
        output = split.output if keeps_graph else split.output.detach()
        return _Attribution(output, split.activation, split.context.detach(), split.lost, split.around, maps)

    def _filtered_gradient(self, point: Tensor, start: AttrOutput) -> tuple[Split, Tensor]:
        """The forward pass at a point, and what arrives there through each block, shape (K, N, *input)."""
        create_graph = bool(self.attributor.create_graph)
        if create_graph:
            check_differentiable(self.composite.hook_refs)
        with shared_passes(self.model, create_graph) as start_pass:
            split = self._split(point, start, create_graph)
            if not start_pass.is_linear:  # the signs of the whole decide for all passes
                start_pass()
                split.below(split.arriving)
            maps = []
            for part in split.cotangents(self._fitted(), self.channel_dim):
                start_pass()
                maps.append(split.below(part)[0])
        return split, torch.stack(maps)

    def _two_steps(self, x: Tensor, start: AttrOutput, target: Any) -> _Attribution:
        """Step 2 of Integrated Gradients (Note B): Zennit's own path, with ∂R̂_k/∂x as the gradients."""
        if self._passes_relevance:
            raise ValueError(
                "IntegratedGradients in two steps integrate gradients, but the composite has rules that pass "
                "relevance; leave two_step at None, or use a composite without such rules"
            )
        step = self._context(x, start, target)
        parts = self._parts(step.context)

        def gradient(point: Tensor, start: AttrOutput) -> tuple[Tensor, Tensor]:
            point = point.detach().requires_grad_()
            with torch.enable_grad(), shared_passes(self.model) as start_pass:
                activation = self._request(point, None).activation()
                if not start_pass.is_linear:
                    start_pass()
                    self._below(activation, point, step.context)
                maps = []
                for part in parts:
                    start_pass()
                    maps.append(self._below(activation, point, part))
            return step.output, torch.stack(maps)

        maps = _by_concept(self.attributor, gradient, self._fitted().n_subspaces, x, start)
        return _Attribution(**vars(step), maps=maps)

    def _below(self, activation: Tensor, point: Tensor, cotangent: Tensor) -> Tensor:
        return gradients_at_inputs(
            activation, (point,), self.layer_name, cotangent.contiguous(), retain_graph=True
        )[0]

    def _parts(self, context: Tensor) -> list[Tensor]:
        """U_kU_kᵀc of each concept."""
        subspaces = self._fitted()
        return [subspaces.project_context(context, k, self.channel_dim) for k in range(len(subspaces.dims))]

    def _occlusion(self, x: Tensor, start: AttrOutput, target: Any) -> _Attribution:
        """Step 2 of occlusion: Zennit's own loop over the windows, with R̂_k as the output of the model."""
        step = self._context(x, start, target)
        runs: list[Tensor] = []

        def first(occluded: Tensor) -> Tensor:
            with torch.no_grad():
                runs.append(self._relevance(self._request(occluded, None).activation(), step.context))
            return runs[-1][:, :1]

        maps = []
        for k in range(self._fitted().n_subspaces):
            again = iter(runs)
            occlusion = copy.copy(self.attributor)
            occlusion.model = first if k == 0 else lambda _, k=k, again=again: next(again)[:, k : k + 1]
            maps.append(occlusion.forward(x, lambda score: score)[1])
        return _Attribution(**vars(step), maps=torch.stack(maps, dim=1))

    def _whole(self, x: Tensor, start: AttrOutput) -> Tensor:
        whole: Tensor = self.attributor.forward(x.clone(), start)[1]
        return whole.detach()

    def _whole_and_absorbed(self, x: Tensor, start: AttrOutput) -> tuple[Tensor, dict[str, Tensor] | None]:
        """The map of the wrapped attributor, and what does not reach it, where that can be told."""
        in_one_pass = type(self.attributor) is Gradient and self._passes_relevance
        if not (in_one_pass and keeps_relevance(self.model)):
            return self._whole(x, start), None
        absorbed = KeptRelevance(len(x))
        with absorbed.measured(filter(has_rule, self.model.modules())):
            whole = self._whole(x, start)
        return whole, absorbed.by_label()

    # ------------------------------------------------------------------ step 1

    def _context(self, x: Tensor, start: AttrOutput, target: Any) -> _Step1:
        """The model's output, the activation a, its context c, and what concept maps cannot hold."""
        if self._perturbs and not self._passes_relevance:
            start = gradient_of_score(start)
        with shared_passes(self.model):
            split = self._split(x, start)
        activation, context = split.activation, split.context.detach()
        if self._integrates_context:
            is_index = target is not None and not callable(target) and not is_float(target)
            request = self._request(x, target if is_index else ScoreOf(start))
            activation, context = IntegratedGradientsContext(self.context_steps)(request)
        return _Step1(split.output.detach(), activation, context, split.lost, split.around)

    def _split(self, x: Tensor, start: AttrOutput, create_graph: bool = False) -> Split:
        return Split(
            self._request(x, None),
            start=start,
            passes_relevance=self._passes_relevance,
            create_graph=create_graph,
            tolerance=self.tolerance,
        )

    @property
    def _perturbs(self) -> bool:
        return isinstance(self.attributor, Occlusion)

    @property
    def _passes_relevance(self) -> bool:
        return holds_relevance(self.model, self.signal)

    @property
    def _in_two_steps(self) -> bool:
        if not isinstance(self.attributor, IntegratedGradients):
            return False
        return not self._passes_relevance if self.two_step is None else self.two_step

    @property
    def _integrates_context(self) -> bool:
        return self._in_two_steps and not self._passes_relevance

    def _start(self, target: Target | AttrOutput, n_examples: int) -> AttrOutput:
        """What the backward pass begins with: ∂y/∂output, times the output for relevance (Note A).

        A function that returns something of the output's shape is Zennit's `attr_output`, and is that
        already.
        """
        if target is None:
            return checked_start(self.attr_output_fn)
        if is_float(target):
            attr_output: Any = target
            return checked_start(lambda output: attr_output)
        is_relevance = self._passes_relevance

        def start(output: Tensor) -> Tensor:
            if callable(target) and is_attr_output(target, output):
                value: Any = target(output.clone())
                return value
            gradient = gradient_at_output(output, target, n_examples)
            return output.detach() * gradient if is_relevance else gradient

        return checked_start(start)

    # ------------------------------------------------------------------ the protocol of both adapters

    def _prepared(self, input: Tensor) -> Tensor:
        """A copy of the input; the rules are validated at the first use."""
        if not isinstance(input, Tensor) or not input.is_floating_point():
            got = input.dtype if isinstance(input, Tensor) else type(input).__name__
            raise TypeError(
                f"input must be a floating-point tensor, got {got}; token ids have no relevance: explain "
                "word embeddings, as TransformersModel takes them"
            )
        if input.ndim == 0 or not len(input):
            raise ValueError(f"input must hold at least one example, got shape {tuple(input.shape)}")
        if self.signal is None:  # rules may be inactive now
            check_carriers(self.model, self.composite)
        if not self.validated:
            validate(self.model, self.composite, self.layer_name, input, registered=True, signal=self.signal)
            self.validated = True
        return input.detach().clone()

    def _request(self, inputs: Any, target: Target) -> Request:
        return Request(self.model, self.layer, self.layer_name, (inputs,), target, self.channel_dim)

    def _origin(self) -> dict[str, Any]:
        how = "GradientContext()"
        with self._session():  # rules are known once the composite is registered
            if self._integrates_context:
                how = repr(IntegratedGradientsContext(self.context_steps))
            canonizers = [c for c in self.composite.canonizers if not isinstance(c, SubspaceFilter)]
            return {
                "backend": "zennit",
                "method": describe_method(self.model, self.signal, how),
                "canonizers": describe_canonizers(canonizers),
                "layer": self.layer_name,
                "model": self._fingerprint,
            }

    def _known_model(self) -> nn.Module:
        return self.model

    def _check_start(self, output: Tensor, start: AttrOutput, target: Any, x: Tensor) -> None:
        """Compare what is explained with what the subspaces were learned for.

        A target is compared as such, an `attr_output` by the outputs that it starts from.
        """
        if target is None or is_float(target) or (callable(target) and is_attr_output(target, output)):
            target = targets_in(start(output))
        named = target.tolist() if isinstance(target, Tensor | np.ndarray) else target
        used = (self.subspaces, self._fingerprint, named if callable(named) else repr(named))
        if used != self._compared:
            self._check_use(target, x)
            self._compared = used

    def _check_finite(self, values: tuple[Tensor, ...], x: Tensor, start: AttrOutput) -> None:
        for value in values:
            if not torch.isfinite(value).all():
                raise ValueError(f"the relevance is not finite: {first_nonfinite(self.model, x, start)}")


def collect(
    model: nn.Module,
    composite: Composite | Attributor | None,
    layer: str | nn.Module,
    loader: Iterable[Any],
    target: Target | str,
    positions: int | None = 20,
    *,
    channel_dim: int = 1,
    signal: str | None = None,
    random_state: int | None = None,
    progress: bool | None = None,
    store: PairStore | None = None,
    skip_tokens: int = 0,
) -> Pairs:
    """Pairs (a, c) at random positions of every example of a loader (Note E).

    Parameters
    ----------
    composite : Composite, Attributor or None
        The rules, for `Gradient`, or an attributor with its composite; None stands for plain gradients.
    model, layer, channel_dim, signal
        As in `DisentangledAttributor`.
    loader, target, positions, random_state, progress, store, skip_tokens
        As in `DisentangledAttributor.collect`.
    """
    attributor = composite if isinstance(composite, Attributor) else Gradient(model, composite)
    if attributor.model is not model:
        raise ValueError("the attributor was made for another model than the one given")
    wrapped = DisentangledAttributor(attributor, layer, channel_dim=channel_dim, signal=signal)
    return wrapped.collect(loader, target, positions, random_state, progress, store, skip_tokens)


class _Gradients(Gradient):  # type: ignore[misc]
    """Gives the gradients of one concept where a Zennit attributor asks for a gradient."""

    def grad(self, input: Tensor, attr_output_fn: AttrOutput) -> tuple[Tensor, Tensor]:
        pair: tuple[Tensor, Tensor] = self._of_concept(input, attr_output_fn)
        return pair


def _by_concept(
    attributor: Gradient,
    gradient: Callable[[Tensor, AttrOutput], tuple[Tensor, Tensor]],
    n_concepts: int,
    x: Tensor,
    start: AttrOutput,
) -> Tensor:
    """Maps (N, K, *input) by an attributor's own `forward`, run for each concept.

    The gradients (K, N, *input) of all concepts are found in the first run and handed out again in the
    others, which draw the same random numbers. Methods of a subclass run as its author wrote them: `grad` of
    `Gradient` stands behind them in the order of their base classes.
    """
    found: list[tuple[Tensor, Tensor]] = []

    def first(point: Tensor, start: AttrOutput) -> tuple[Tensor, Tensor]:
        output, gradients = gradient(point, start)
        found.append((output, gradients))
        return output, gradients[0]

    kind = type(attributor)
    maps = []
    for k in range(n_concepts):
        again = iter(found)
        copied = copy.copy(attributor)
        copied.__class__ = _Gradients if kind is Gradient else type(kind.__name__, (kind, _Gradients), {})
        copied._of_concept = first if k == 0 else lambda *_, k=k, again=again: _of_concept(next(again), k)
        with replay_rng([x], k + 1 < n_concepts):
            _, of_concept = copied.forward(x, start)
        maps.append(of_concept)
    return torch.stack(maps, dim=1)


def _of_concept(found: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
    output, gradients = found
    return output, gradients[k]
