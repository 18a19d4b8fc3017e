"""How the K maps of each of Zennit's attributors are computed, while its composite is registered."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from drsa_core import Subspaces
from drsa_core.explainer import Explainer, refuse_noise_on_padding
from drsa_core.layer import BackwardPass, IntegratedGradientsContext, Request, filter_context
from drsa_core.targets import Target
from torch import Tensor, nn
from zennit.attribution import Attributor, Gradient, IntegratedGradients, Occlusion, SmoothGrad
from zennit.core import Composite, Hook

from ._zennit import describe_method, has_rule, holds_relevance
from .explained import AttrOutput, ScoreOf, gradient_of_score, terms_of_score
from .kept import KeptRelevance, keeps_relevance
from .passes import NONLINEAR_RULES, shared_forwards, skipped_gradients
from .rules import ForwardRule


@dataclass(frozen=True)
class Step1:
    """The model's output, the activation a, its context c, and what concept maps cannot hold."""

    output: Tensor
    activation: Tensor
    context: Tensor
    lost: float
    share_around: float | None


class ConceptMaps(Explainer):
    """The passes behind `DisentangledAttributor`, which documents the attributes."""

    model: nn.Module
    composite: Composite
    attributor: Attributor
    two_step: bool | None
    context_steps: int | None
    chunk: int | None
    slot: str | None
    tolerance: float

    # ------------------------------------------------------------------ maps, shape (K, N, *input)

    def _whole(self, input: Tensor, start: AttrOutput) -> Tensor:
        """The map of the wrapped attributor; it has the noise of its parts if these were `drawn_again`."""
        whole: Tensor = self.attributor.forward(input.clone(), start)[1].detach()
        return whole

    def _terms_of_score(self, start: AttrOutput) -> AttrOutput:
        """What the wrapped attributor is to be given, so that it explains the score that its parts do."""
        return terms_of_score(start) if isinstance(self.attributor, Occlusion) else start

    def _whole_and_kept(self, input: Tensor, start: AttrOutput) -> tuple[Tensor, dict[str, Tensor] | None]:
        """The map of the wrapped attributor, and what does not reach it, where that can be told (`kept`)."""
        in_one_pass = type(self.attributor) is Gradient and holds_relevance(self.model, self.slot)
        if not (in_one_pass and keeps_relevance(self.model)):
            return self._whole(input, start), None
        kept = KeptRelevance(len(input))
        with kept.measured(filter(has_rule, self.model.modules())):
            whole = self._whole(input, start)
        return whole, kept.by_label()

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
            refuse_noise_on_padding(self.model, input)
            return self._average(self._noisy(input), start)
        return self._gradients(input, start)

    def _gradients(self, input: Tensor, start: AttrOutput) -> tuple[Tensor, Tensor]:
        """Filter what arrives at the layer by concept, and pass each part down (section 3, Eqs. 1 and 2)."""
        subspaces, create_graph = self._fitted(), self.attributor.create_graph
        hooks = list(self.composite.hook_refs)
        if create_graph:
            _check_differentiable(hooks)
        with ExitStack() as stack:
            if not create_graph:
                stack.enter_context(skipped_gradients(self.model))
            backward = self._backward(input, start, create_graph)
            self._check_fits(backward.activation)
            start_pass = stack.enter_context(shared_forwards(hooks))

            def below(part: Tensor) -> Tensor:
                start_pass()
                return backward.below(part)[0]

            whole = None
            if _has_nonlinear_rules(hooks):
                whole = below(backward.gradient_slot)
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

    def _context(self, input: Tensor, start: AttrOutput, target: Target) -> Step1:
        """Step 1: the model's output, the activation a, its context c, and what is lost."""
        if isinstance(self.attributor, Occlusion) and not holds_relevance(self.model, self.slot):
            start = gradient_of_score(start)  # given a function, Zennit's Occlusion takes it as the score
        with skipped_gradients(self.model):
            backward = self._backward(input, start)
        activation, context = backward.activation, backward.context.detach()
        if self._integrates_context:
            activation, context = self._path_context(self._request(input, target))
        return Step1(backward.output.detach(), activation, context, backward.lost, backward.share_around)

    @property
    def _path_context(self) -> IntegratedGradientsContext:
        return IntegratedGradientsContext(self.context_steps)

    def _integrate_model(
        self, input: Tensor, path: Iterator[Tensor], start: AttrOutput
    ) -> tuple[Tensor, Tensor]:
        """Step 2 of Integrated Gradients: mean over the path of ∂R̂_k/∂x."""
        if holds_relevance(self.model, self.slot):
            raise ValueError(
                "IntegratedGradients in two steps integrate gradients, but the composite has rules that pass "
                "relevance in their place; leave two_step at None, use Occlusion, whose second step needs no "
                "gradients, or a composite without such rules"
            )
        step = self._context(input, start, ScoreOf(start))
        self._check_fits(step.activation)
        hooks = list(self.composite.hook_refs)
        first = [step.context.contiguous()] if _has_nonlinear_rules(hooks) else []  # its signs decide
        total = input.new_zeros(self._fitted().n_subspaces, *input.shape)
        for point in path:
            point = point.detach().requires_grad_()
            activation = self._request(point, None).activation()
            with shared_forwards(hooks) as start_pass:
                for k, part in enumerate(chain(first, self._filtered(step.context)), -len(first)):
                    start_pass()
                    (gradient,) = torch.autograd.grad(activation, point, part, retain_graph=True)
                    if k >= 0:
                        total[k] += gradient / self.attributor.n_iter
        return step.output, total

    def _filtered(self, context: Tensor) -> Iterator[Tensor]:
        """U_kU_kᵀc for each concept."""
        for group in self._groups():
            yield from filter_context(context, group, self.channel_dim)

    def _occlusion(self, input: Tensor, start: AttrOutput) -> tuple[Tensor, Tensor]:
        """Step 2 of occlusion: Zennit's own loop over the windows, with R̂_k in the place of the output."""
        step = self._context(input, start, ScoreOf(start))
        scores: list[Tensor] = []

        def first_run(occluded: Tensor) -> Tensor:
            with torch.no_grad():
                scores.append(self._relevance(self._request(occluded, None).activation(), step.context))
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
        return step.output, torch.stack(maps)

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

    def _groups(self) -> Iterator[Subspaces]:
        subspaces = self._fitted()
        size = self.chunk or subspaces.n_subspaces
        for first in range(0, subspaces.n_subspaces, size):
            yield subspaces.select(range(first, min(first + size, subspaces.n_subspaces)))

    def _method(self) -> str:
        """How contexts are found, with the rules that are registered now."""
        if self._integrates_context:
            return describe_method(self.model, self.slot, repr(self._path_context))
        return describe_method(self.model, self.slot)


def _has_nonlinear_rules(hooks: list[Hook]) -> bool:
    return any(isinstance(hook, NONLINEAR_RULES) for hook in hooks)


def _check_differentiable(hooks: list[Hook]) -> None:
    """Refuse to differentiate relevance again under rules whose graph has no true derivative."""
    found = next((hook for hook in hooks if isinstance(hook, ForwardRule)), None)
    if found is not None:
        raise ValueError(
            f"create_graph=True: the rule {type(found).__name__} is written into the graph of the model, so "
            "that derivatives of its relevance would be wrong; use Zennit's own rules, such as "
            "EpsilonGammaBox with a canonizer, or VGGGamma"
        )


def _next(remembered: Iterator[Tensor], input: Tensor) -> Tensor:
    return next(remembered)
