"""`DisentangledAttributor`: K-way attributions from Zennit's attributors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Self, TypeVar

import torch
from drsa_core import DRSA, Pairs, PairStore, Provenance, Subspaces, check_provenance, model_fingerprint
from drsa_core.collect import collect_pairs
from drsa_core.layer import (
    TOLERANCE,
    BackwardPass,
    IntegratedGradientsContext,
    Request,
    check_fits,
    eager,
    filter_context,
    find_layer,
    guarded,
    sum_over_positions,
    uninterrupted,
    warn_of_training,
)
from drsa_core.parameters import as_int
from drsa_core.solvers import Solver, learn_subspaces
from drsa_core.target import Target
from torch import Tensor, nn
from zennit.attribution import Attributor, Gradient, IntegratedGradients, Occlusion, SmoothGrad

from ._zennit import describe_rules, holds_relevance
from .composite import GuardedComposite
from .explained import (
    AttrOutput,
    ScoreOf,
    checked_attr_output,
    checked_start,
    start_of_target,
    targets_in,
)
from .nonfinite import check_finite
from .passes import NONLINEAR_RULES, shared_forwards, skipped_gradients

_T = TypeVar("_T")


class DisentangledAttributor(Attributor):  # type: ignore[misc]
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
    context_steps : int
        Steps of the path from 0 to a that gives the context of `IntegratedGradients` (Note B.2).
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
    (`ReLUDeconvNet`, `ReLUGuidedBackprop`) let pass what they let pass of the whole. The first call also runs
    the untouched model on one example, and refuses canonizers that change its output.

    Examples
    --------
    >>> attributor = Gradient(model, EpsilonPlusFlat())                                     # doctest: +SKIP
    >>> with DisentangledAttributor(attributor, "features.22", subspaces) as attributor:    # doctest: +SKIP
    ...     output, relevance = attributor(input, attr_output)    # relevance (N, K, *input)
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
        context_steps: int = 100,
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
        if subspaces is not None and not isinstance(subspaces, Subspaces):
            raise TypeError(f"subspaces must be a drsa_core.Subspaces, got {type(subspaces).__name__}")
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
        self.subspaces, self.channel_dim = subspaces, as_int(channel_dim, "channel_dim")
        self.residual, self.two_step = residual, two_step
        self.context_steps = as_int(context_steps, "context_steps", 1)
        self.chunk = None if chunk is None else as_int(chunk, "chunk", 1)
        self.slot, self.tolerance, self.strict = slot, tolerance, strict
        self._keeps_output = False
        self._fingerprint: str | None = None

    # ------------------------------------------------------------------ as Zennit's attributors are called

    @uninterrupted
    def __enter__(self) -> Self:
        if self.subspaces is not None and self.subspaces.provenance is not None:
            self._fingerprint = model_fingerprint(self.model)  # before canonizers change weights
        warn_of_training(self.model)
        super().__enter__()
        return self

    @uninterrupted
    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)

    def __call__(self, input: Tensor, attr_output: Tensor | AttrOutput | None = None) -> Any:
        """Output of the model and relevance (N, K, *input), (N, K + 1, *input) with the residual."""
        _check_input(input)
        return super().__call__(input, checked_attr_output(attr_output))

    def forward(self, input: Tensor, attr_output_fn: AttrOutput) -> tuple[Tensor, Tensor]:
        """As `__call__`, inside of the attributor's context."""
        self._check_canonizers(input)
        start = checked_start(attr_output_fn)
        return guarded(self.model, lambda: self._explain(input.detach().clone(), start))

    def concept_relevance(self, input: Tensor, attr_output: Tensor | AttrOutput | None = None) -> Tensor:
        """Relevance R_k = (U_kᵀa)ᵀ(U_kᵀc) of each concept, summed over positions, shape (N, K).

        The context is that at the input; for `IntegratedGradients` in two steps, that of the path.
        """

        start = checked_start(self._as_function(attr_output))

        def relevance(input: Tensor) -> Tensor:
            output, activation, context = self._context(input, start, ScoreOf(start))
            self._check_provenance(output, start)
            result = self._score(activation, context)
            check_finite(result, self.model, input, start)
            return result

        return self._registered(relevance, input)

    # ------------------------------------------------------------------ with a target, as both adapters

    def context(self, input: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        """Activations a and contexts c at the layer, shapes (N, …, D, …).

        Relevance starts as the score itself, R = y (Note A), so that Σ aᵀc over all positions of an image is
        y where the rules conserve it.

        Parameters
        ----------
        target : int, list or tensor of int, function of the output
            One output for all images, one for each, or a function from the output to the scores (N,).
        """

        def pair(input: Tensor) -> tuple[Tensor, Tensor]:
            start = start_of_target(target, holds_relevance(self.model, self.slot))
            _, activation, context = self._context(input, start, target)
            for found in (activation, context):
                check_finite(found, self.model, input, start)
            return activation, context

        return self._registered(pair, input)

    def collect(
        self,
        loader: Iterable[Any],
        target: Target | str,
        positions: int | None = 20,
        random_state: int | None = None,
        progress: bool | None = None,
        store: PairStore | None = None,
    ) -> Pairs:
        """Pairs (a, c) at random positions of every image of a loader; see `zennit_drsa.collect`."""
        parameter = next(self.model.parameters(), None)
        fingerprint = model_fingerprint(self.model)  # before rules and canonizers are there
        with self:
            return collect_pairs(
                lambda inputs, of_batch: self.context(_single(inputs), of_batch),
                loader,
                target,
                positions=positions,
                random_state=random_state,
                store=store,
                progress=progress,
                device=None if parameter is None else parameter.device,
                channel_dim=self.channel_dim,
                backend="zennit",
                method=self._method(),
                layer=self.layer_name,
                model=fingerprint,
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
            As in `zennit_drsa.collect`.
        solver : PRCA, DRSA, …, optional
            Default `DRSA(n_subspaces=4)`.
        """
        solver = DRSA(n_subspaces=4, random_state=random_state) if solver is None else solver
        pairs = self.collect(loader, target, positions, random_state, progress, store)
        self.subspaces = learn_subspaces(solver, pairs)
        return self

    # ------------------------------------------------------------------ maps, shape (K, N, *input)

    def _explain(self, input: Tensor, start: AttrOutput) -> tuple[Tensor, Tensor]:
        state = torch.get_rng_state()
        output, maps = self._maps(input, start)
        self._check_provenance(output, start)
        relevance = maps.movedim(0, 1)
        if self.residual:
            torch.set_rng_state(state)  # the same noise for the whole as for its parts
            whole = self.attributor.forward(input.clone(), start)[1].detach()
            relevance = torch.cat([relevance, (whole - relevance.sum(1)).unsqueeze(1)], dim=1)
        check_finite(relevance, self.model, input, start)
        return output, relevance

    def _maps(self, input: Tensor, start: AttrOutput) -> tuple[Tensor, Tensor]:
        attributor = self.attributor
        if isinstance(attributor, Occlusion):
            return self._occlusion(input, start)
        if isinstance(attributor, IntegratedGradients):
            baseline = attributor.baseline_fn(input)
            alphas = torch.linspace(1.0 / attributor.n_iter, 1.0, attributor.n_iter)
            path = (baseline + alpha * (input - baseline) for alpha in alphas)
            if self._in_two_steps:
                output, mean = self._integrate_model(input, path, start)
            else:
                output, mean = self._average(path, start)
            return output, mean * (input - baseline)
        if isinstance(attributor, SmoothGrad):
            return self._average(self._noisy(input), start)
        return self._gradients(input, start)

    def _gradients(self, input: Tensor, start: AttrOutput) -> tuple[Tensor, Tensor]:
        """Filter what arrives at the layer by concept, and pass each part down (section 3, Eqs. 1 and 2)."""
        subspaces, create_graph = self._fitted(), self.attributor.create_graph
        hooks = list(self.composite.hook_refs)
        with ExitStack() as stack:
            if not create_graph:
                stack.enter_context(skipped_gradients(self.model))
            backward = self._backward(input, start, create_graph)
            check_fits(backward.activation, subspaces.n_features, self.layer_name, self.channel_dim)
            start_pass = stack.enter_context(shared_forwards(hooks))

            def below(part: Tensor) -> Tensor:
                start_pass()
                return backward.below(part)[0]

            whole = None
            if any(isinstance(hook, NONLINEAR_RULES) for hook in hooks):
                whole = below(backward.arriving)
            maps: list[Tensor] = []
            for group in self._groups():
                for part in backward.cotangents(group, self.channel_dim):
                    last = len(maps) + 1 == subspaces.n_subspaces
                    if last and whole is not None and subspaces.is_complete and maps:
                        # The pass for the signs gave the sum of all maps: the last one is what is left.
                        maps.append(whole - torch.stack(maps).sum(0))
                    else:
                        maps.append(below(part))
        keep = create_graph or self.attributor.retain_graph
        return (backward.output if keep else backward.output.detach()), torch.stack(maps)

    def _average(self, path: Iterator[Tensor], start: AttrOutput) -> tuple[Tensor, Tensor]:
        n_iter = self.attributor.n_iter
        total: Tensor | None = None
        for point in path:
            output, maps = self._gradients(point, start)
            total = maps / n_iter if total is None else total + maps / n_iter
        if total is None:
            raise ValueError(f"n_iter must be at least 1, got {n_iter}")
        return output, total

    def _noisy(self, input: Tensor) -> Iterator[Tensor]:
        # The draws are in the order of Zennit's SmoothGrad, so that a seed gives both the same noise.
        dims = tuple(range(1, input.ndim))
        std = self.attributor.noise_level * (input.amax(dims, keepdim=True) - input.amin(dims, keepdim=True))
        for _ in range(self.attributor.n_iter - 1):
            yield input + torch.randn_like(input) * std
        yield input

    # ------------------------------------------------------------------ two steps (Note B)

    @property
    def _in_two_steps(self) -> bool:
        if self.two_step is not None:
            return self.two_step
        if isinstance(self.attributor, IntegratedGradients):
            return not holds_relevance(self.model, self.slot)
        return isinstance(self.attributor, Occlusion)

    @property
    def _integrates_context(self) -> bool:
        is_path = isinstance(self.attributor, IntegratedGradients) and self._in_two_steps
        return is_path and not holds_relevance(self.model, self.slot)

    def _context(self, input: Tensor, start: AttrOutput, target: Target) -> tuple[Tensor, Tensor, Tensor]:
        """Step 1: the model's output, the activation a and its context c."""
        with skipped_gradients(self.model):
            backward = self._backward(input, start)
        output, activation, context = backward.output.detach(), backward.activation, backward.context.detach()
        if self._integrates_context:
            activation, context = self._path_context(self._request(input, target))
        return output, activation, context

    @property
    def _path_context(self) -> IntegratedGradientsContext:
        return IntegratedGradientsContext(self.context_steps)

    def _integrate_model(
        self, input: Tensor, path: Iterator[Tensor], start: AttrOutput
    ) -> tuple[Tensor, Tensor]:
        """Step 2 of Integrated Gradients: mean over the path of ∂R̂_k/∂x."""
        output, activation, context = self._context(input, start, ScoreOf(start))
        subspaces = self._fitted()
        check_fits(activation, subspaces.n_features, self.layer_name, self.channel_dim)
        total = input.new_zeros(subspaces.n_subspaces, *input.shape)
        for point in path:
            point = point.detach().requires_grad_()
            activation = self._request(point, None).activation()
            k = 0
            for group in self._groups():
                for part in filter_context(context, group, self.channel_dim):
                    (gradient,) = torch.autograd.grad(activation, point, part, retain_graph=True)
                    total[k] += gradient / self.attributor.n_iter
                    k += 1
        return output, total

    def _occlusion(self, input: Tensor, start: AttrOutput) -> tuple[Tensor, Tensor]:
        """Step 2 of occlusion: Zennit's own loop over the windows, with R̂_k in the place of the output."""
        output, _, context = self._context(input, start, ScoreOf(start))
        scores: list[Tensor] = []

        def first_run(occluded: Tensor) -> Tensor:
            with torch.no_grad():
                scores.append(self._score(self._request(occluded, None).activation(), context))
            return scores[-1][:, :1]

        def run(model: Callable[[Tensor], Tensor]) -> Tensor:
            occlusion = copy.copy(self.attributor)
            occlusion.model, occlusion.composite = model, None
            result: Tensor = occlusion.forward(input, lambda score: score)[1]
            return result

        maps = [run(first_run)]
        for k in range(1, self._fitted().n_subspaces):
            remembered = iter([score[:, k : k + 1] for score in scores])
            maps.append(run(partial(_next, remembered)))
        return output, torch.stack(maps)

    # ------------------------------------------------------------------ parts

    def _request(self, input: Tensor, target: Target) -> Request:
        return Request(self.model, self.layer, self.layer_name, (input,), target, self.channel_dim)

    def _backward(self, input: Tensor, start: AttrOutput, create_graph: bool = False) -> BackwardPass:
        return BackwardPass(
            self._request(input, None),
            start=start,
            holds_relevance=holds_relevance(self.model, self.slot),
            create_graph=create_graph,
            tolerance=self.tolerance,
        )

    def _score(self, activation: Tensor, context: Tensor) -> Tensor:
        """R_k summed over positions, shape (N, K)."""
        subspaces = self._fitted()
        check_fits(activation, subspaces.n_features, self.layer_name, self.channel_dim)
        return sum_over_positions(
            subspaces.relevance(activation, context, self.channel_dim), self.channel_dim
        )

    def _groups(self) -> Iterator[Subspaces]:
        subspaces = self._fitted()
        size = self.chunk or subspaces.n_subspaces
        for first in range(0, subspaces.n_subspaces, size):
            yield subspaces.select(range(first, min(first + size, subspaces.n_subspaces)))

    def _registered(self, work: Callable[[Tensor], _T], input: Tensor) -> _T:
        """`work(input)` with the composite registered."""
        _check_input(input)
        if self.composite.handles:
            return guarded(self.model, lambda: work(input.detach().clone()))
        with self:
            return guarded(self.model, lambda: work(input.detach().clone()))

    def _as_function(self, attr_output: Tensor | AttrOutput | None) -> AttrOutput:
        checked = checked_attr_output(attr_output)
        if isinstance(checked, Tensor):
            return lambda output: checked
        return self.attr_output_fn if checked is None else checked

    # ------------------------------------------------------------------ checks

    def _fitted(self) -> Subspaces:
        if self.subspaces is None:
            raise ValueError(
                "there are no subspaces yet: call fit(loader, target), or pass subspaces=Subspaces.load(path)"
            )
        return self.subspaces

    def _method(self) -> str:
        """How contexts are found, with the rules that are registered now."""
        rules = describe_rules(self.model)
        how = repr(self._path_context) if self._integrates_context else "GradientContext()"
        if holds_relevance(self.model, self.slot):
            return f"LRP({rules})"
        return f"{how} under {rules}" if rules else how

    def _check_provenance(self, output: Tensor, start: AttrOutput) -> None:
        made = self._fitted().provenance
        if made is None:
            return
        used = Provenance(
            backend="zennit",
            method=self._method(),
            layer=self.layer_name,
            channel_dim=self.channel_dim,
            target=targets_in(start(output)),
            model=self._fingerprint,
        )
        check_provenance(made, used, "subspaces", self.strict, stacklevel=7)

    def _check_canonizers(self, input: Tensor) -> None:
        """Compare the first forward pass with that of the untouched model: a canonizer may not fit it."""
        if self._keeps_output or not len(input):
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


def _check_input(input: object) -> None:
    if not isinstance(input, Tensor):
        raise TypeError(f"input must be a tensor, got {type(input).__name__}; use torch.as_tensor(input)")
    if not input.is_floating_point():
        raise TypeError(f"input must be floating point, got {input.dtype}; convert it with .float()")
    if input.ndim == 0 or not len(input):
        raise ValueError(f"input must hold at least one example, got shape {tuple(input.shape)}")


def _single(inputs: object) -> Tensor:
    if isinstance(inputs, Tensor):
        return inputs
    raise TypeError("Zennit's attributors take one input, but the loader gives several; use captum_drsa")


def _next(remembered: Iterator[Tensor], input: Tensor) -> Tensor:
    return next(remembered)
