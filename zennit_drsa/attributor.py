"""`DisentangledAttributor`: K-way attributions from Zennit's attributors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from drsa_core import Explanation, Losses, Pairs, Subspaces, model_fingerprint
from drsa_core.checks import as_int
from drsa_core.explainer import check_subspaces, single_input
from drsa_core.layer import (
    TOLERANCE,
    Inputs,
    drawn_again,
    eager,
    find_layer,
    guarded,
    uninterrupted,
    warn_of_training,
)
from drsa_core.provenance import describe_target
from drsa_core.targets import Target, select_scores
from torch import Tensor, nn
from zennit.attribution import Attributor, Gradient, IntegratedGradients, Occlusion

from ._zennit import check_uncovered, holds_relevance
from .composite import GuardedComposite
from .concept_maps import ConceptMaps
from .explained import (
    AttrOutput,
    ScoreOf,
    checked_attr_output,
    checked_start,
    is_attr_output,
    scores_as_output,
    start_of_target,
    targets_in,
)
from .nonfinite import check_finite
from .reuse import refused_second_runs

_T = TypeVar("_T")


class DisentangledAttributor(ConceptMaps, Attributor):  # type: ignore[misc]
    """A Zennit attributor that returns one map for each concept.

    Parameters
    ----------
    attributor : Gradient, SmoothGrad, IntegratedGradients or Occlusion
        The attributor to wrap, with its model, composite and `attr_output`.
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
        paper. Default: as many as each example needs for an error of 1 %, see `IntegratedGradientsContext`.
    chunk : int, optional
        Number of concepts to handle at a time; bounds the memory for large K. Default: all at once.
    slot, tolerance
        As in `SubspaceFilter`. `tolerance` also bounds what may go around the layer without a warning.
    strict : bool
        Whether subspaces that were learned for another model, layer, target or method are an error instead of
        a `ProvenanceWarning`.

    Notes
    -----
    The forward pass and the backward pass above the layer run once, only what lies below runs K times, with
    the modified forward passes of Zennit's rules shared (`passes`). Rules that are not linear
    (`ReLUDeconvNet`, `ReLUGuidedBackprop`) let pass what they let pass of the whole. With canonizers that
    do not say `keeps_output`, the first call also runs the untouched model on one example, and refuses those
    that change its output.

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
        chunk: int | None = None,
        slot: str | None = None,
        tolerance: float = TOLERANCE,
        strict: bool = False,
    ) -> None:
        if isinstance(attributor, DisentangledAttributor) or not isinstance(attributor, Gradient | Occlusion):
            raise TypeError(
                "attributor must be Zennit's Gradient, SmoothGrad, IntegratedGradients or Occlusion, "
                f"got {type(attributor).__name__}"
            )
        _check_own_methods(attributor)
        if slot not in (None, "relevance", "gradient"):
            raise ValueError(f"slot must be 'relevance', 'gradient' or None, got {slot!r}")
        if two_step and not isinstance(attributor, IntegratedGradients | Occlusion):
            raise ValueError(
                f"two_step is for IntegratedGradients and Occlusion; with {type(attributor).__name__} both "
                "steps are one backward pass"
            )
        if two_step is False and isinstance(attributor, Occlusion):
            raise ValueError("Occlusion has no backward pass to filter; leave two_step at None")
        if not isinstance(attributor.model, nn.Module):
            raise TypeError(f"the attributor's model must be a module, got {type(attributor.model).__name__}")
        model = eager(attributor.model)
        super().__init__(model, GuardedComposite(attributor.composite), attributor.attr_output_fn)
        self.attributor = copy.copy(attributor)
        self.attributor.model = model
        self.layer_name, self.layer = find_layer(model, layer)
        self.subspaces, self.channel_dim = check_subspaces(subspaces), as_int(channel_dim, "channel_dim")
        self.residual, self.two_step = residual, two_step
        self.context_steps = None if context_steps is None else as_int(context_steps, "context_steps", 1)
        self.chunk = None if chunk is None else as_int(chunk, "chunk", 1)
        self.slot, self.tolerance, self.strict = slot, tolerance, strict
        self._keeps_output = False
        self._fingerprint: str | None = None

    # ------------------------------------------------------------------ as Zennit's attributors are called

    @uninterrupted
    def __enter__(self) -> Self:
        self._look_at_model()
        super().__enter__()
        return self

    def _look_at_model(self) -> None:
        """To be done before the composite is registered, which may change weights."""
        self._fingerprint = model_fingerprint(self.model)
        warn_of_training(self.model)

    @uninterrupted
    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)

    def __call__(self, input: Tensor, attr_output: Tensor | AttrOutput | None = None) -> Any:
        """Output of the model and relevance (N, K, *input), (N, K + 1, *input) with the residual."""
        _check_input(input)
        call, attr_output = super().__call__, checked_attr_output(attr_output)
        return self._in_context(lambda: call(input, attr_output))

    def forward(self, input: Tensor, attr_output_fn: AttrOutput) -> tuple[Tensor, Tensor]:
        """As `__call__`, inside of the attributor's context."""
        start = checked_start(attr_output_fn)
        return self._registered(lambda input: self._explain(input, start), input)

    # ------------------------------------------------------------------ with a target, as both adapters

    def context(self, input: Inputs, target: Target) -> tuple[Tensor, Tensor]:
        """Activations a and contexts c at the layer, shapes (N, …, D, …).

        The context is that at the input; for `IntegratedGradients` in two steps, that of the path. Relevance
        starts as the score itself, R = y (Note A), so that Σ aᵀc over all positions of an image is y where
        the rules conserve it.

        Parameters
        ----------
        target : int, list or tensor of int, function of the output
            One output for all images, one for each, or a function from the output to the scores (N,).
        """

        def pair(input: Tensor) -> tuple[Tensor, Tensor]:
            start, scores = self._explained(target, len(input))
            step = self._context(input, start, scores)
            for found in (step.activation, step.context):
                check_finite(found, self.model, input, start)
            return step.activation, step.context

        return self._registered(pair, single_input(input))

    def concept_relevance(self, input: Inputs, target: Target | AttrOutput = None) -> Tensor:
        """Relevance R_k = (U_kᵀa)ᵀ(U_kᵀc) of each concept, summed over positions, shape (N, K).

        `target` as in `context`, or an `attr_output` as Zennit takes it.
        """

        def relevance(input: Tensor) -> Tensor:
            start, scores = self._explained(target, len(input))
            step = self._context(input, start, scores)
            self._check_start(step.output, start, target)
            result = self._relevance(step.activation, step.context)
            check_finite(result, self.model, input, start)
            return result

        return self._registered(relevance, single_input(input) if isinstance(input, tuple) else input)

    def explain(self, input: Inputs, target: Target, *, whole: bool = True) -> Explanation:
        """K maps (N, K, *input), with the whole map and what adds up to what.

        Parameters
        ----------
        input : tensor, shape (N, …)
        target
            As in `context`.
        whole : bool
            Whether to compute the map of the wrapped attributor as well, at the price of one more map.
        """

        def explanation(input: Tensor) -> Explanation:
            start, scores = self._explained(target, len(input))
            step = self._context(input, start, scores)
            self._check_start(step.output, start, target)
            with drawn_again([input], whole):
                maps = self._maps(input, start)[1].movedim(0, 1)
            explained = start
            if isinstance(self.attributor, Occlusion):  # which sums what it is given over the outputs
                explained = scores_as_output(target)
            by_itself, kept = self._whole_and_kept(input, explained) if whole else (None, None)
            check_finite(maps, self.model, input, start)
            integrates = isinstance(self.attributor, IntegratedGradients)
            return Explanation(
                maps=maps.detach(),
                whole=by_itself,
                concept_relevance=self._relevance(step.activation, step.context),
                score=select_scores(step.output, target, len(input)),
                subspaces=self._fitted(),
                provenance=self._used_for(describe_target(target, tuple_is_index=True)),
                losses=Losses(step.lost, step.share_around),
                adds_up_by_pixel=not self._in_two_steps,
                is_relevance=integrates or holds_relevance(self.model, self.slot),
                kept=kept,
                **self._at_positions(input, step.activation, step.context),
            )

        return self._registered(explanation, single_input(input))

    def collect(self, *args: Any, **kwargs: Any) -> Pairs:
        """Pairs (a, c) at random positions of every image of a loader; see `zennit_drsa.collect`."""
        collect = super().collect
        return self._in_context(lambda: collect(*args, **kwargs))

    def _explain(self, input: Tensor, start: AttrOutput) -> tuple[Tensor, Tensor]:
        with drawn_again([input], self.residual):
            output, maps = self._maps(input, start)
        self._check_start(output, start, None)
        relevance = maps.movedim(0, 1)
        if self.residual:
            whole = self._whole(input, self._terms_of_score(start))
            relevance = torch.cat([relevance, (whole - relevance.sum(1)).unsqueeze(1)], dim=1)
        check_finite(relevance, self.model, input, start)
        return output, relevance

    # ------------------------------------------------------------------ parts

    def _registered(self, work: Callable[[Tensor], _T], input: Tensor) -> _T:
        """`work(input)` with the composite registered."""
        _check_input(input)

        def once() -> _T:
            refused_second_runs(self.model).watch()  # the guard takes its hooks off
            return work(input.detach().clone())

        def checked() -> _T:
            self.composite.check_slot(self.model, self.slot)
            if self.slot is None:
                check_uncovered(self.model, self.layer_name)
            self._check_canonizers(input)
            return guarded(self.model, once)

        return self._in_context(checked)

    def _in_context(self, work: Callable[[], _T]) -> _T:
        """`work()` inside of the attributor's context, be it the user's or one for this call."""
        if self.composite.handles:
            return work()
        self._look_at_model()
        return self.composite.registered(self.model, work)

    def _explained(self, target: Target | AttrOutput, n_examples: int) -> tuple[AttrOutput, Target]:
        """What the gradient slot holds at the output, and the scores that are explained."""
        if target is None:
            start = checked_start(self.attr_output_fn)
        elif isinstance(target, Tensor) and target.is_floating_point():
            attr_output = target
            start = checked_start(lambda output: attr_output)
        else:
            start = start_of_target(target, holds_relevance(self.model, self.slot), n_examples)
            if not callable(target):
                return start, target
        return start, ScoreOf(start)

    # ------------------------------------------------------------------ checks

    def _origin(self) -> dict[str, Any]:
        # Inside of the context: rules are known once the composite is registered.
        return self._in_context(
            lambda: {
                "backend": "zennit",
                "method": self._method(),
                "canonizers": self.composite.canonizers_described(),
                "layer": self.layer_name,
                "model": self._fingerprint,
            }
        )

    def _known_model(self) -> nn.Module:
        return self.model

    def _check_start(self, output: Tensor, start: AttrOutput, target: Target | AttrOutput) -> None:
        """Compare what is explained with what the subspaces were learned for.

        A target is compared as such, an `attr_output` by the outputs that it starts from.
        """
        made = self._fitted().provenance
        if made is None:
            return
        is_same = callable(target) and made.target == describe_target(target)
        explained: Any = target
        if not is_same and is_attr_output(target, output):
            explained = targets_in(start(output))
        self._check_use(explained, 7, lambda: output.shape[1] if output.ndim == 2 else None)

    def _check_canonizers(self, input: Tensor) -> None:
        """Compare the first forward pass with that of the untouched model: a canonizer may not fit it."""
        if self._keeps_output or not len(input) or not self.composite.may_change_output:
            return
        is_training = any(module.training for module in self.model.modules())
        with torch.no_grad(), torch.inference_mode(False):
            example = input.detach()[:1].clone()
            canonized = self.model(example.clone())
            self.composite.remove()
            try:
                untouched = guarded(self.model, lambda: self.model(example))
            finally:
                self.composite.register(self.model)
        if not is_training and isinstance(untouched, Tensor):
            _check_same(canonized, untouched, self.composite)
        self._keeps_output = True


def _check_same(canonized: Tensor, untouched: Tensor, composite: GuardedComposite) -> None:
    # Merging batch norms rounds differently; half precision has few digits.
    tolerance = 1e-3 if untouched.dtype in (torch.float32, torch.float64) else 0.05
    change = (canonized - untouched).abs().max() / untouched.abs().max().clamp(min=1e-30)
    if torch.isfinite(untouched).all() and not change <= tolerance:
        names = ", ".join(type(canonizer).__name__ for canonizer in composite.canonizers) or "none"
        raise ValueError(
            f"the composite changes the model's output by {float(change):.1%} of its largest value, so that "
            f"another function would be explained (canonizers: {names}); see zennit_drsa.doctor for "
            "canonizers that suit this model"
        )


def _check_own_methods(attributor: Attributor) -> None:
    """Refuse a subclass that computes its map in a way of its own, of which the parts are not known.

    Zennit's loop over the windows of `Occlusion` is run as it is, and may be another one.
    """
    names = ("__call__",) if isinstance(attributor, Occlusion) else ("__call__", "forward", "grad")
    for name in names:
        owner = next(parent for parent in type(attributor).__mro__ if name in vars(parent))
        if name in vars(attributor) or owner.__module__.partition(".")[0] != "zennit":
            raise TypeError(
                f"{type(attributor).__name__} has a method {name!r} of its own, which would be ignored here: "
                "concept maps are those of Zennit's own Gradient, SmoothGrad, IntegratedGradients or "
                "Occlusion. Wrap one of these, and change its maps afterwards"
            )


def _check_input(input: object) -> None:
    if not isinstance(input, Tensor):
        raise TypeError(f"input must be a tensor, got {type(input).__name__}; use torch.as_tensor(input)")
    if not input.is_floating_point():
        raise TypeError(
            f"input must be floating point, got {input.dtype}; convert it with .float(). Token ids have no "
            "relevance: explain word embeddings, as TransformersModel takes them"
        )
    if input.ndim == 0 or not len(input):
        raise ValueError(f"input must hold at least one example, got shape {tuple(input.shape)}")
