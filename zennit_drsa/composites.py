"""The virtual layer of section 3.1 in Zennit: `SubspaceFilter`, a canonizer, and `DisentangledComposite`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from drsa_core import (
    Provenance,
    Subspaces,
    check_provenance,
    context_from_relevance,
    find_layer,
    model_fingerprint,
)
from drsa_core.explainer import as_subspaces
from drsa_core.layer import (
    TOLERANCE,
    as_activation,
    check_fits,
    lost_relevance,
    warn_of_loss,
    warn_of_training,
)
from drsa_core.lrp import registered_copy
from drsa_core.model_state import held_back, restored
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle
from zennit.canonizers import Canonizer
from zennit.core import Composite

from ._zennit import describe_canonizers, describe_method, holds_relevance, register, unregister
from .validity import check_carriers, validate

Concept: TypeAlias = int | str | Sequence[int] | Tensor | None


class SubspaceFilter(Canonizer):  # type: ignore[misc]
    """Zennit canonizer that puts the virtual layer after a layer and lets one concept through backwards.

    Parameters
    ----------
    layer : str or module
        The layer, or its dotted name; the activation is its output.
    subspaces : Subspaces or None
        The concepts U = (U_1|…|U_K). None filters nothing, and the virtual layer marks the place.
    concept : int, str, sequence of int, or None
        The concept to let through: index or name, one index for each example of the batch, or None for all.
    channel_dim : int
        Axis of the D features in the layer's output; −1 for token models (N, T, D).
    signal : {"relevance", "gradient"}, optional
        What flows backwards. By default found out: relevance if a Zennit rule other than those that modify
        gradients (`ReLUDeconvNet`, `ReLUGuidedBackprop`, `ReLUBetaSmooth`) is active on the model.
    tolerance : float
        Share of the relevance on zero activations beyond which a `RelevanceLossWarning` is given.
    strict : bool
        Whether subspaces that were learned at another layer or with other rules are an error instead of a
        `ProvenanceWarning`.
    fingerprint, canonizers : str, optional
        `drsa_core.model_fingerprint` of the model before canonizers changed it, and how these are described,
        to be compared as well; `DisentangledComposite` gives both.

    Notes
    -----
    The forward value is the identity, bit for bit. The backward value is R⁽ᵏ⁾ = a ⊙ U_kU_kᵀ(R ⊘ a), 0 where
    a = 0, for relevance R (section 3.2), and U_kU_kᵀg for a gradient g (Note B.1).

    The virtual layer is a forward hook on the layer, not a module: a container's own `forward` may go through
    its children, and would run a new one in the wrong place. It runs after every other hook on the layer, so
    that a rule there covers the layer only. What goes around the layer (skip connections) is not filtered:
    `DisentangledAttributor` measures it. The rules are validated in the first forward pass.

    Examples
    --------
    >>> composite = EpsilonPlus(canonizers=[SubspaceFilter("features.22", subspaces, 0)])
    >>> with Gradient(model, composite) as attributor:
    ...     output, relevance = attributor(images, one_hot)  # of concept 0
    """

    def __init__(
        self,
        layer: str | nn.Module,
        subspaces: Subspaces | None,
        concept: Concept = None,
        channel_dim: int = 1,
        *,
        signal: str | None = None,
        tolerance: float = TOLERANCE,
        strict: bool = False,
        fingerprint: str | None = None,
        canonizers: str | None = None,
    ) -> None:
        if subspaces is None and concept is not None:
            raise ValueError(f"concept {concept!r} needs subspaces, got None")
        self.subspaces = as_subspaces(subspaces)
        self.concept = concept if self.subspaces is None else _as_concept(concept, self.subspaces)
        self.layer, self.channel_dim = layer, channel_dim
        self.signal, self.tolerance, self.strict = check_signal(signal), tolerance, strict
        self.fingerprint, self.canonizers = fingerprint, canonizers
        self._root: nn.Module | None = None
        self.module: nn.Module | None = None
        self._name = ""
        self._handles: list[RemovableHandle] = []
        self._hook: RemovableHandle | None = None
        self._n_runs: int | None = None  # None outside of forward passes: what is checkpointed runs again
        self._is_compared = False
        self._validated: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # shared by copies

    def apply(self, root_module: nn.Module) -> list[SubspaceFilter]:
        """Insert the virtual layer and return the instance that removes it."""
        return [registered_copy(self, root_module)]

    def register(self, root_module: nn.Module) -> None:
        """Insert the virtual layer into this model."""
        name, module = find_layer(root_module, self.layer)
        owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
        if any(isinstance(owner, SubspaceFilter) for owner in owners):
            raise ValueError(f"layer {name!r} has a SubspaceFilter already; remove it first")
        warn_of_training(root_module)
        self._root, self.module, self._name, self._is_compared = root_module, module, name, False
        self._handles = [
            root_module.register_forward_pre_hook(self._before_model),
            root_module.register_forward_hook(self._after_model),
            module.register_forward_pre_hook(self._before_layer),
        ]

    def remove(self) -> None:
        """Take the virtual layer out; the model is then as it was before."""
        for handle in (*self._handles, self._hook):
            if handle is not None:
                handle.remove()
        self._handles, self._hook, self.module, self._root = [], None, None, None

    def copy(self) -> SubspaceFilter:
        """A filter with the same parameters, not inserted anywhere."""
        copied = SubspaceFilter(
            self.layer,
            self.subspaces,
            self.concept,
            self.channel_dim,
            signal=self.signal,
            tolerance=self.tolerance,
            strict=self.strict,
            fingerprint=self.fingerprint,
            canonizers=self.canonizers,
        )
        copied._validated = self._validated
        return copied

    # ------------------------------------------------------------------ hooks

    def _before_model(self, module: nn.Module, args: Any) -> None:
        if not self._is_compared:  # not before: a composite adds its rules after its canonizers
            owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
            filters = [owner for owner in owners if isinstance(owner, SubspaceFilter)]
            for one in filters:
                one._is_compared = True  # before the passes of the validation
            try:
                for one in filters:
                    one._check_use(module)
                    if module not in one._validated and args and isinstance(args[0], Tensor):
                        validate(module, None, one._name, args[0], registered=True, signal=one.signal)
                        one._validated.add(module)
            except BaseException:
                for one in filters:
                    one._is_compared = False
                raise
        self._n_runs = 0

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        n_runs, self._n_runs = self._n_runs, None
        if n_runs == 0:
            raise ValueError(
                f"layer {self._name!r} was not run in the forward pass of {type(module).__name__}; choose a "
                "layer that is called as a module"
            )

    def _before_layer(self, module: nn.Module, args: Any) -> None:
        # Hooks run in the order of their registration. Registering anew puts the virtual layer behind those
        # that a composite adds after its canonizers.
        if self._hook is not None:
            self._hook.remove()
        self._hook = module.register_forward_hook(self._after_layer)

    def _after_layer(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._n_runs is not None:
            self._n_runs += 1
            if self._n_runs > 1:
                raise ValueError(
                    f"layer {self._name!r} runs more than once in a forward pass, so its output is not one "
                    "activation; choose a layer that runs once (e.g. the block around it)"
                )
        if self.subspaces is None:
            return None
        activation = as_activation(output, module, self._name, self.channel_dim)
        check_fits(activation, self.subspaces.n_features, self._name, self.channel_dim)
        return _Filter.apply(activation, self) if activation.requires_grad else activation

    def _check_use(self, root: nn.Module) -> None:
        """Compare where the subspaces were made with this use, of which only the target is not known."""
        made = None if self.subspaces is None else self.subspaces.provenance
        if made is not None:
            used = Provenance(
                backend="zennit",
                method=describe_method(root, self.signal),
                layer=self._name,
                channel_dim=self.channel_dim,
                target=None,
                model=self.fingerprint,
                canonizers=self.canonizers,
            )
            check_provenance(made, used, "subspaces", self.strict)

    # ------------------------------------------------------------------ the virtual layer

    def filtered(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """What passes of `concept`: a ⊙ U_kU_kᵀ(R ⊘ a) for relevance R, U_kU_kᵀg for a gradient g."""
        if self._root is None or not holds_relevance(self._root, self.signal):
            return self._projected(gradient)
        lost = lost_relevance(activation, gradient.detach())
        if lost > self.tolerance:
            warn_of_loss(lost, self._name)
        return activation * self._projected(context_from_relevance(activation, gradient))

    def _projected(self, context: Tensor) -> Tensor:
        """Σ of U_kV_kᵀc over the concepts that pass; `concept` may name one for each example."""
        subspaces, concept, dim = self.subspaces, self.concept, self.channel_dim
        if subspaces is None or (concept is None and subspaces.is_complete):
            return context
        if concept is None:
            parts = [subspaces.project_context(context, k, dim) for k in range(subspaces.n_subspaces)]
            return torch.stack(parts).sum(0)
        if isinstance(concept, int | str):
            return subspaces.project_context(context, concept, dim)
        indices = torch.as_tensor(concept)
        if indices.shape != (len(context),):
            raise ValueError(
                f"concept must be one index or one per example: the batch has {len(context)} examples, "
                "concept "
                f"has shape {tuple(indices.shape)}"
            )
        rows = zip(context.split(1), indices.tolist(), strict=True)
        return torch.cat([subspaces.project_context(row, k, dim) for row, k in rows])


class _Filter(torch.autograd.Function):
    """Identity forward; backward hands the gradient to the virtual layer.

    Derivatives of what it hands on cannot be had: they would be filtered once more on their way.
    """

    @staticmethod
    def forward(ctx: Any, activation: Tensor, layer: SubspaceFilter) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(activation)
        return activation.clone()  # what follows may be an in-place ReLU

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (activation,) = ctx.saved_tensors
        return ctx.layer.filtered(activation, gradient), None


class DisentangledComposite(Composite):  # type: ignore[misc]
    """A Zennit composite whose backward pass lets one concept through at a layer.

    The given composite registers itself, whatever its class does there. The model is given back exactly, also
    after an error or Ctrl-C.

    Parameters
    ----------
    composite : zennit.core.Composite or None
        The rules and canonizers to use; None stands for plain gradients.
    layer, subspaces, concept, channel_dim, signal, tolerance, strict
        As in `SubspaceFilter`. The activation is that of the canonized model.
    """

    def __init__(
        self,
        composite: Composite | None,
        layer: str | nn.Module,
        subspaces: Subspaces | None,
        concept: Concept = None,
        channel_dim: int = 1,
        *,
        signal: str | None = None,
        tolerance: float = TOLERANCE,
        strict: bool = False,
    ) -> None:
        if composite is not None and not isinstance(composite, Composite):
            raise TypeError(f"composite must be a Zennit composite or None, got {type(composite).__name__}")
        self.composite = Composite() if composite is None else composite
        self.filter = SubspaceFilter(
            layer, subspaces, concept, channel_dim, signal=signal, tolerance=tolerance, strict=strict
        )
        super().__init__(self.composite.module_map, [*self.composite.canonizers, self.filter])
        self.hook_refs = self.composite.hook_refs
        self._context: restored | None = None

    def context(self, module: nn.Module) -> restored:
        """A context in which the composite is registered to a model."""
        return restored(module, enter=lambda: self._enter(module), leave=self._leave)

    @held_back
    def register(self, module: nn.Module) -> None:
        """Apply the canonizers, the rules and the filter to a model."""
        self.remove()
        context = self.context(module)
        context.__enter__()
        self._context = context

    @held_back
    def remove(self) -> None:
        """Take everything off the model."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)

    def _enter(self, module: nn.Module) -> None:
        if self.filter.subspaces is not None and self.filter.subspaces.provenance is not None:
            self.filter.fingerprint = model_fingerprint(module)  # before canonizers change weights
            self.filter.canonizers = describe_canonizers(self.composite.canonizers)
        register(self.composite, module)
        if self.filter.signal is None:
            check_carriers(module, self.composite)
        self.filter.register(module)
        self.handles.append(self.filter)  # attributors ask the handles whether it is registered

    def _leave(self) -> None:
        self.handles.clear()
        self.filter.remove()
        unregister(self.composite)


def check_signal(signal: str | None) -> str | None:
    """The name of what flows backwards, or an error."""
    if signal not in (None, "relevance", "gradient"):
        raise ValueError(f"signal must be 'relevance', 'gradient' or None, got {signal!r}")
    return signal


def _as_concept(concept: Concept, subspaces: Subspaces) -> Concept:
    """The concept as an int, a str or a tensor of int; an error if the subspaces have no such one."""
    if concept is None or isinstance(concept, str):
        return None if concept is None else subspaces.select([concept]).names[0]
    indices = torch.as_tensor(concept)
    if indices.is_floating_point() or indices.dtype == torch.bool or indices.ndim > 1:
        raise TypeError(f"concept must be an index, a name, or one index per example, got {concept!r}")
    for index in set(indices.reshape(-1).tolist()):
        subspaces.select([index])
    return indices if indices.ndim else int(indices)
