"""`DisentangledAttributor`: K-way attributions from Zennit's attributors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from drsa_core import Subspaces, filter_context
from torch import Tensor, nn
from zennit.attribution import Attributor, Gradient, IntegratedGradients, Occlusion, SmoothGrad

from .arriving import arriving_at
from .composite import DisentangledComposite
from .filter import StopForward, VirtualLayer
from .nonfinite import check_finite
from .sharing import NONLINEAR_RULES, shared_forwards

AttrOutput: TypeAlias = Callable[[Tensor], Tensor]


class DisentangledAttributor(Attributor):  # type: ignore[misc]
    """A Zennit attributor that returns one map for each concept.

    Parameters
    ----------
    attributor : Gradient, SmoothGrad, IntegratedGradients or Occlusion
        The attributor to wrap, with its model, composite and `attr_output`.
    layer : str or module
        The layer whose output is split, or its dotted name.
    subspaces : Subspaces
        The K concepts.
    channel_dim : int
        Axis of the D features in the layer's output.
    residual : bool
        Whether to append a map of what the concepts leave over, so that the maps add up to that of the wrapped
        attributor: subspaces that were not given, relevance on zero activations, paths around the layer.
    two_step : bool, optional
        Explain R̂_k(x) = (U_kᵀφ(x))ᵀ(U_kᵀ[c]) with the context c held constant (Note B). By default so for
        `Occlusion`, and for `IntegratedGradients` without relevance-passing rules. If False, each gradient on
        the path is filtered instead, and the maps add up to those of the wrapped attributor.
    context_steps : int
        Steps of the path from 0 to a that gives the context of `IntegratedGradients` (Note B.2).
    chunk : int, optional
        Number of concepts to handle at a time; bounds the memory for large K. Default: all at once.
    slot, tolerance
        As in `SubspaceFilter`.

    Notes
    -----
    The forward pass and the backward pass above the layer run once, only what lies below runs K times, with the
    modified forward passes of Zennit's rules shared (`sharing`). Rules that are not linear (`ReLUDeconvNet`,
    `ReLUGuidedBackprop`) let pass what they let pass of the whole.

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
        subspaces: Subspaces,
        *,
        channel_dim: int = 1,
        residual: bool = False,
        two_step: bool | None = None,
        context_steps: int = 100,
        chunk: int | None = None,
        slot: str | None = None,
        tolerance: float = 1e-3,
    ) -> None:
        if isinstance(attributor, DisentangledAttributor) or not isinstance(attributor, Gradient | Occlusion):
            raise TypeError(
                "attributor must be Zennit's Gradient, SmoothGrad, IntegratedGradients or Occlusion, "
                f"got {type(attributor).__name__}"
            )
        for name, value in (("chunk", chunk), ("context_steps", context_steps)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if two_step and not isinstance(attributor, IntegratedGradients | Occlusion):
            raise ValueError(
                f"two_step is for IntegratedGradients and Occlusion; with {type(attributor).__name__} both steps "
                "are one backward pass"
            )
        if two_step is False and isinstance(attributor, Occlusion):
            raise ValueError("Occlusion has no backward pass to filter; leave two_step at None")
        composite = DisentangledComposite(
            attributor.composite, layer, subspaces, channel_dim=channel_dim, slot=slot, tolerance=tolerance
        )
        super().__init__(attributor.model, composite, attributor.attr_output_fn)
        self.attributor, self.subspaces, self.channel_dim = attributor, subspaces, channel_dim
        self.residual, self.two_step, self.context_steps, self.chunk = (
            residual,
            two_step,
            context_steps,
            chunk,
        )

    def forward(self, input: Tensor, attr_output_fn: AttrOutput) -> tuple[Tensor, Tensor]:
        """Output of the model and relevance (N, K, *input), (N, K + 1, *input) with the residual."""
        input = input.detach()
        state = torch.get_rng_state()
        output, maps = self._maps(input, attr_output_fn)
        relevance = maps.movedim(0, 1)
        if self.residual:
            torch.set_rng_state(state)  # the same noise for the whole as for its parts
            whole = self._whole(input, attr_output_fn)
            relevance = torch.cat([relevance, (whole - relevance.sum(1)).unsqueeze(1)], dim=1)
        check_finite(relevance, self.model, input, attr_output_fn)
        return output, relevance

    def concept_relevance(self, input: Tensor, attr_output: Tensor | AttrOutput | None = None) -> Tensor:
        """Relevance R_k = (U_kᵀa)ᵀ(U_kᵀc) of each concept, summed over positions, shape (N, K).

        The context is that at the input; for `IntegratedGradients` in two steps, that of the path.
        """

        def relevance(input: Tensor, attr_output_fn: AttrOutput) -> Tensor:
            _, activation, context = self._context(input.detach(), attr_output_fn)
            return self._score(activation, context)

        # Zennit's __call__ registers the composite and reads attr_output; only what runs inside is another.
        measure = copy.copy(self)
        measure.forward = relevance
        result: Tensor = measure(input, attr_output)
        return result

    # ------------------------------------------------------------------ one map per concept, shape (K, N, *input)

    def _maps(self, input: Tensor, attr_output_fn: AttrOutput) -> tuple[Tensor, Tensor]:
        attributor = self.attributor
        if isinstance(attributor, Occlusion):
            return self._occlusion(input, attr_output_fn)
        if isinstance(attributor, IntegratedGradients):
            baseline = attributor.baseline_fn(input)
            alphas = torch.linspace(1.0 / attributor.n_iter, 1.0, attributor.n_iter)
            path = (baseline + alpha * (input - baseline) for alpha in alphas)
            if self._in_two_steps:
                output, mean = self._integrate_model(input, path, attr_output_fn)
            else:
                output, mean = self._average(path, attr_output_fn)
            return output, mean * (input - baseline)
        if isinstance(attributor, SmoothGrad):
            return self._average(self._noisy(input), attr_output_fn)
        return self._gradients(input, attr_output_fn)

    def _gradients(self, input: Tensor, attr_output_fn: AttrOutput) -> tuple[Tensor, Tensor]:
        """Filter what arrives at the layer by concept, and pass each part down (section 3, Eqs. 1 and 2)."""
        input = input.detach().requires_grad_()
        create_graph = self.attributor.create_graph
        arriving = arriving_at(self._layer, self.model, input, attr_output_fn, create_graph)

        def below(part: Tensor) -> Tensor:
            (result,) = torch.autograd.grad(
                arriving.graph, input, part, retain_graph=True, create_graph=create_graph, allow_unused=True
            )
            return torch.zeros_like(input) if result is None else result

        hooks = list(self.composite.hook_refs)
        maps: list[Tensor] = []
        with shared_forwards(hooks):
            if any(isinstance(hook, NONLINEAR_RULES) for hook in hooks):
                below(arriving.gradient)
            for group in self._groups():
                parts = arriving.factor * filter_context(arriving.context, group, self.channel_dim)
                maps += [below(part) for part in parts]
        keep = create_graph or self.attributor.retain_graph
        return (arriving.output if keep else arriving.output.detach()), torch.stack(maps)

    def _average(self, path: Iterator[Tensor], attr_output_fn: AttrOutput) -> tuple[Tensor, Tensor]:
        n_iter = self.attributor.n_iter
        total: Tensor | None = None
        for point in path:
            output, maps = self._gradients(point, attr_output_fn)
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
            return not self._layer.passes_relevance
        return isinstance(self.attributor, Occlusion)

    def _context(self, input: Tensor, attr_output_fn: AttrOutput) -> tuple[Tensor, Tensor, Tensor]:
        """Step 1: the model's output, the activation a and its context c."""
        layer = self._layer
        arriving = arriving_at(layer, self.model, input, attr_output_fn)
        output, activation = arriving.output.detach(), arriving.activation
        of_path = isinstance(self.attributor, IntegratedGradients) and self._in_two_steps
        if not of_path or layer.passes_relevance:
            return output, activation, arriving.context
        context = torch.zeros_like(activation)
        try:
            for step in torch.linspace(1.0 / self.context_steps, 1.0, self.context_steps):
                point = (step * activation).requires_grad_()
                layer.replacement = point
                with torch.enable_grad():
                    result = self.model(input.detach())
                (gradient,) = torch.autograd.grad(result, point, attr_output_fn(result))
                context += gradient / self.context_steps
        finally:
            layer.replacement = None
        return output, activation, context

    def _integrate_model(
        self, input: Tensor, path: Iterator[Tensor], attr_output_fn: AttrOutput
    ) -> tuple[Tensor, Tensor]:
        """Step 2 of Integrated Gradients: mean over the path of ∂R̂_k/∂x."""
        output, _, context = self._context(input.clone(), attr_output_fn)
        total = input.new_zeros(self.subspaces.n_subspaces, *input.shape)
        for point in path:
            point = point.detach().requires_grad_()
            activation = self._activation(point)
            for first, group in zip(range(0, len(total), self._group_size), self._groups(), strict=True):
                for k, part in enumerate(filter_context(context, group, self.channel_dim), first):
                    (gradient,) = torch.autograd.grad(activation, point, part, retain_graph=True)
                    total[k] += gradient / self.attributor.n_iter
        return output, total

    def _occlusion(self, input: Tensor, attr_output_fn: AttrOutput) -> tuple[Tensor, Tensor]:
        """Step 2 of occlusion: Zennit's own loop over the windows, with R̂_k in the place of the output."""
        output, _, context = self._context(input.clone(), attr_output_fn)
        scores: list[Tensor] = []

        def first_run(occluded: Tensor) -> Tensor:
            with torch.no_grad():
                scores.append(self._score(self._activation(occluded), context))
            return scores[-1][:, :1]

        def run(model: Callable[[Tensor], Tensor]) -> Tensor:
            occlusion = copy.copy(self.attributor)
            occlusion.model, occlusion.composite = model, None
            result: Tensor = occlusion.forward(input, lambda score: score)[1]
            return result

        maps = [run(first_run)]
        for k in range(1, self.subspaces.n_subspaces):
            remembered = iter(scores)
            maps.append(run(lambda _, k=k, remembered=remembered: next(remembered)[:, k : k + 1]))
        return output, torch.stack(maps)

    # ------------------------------------------------------------------ parts

    @property
    def _layer(self) -> VirtualLayer:
        return self.composite.virtual_layer

    def _activation(self, input: Tensor) -> Tensor:
        """The layer's output, without running what lies above it."""
        layer = self._layer
        layer.stop = True
        try:
            self.model(input)
        except StopForward:
            pass
        finally:
            layer.stop = False
        activation, layer.activation = layer.activation, None
        if activation is None:
            raise ValueError(f"layer {layer.name!r} was not run in the forward pass")
        return activation

    def _score(self, activation: Tensor, context: Tensor) -> Tensor:
        """R_k summed over positions, shape (N, K)."""
        per_position = self.subspaces.relevance(activation, context, self.channel_dim)
        concepts_second = per_position.movedim(self.channel_dim, 1)
        return concepts_second.reshape(*concepts_second.shape[:2], -1).sum(2)

    @property
    def _group_size(self) -> int:
        return self.chunk or self.subspaces.n_subspaces

    def _groups(self) -> Iterator[Subspaces]:
        n_subspaces, size = self.subspaces.n_subspaces, self._group_size
        for start in range(0, n_subspaces, size):
            yield self.subspaces.select(range(start, min(start + size, n_subspaces)))

    def _whole(self, input: Tensor, attr_output_fn: AttrOutput) -> Tensor:
        """The map of the wrapped attributor, on the model as it is registered now, with the filter open."""
        layer = self._layer
        layer.is_open = True
        try:
            whole: Tensor = self.attributor.forward(input.clone(), attr_output_fn)[1]
        finally:
            layer.is_open = False
        return whole.detach()
