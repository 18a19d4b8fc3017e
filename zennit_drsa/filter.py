"""`SubspaceFilter`: the virtual layer of section 3.1, put after a named layer as a Zennit canonizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from drsa_core import Provenance, Subspaces, check_provenance, context_from_relevance, find_layer
from drsa_core.layer import (
    TOLERANCE,
    as_activation,
    check_fits,
    lost_relevance,
    warn_of_loss,
    warn_of_training,
)
from drsa_core.lrp import registered_copy
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle
from zennit.canonizers import Canonizer

from ._zennit import check_uncovered, describe_method, holds_relevance
from .arguments import checked_arguments
from .reuse import SecondRuns, refused_second_runs

Concept: TypeAlias = int | str | Sequence[int] | Tensor | None


class _Filter(torch.autograd.Function):
    """Identity forward; backward hands the gradient to the virtual layer.

    Derivatives of what it hands on cannot be had: they would be filtered once more on their way.
    """

    @staticmethod
    def forward(ctx: Any, activation: Tensor, layer: VirtualLayer) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(activation)
        # A copy: what follows may be an in-place ReLU, and the activation is needed as it was.
        return activation.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (activation,) = ctx.saved_tensors
        return ctx.layer.filtered(activation, gradient), None


class VirtualLayer:
    """a′ = Σ_k U_k U_kᵀ a: the identity forward, one concept backward (section 3.1).

    Parameters
    ----------
    root : module
        The model, which tells whether relevance or gradients flow back.
    name : str
        Name of the layer that it follows, for messages.
    subspaces, concept, channel_dim, slot, tolerance, strict, fingerprint, canonizers
        As in `SubspaceFilter`.
    """

    def __init__(
        self,
        root: nn.Module,
        layer: nn.Module,
        name: str,
        subspaces: Subspaces,
        concept: Concept,
        channel_dim: int,
        slot: str | None,
        tolerance: float,
        strict: bool,
        fingerprint: str | None,
        canonizers: str | None,
    ) -> None:
        self.root, self.layer, self.name, self.subspaces, self.concept = root, layer, name, subspaces, concept
        self.channel_dim, self.slot, self.tolerance = channel_dim, slot, tolerance
        self.strict, self.fingerprint, self.canonizers = strict, fingerprint, canonizers
        self._is_checked = False

    def __call__(self, output: object) -> Tensor:
        """The activation (N, …, D, …), with a backward pass that is filtered."""
        if not self._is_checked:
            self._check_use()
        activation = as_activation(output, self.layer, self.name, self.channel_dim)
        check_fits(activation, self.subspaces.n_features, self.name, self.channel_dim)
        return _Filter.apply(activation, self) if activation.requires_grad else activation

    def _check_use(self) -> None:
        """Compare where the subspaces were made with this use, of which only the target is not known."""
        made, self._is_checked = self.subspaces.provenance, True
        if made is not None:
            used = Provenance(
                backend="zennit",
                method=describe_method(self.root, self.slot),
                layer=self.name,
                channel_dim=self.channel_dim,
                target=None,
                model=self.fingerprint,
                canonizers=self.canonizers,
            )
            check_provenance(made, used, "subspaces", self.strict)

    def filtered(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Keep `concept`: a ⊙ U_kU_kᵀ(R ⊘ a) for relevance R, U_kU_kᵀg for a gradient g."""
        if not holds_relevance(self.root, self.slot):
            return self._keep(gradient, self.subspaces)
        warn_of_loss(lost_relevance(activation, gradient.detach()), self.name, self.tolerance)
        if self.concept is None and self.subspaces.is_complete:
            return torch.where(activation != 0, gradient, 0)
        return activation * self._keep(context_from_relevance(activation, gradient), self.subspaces)

    def _keep(self, context: Tensor, subspaces: Subspaces) -> Tensor:
        """Σ over the kept blocks of U_kV_kᵀc; `concept` may name one block for each sample."""
        dim, concept = self.channel_dim, self.concept
        if concept is None:
            if subspaces.is_complete:
                return context
            parts = (subspaces.project_context(context, k, dim) for k in range(subspaces.n_subspaces))
            return torch.stack(list(parts)).sum(0)
        if isinstance(concept, int | str):
            return subspaces.select([concept]).project_context(context, 0, dim)
        concepts = torch.as_tensor(concept)
        if concepts.shape != (len(context),):
            raise ValueError(
                f"concept must be one index or one per sample: the batch has {len(context)} samples, "
                f"concept has shape {tuple(concepts.shape)}"
            )
        rows = [
            subspaces.project_context(c[None], int(k), dim) for c, k in zip(context, concepts, strict=True)
        ]
        return torch.cat(rows)


class SubspaceFilter(Canonizer):  # type: ignore[misc]
    """Zennit canonizer that puts the virtual layer after a layer and keeps one concept in the backward pass.

    Parameters
    ----------
    layer : str or module
        The layer, or its dotted name; the activation is its output.
    subspaces : Subspaces or None
        The concepts U = (U_1|…|U_K). None filters nothing, and the virtual layer marks the place.
    concept : int, str, sequence of int, or None
        The concept to keep: index or name, one index for each sample of the batch, or None for all.
    channel_dim : int
        Axis of the D features in the layer's output; −1 for token models (N, T, D).
    slot : {"relevance", "gradient"}, optional
        What the gradient slot holds. By default found out: relevance if a Zennit rule other than those that
        modify gradients (`ReLUDeconvNet`, `ReLUGuidedBackprop`, `ReLUBetaSmooth`) is active on the model.
    tolerance : float
        Share of the relevance on zero activations beyond which a `RelevanceLossWarning` is given.
    strict : bool
        Whether subspaces that were learned at another layer or with other rules are an error instead of a
        `ProvenanceWarning`.
    fingerprint : str, optional
        `drsa_core.model_fingerprint` of the model before canonizers changed it, to be compared as well;
        `DisentangledComposite` gives it.

    Notes
    -----
    The forward value is the identity, bit for bit. The backward value is R⁽ᵏ⁾ = a ⊙ U_kU_kᵀ(R ⊘ a), 0 where
    a = 0, for relevance R (section 3.2), and U_kU_kᵀg for a gradient g (Note B.1).

    The virtual layer is a forward hook on the layer, not a module: a container's own `forward` may go through
    its children, and would run a new one in the wrong place. It runs after every other hook on the layer, so
    that a rule there covers the layer alone. What goes around the layer (skip connections) is not filtered:
    `DisentangledAttributor` measures it.

    Examples
    --------
    >>> composite = EpsilonPlus(canonizers=[SubspaceFilter("features.22", subspaces, 0)])
    >>> with Gradient(model, composite) as attributor:
    ...     output, relevance = attributor(images, one_hot)  # of concept 0 alone
    """

    def __init__(
        self,
        layer: str | nn.Module,
        subspaces: Subspaces | None,
        concept: Concept = None,
        channel_dim: int = 1,
        *,
        slot: str | None = None,
        tolerance: float = TOLERANCE,
        strict: bool = False,
        fingerprint: str | None = None,
    ) -> None:
        if subspaces is not None and not isinstance(subspaces, Subspaces):
            raise TypeError(f"subspaces must be a drsa_core.Subspaces, got {type(subspaces).__name__}")
        if slot not in (None, "relevance", "gradient"):
            raise ValueError(f"slot must be 'relevance', 'gradient' or None, got {slot!r}")
        if subspaces is None and concept is not None:
            raise ValueError(f"concept {concept!r} needs subspaces, got None")
        if subspaces is not None and concept is not None:
            concept = _checked_concept(concept, subspaces)
        self.layer, self.subspaces, self.concept, self.channel_dim = layer, subspaces, concept, channel_dim
        self.slot, self.tolerance, self.strict, self.fingerprint = slot, tolerance, strict, fingerprint
        self.canonizers: str | None = None  # how a composite describes its own, if it says so
        self.module: nn.Module | None = None
        self._name = ""
        self._virtual_layer: VirtualLayer | None = None
        self._handles: list[RemovableHandle] = []
        self._hook_handle: RemovableHandle | None = None
        self._n_runs: int | None = None  # None outside of forward passes: what is checkpointed runs again
        self._second_runs: SecondRuns | None = None

    def apply(self, root_module: nn.Module) -> list[SubspaceFilter]:
        """Insert the virtual layer and return the instance that removes it."""
        return [registered_copy(self, root_module)]

    def register(self, root_module: nn.Module) -> None:
        """Insert the virtual layer into this model."""
        name, module = find_layer(root_module, self.layer)
        if any(isinstance(getattr(h, "__self__", None), SubspaceFilter) for h in _pre_hooks(module)):
            raise ValueError(f"layer {name!r} has a SubspaceFilter already; remove it first")
        warn_of_training(root_module)
        self.module, self._name = module, name
        if self.subspaces is not None:
            self._virtual_layer = VirtualLayer(
                root_module,
                module,
                name,
                self.subspaces,
                self.concept,
                self.channel_dim,
                self.slot,
                self.tolerance,
                self.strict,
                self.fingerprint,
                self.canonizers,
            )
        self._handles += [
            root_module.register_forward_pre_hook(self._before_model),
            root_module.register_forward_hook(self._after_model),
            module.register_forward_pre_hook(self._before_layer),
        ]

    def remove(self) -> None:
        """Take the virtual layer out; the model is then as it was before."""
        for handle in [*self._handles, self._hook_handle]:
            if handle is not None:
                handle.remove()
        if self._second_runs is not None:
            self._second_runs.remove()
        self._handles, self._hook_handle, self._second_runs = [], None, None
        self.module = self._virtual_layer = None

    def copy(self) -> SubspaceFilter:
        """A filter with the same parameters, not inserted anywhere."""
        copied = SubspaceFilter(
            self.layer,
            self.subspaces,
            self.concept,
            self.channel_dim,
            slot=self.slot,
            tolerance=self.tolerance,
            strict=self.strict,
            fingerprint=self.fingerprint,
        )
        copied.canonizers = self.canonizers
        return copied

    # Hooks take positional arguments only, as Zennit's own.

    def _before_model(self, module: nn.Module, args: Any) -> None:
        self._n_runs = 0
        if self._second_runs is None:  # a composite adds its rules after its canonizers
            if self.slot is None:
                check_uncovered(module, self._name)
            self._handles += checked_arguments(module)
            self._second_runs = refused_second_runs(module)
        self._second_runs.start()

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        n_runs, self._n_runs = self._n_runs, None
        if self._second_runs is not None:
            self._second_runs.stop()
        if n_runs == 0:
            raise ValueError(
                f"layer {self._name!r} was not run in the forward pass of {type(module).__name__}; choose a "
                "layer that is called as a module"
            )

    def _before_layer(self, module: nn.Module, args: Any) -> None:
        # Hooks run in the order of their registration. Registering anew puts the virtual layer behind those
        # that a composite adds after its canonizers.
        if self._hook_handle is not None:
            self._hook_handle.remove()
        self._hook_handle = module.register_forward_hook(self._after_layer)

    def _after_layer(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._n_runs is not None:
            self._n_runs += 1
        if self._n_runs is not None and self._n_runs > 1:
            raise ValueError(
                f"layer {self._name!r} runs more than once in a forward pass, so its output is not one "
                "activation; choose a layer that runs once (e.g. the block around it)"
            )
        return None if self._virtual_layer is None else self._virtual_layer(output)


def _pre_hooks(module: nn.Module) -> list[Any]:
    return list(module._forward_pre_hooks.values())


def _checked_concept(concept: Concept, subspaces: Subspaces) -> Concept:
    """The concept as an int, a str or a tensor of int; an error if the subspaces have no such one."""
    if isinstance(concept, str):
        subspaces.select([concept])
        return concept
    indices = torch.as_tensor(concept)
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise TypeError(f"concept must be an index, a name, or one index per sample, got {concept!r}")
    if indices.ndim > 1:
        raise ValueError(f"concept must be one index or one per sample, got shape {tuple(indices.shape)}")
    for index in set(indices.reshape(-1).tolist()):
        subspaces.select([index])
    return indices if indices.ndim else int(indices)
