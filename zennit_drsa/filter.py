"""`SubspaceFilter`: the virtual layer of section 3.1, put after a named layer as a Zennit canonizer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from drsa_core import Subspaces, context_from_relevance, find_layer, lost_relevance
from drsa_core.canonical import registered_copy
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from zennit.canonizers import Canonizer
from zennit.core import Hook
from zennit.rules import ReLUBetaSmooth, ReLUDeconvNet, ReLUGuidedBackprop

Concept: TypeAlias = int | str | Sequence[int] | Tensor | None

# Name of the virtual layer below the layer that it follows, e.g. "features.22.virtual_layer".
CHILD_NAME = "virtual_layer"
# Rules that modify gradients; every other Zennit rule passes relevance in the gradient's place.
GRADIENT_RULES = (ReLUBetaSmooth, ReLUDeconvNet, ReLUGuidedBackprop)
_UNSAFE_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)


class RelevanceLossWarning(UserWarning):
    """Relevance sits on zero activations, where the virtual layer cannot pass it on."""


class StopForward(Exception):
    """Raised by a `VirtualLayer` that is asked for nothing but the activations below it."""


class _Filter(torch.autograd.Function):
    """Identity forward; backward hands the gradient to the virtual layer."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, layer: VirtualLayer) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(activation)
        # A copy: what follows may be an in-place ReLU, and the activation is needed as it was.
        return activation.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (activation,) = ctx.saved_tensors
        return ctx.layer.filtered(activation, gradient), None


class VirtualLayer(nn.Module):
    """a′ = Σ_k U_k U_kᵀ a as a module: the identity forward, one concept backward (section 3.1).

    Parameters
    ----------
    root : module
        The model, which tells whether relevance or gradients flow back.
    name : str
        Name of the layer that it follows, for messages.
    subspaces, concept, channel_dim, slot, tolerance
        As in `SubspaceFilter`.

    Attributes
    ----------
    recording : bool
        Whether to keep `activation` and `output`, what entered and left in the forward pass.
    stop : bool
        Whether to keep `activation` and end the forward pass there by raising `StopForward`.
    replacement : tensor or None
        What to put in the place of the activation.
    is_open : bool
        Whether everything passes back, lost relevance included.
    """

    def __init__(
        self,
        root: nn.Module,
        name: str,
        subspaces: Subspaces | None,
        concept: Concept,
        channel_dim: int,
        slot: str | None,
        tolerance: float,
    ) -> None:
        super().__init__()
        self.name, self.subspaces, self.concept = name, subspaces, concept
        self.channel_dim, self.slot, self.tolerance = channel_dim, slot, tolerance
        self._root = [root]  # in a list, so that the model does not become a child of its own part
        self.n_runs = 0
        self.recording = False
        self.stop = False
        self.is_open = False
        self.replacement: Tensor | None = None
        self.activation: Tensor | None = None
        self.output: Tensor | None = None

    def forward(self, activation: Tensor) -> Tensor:
        """Return the activation (N, …, D, …) unchanged."""
        self.n_runs += 1
        if self.n_runs > 1:
            raise ValueError(
                f"layer {self.name!r} runs more than once in a forward pass, so its output is not one "
                "activation; choose a layer that runs once (e.g. the block around it)"
            )
        self._check(activation)
        if self.replacement is not None:
            return self.replacement
        if self.stop:
            self.activation = activation
            raise StopForward
        output = _Filter.apply(activation, self) if activation.requires_grad else activation
        if self.recording:
            self.activation, self.output = activation, output
            # An in-place ReLU makes the tensor that it gets into its own result: not the one kept here.
            return output.clone()
        return output

    @property
    def passes_relevance(self) -> bool:
        """Whether the gradient slot holds relevance (LRP composites) rather than gradients."""
        if self.slot is not None:
            return self.slot == "relevance"
        return any(
            hook.active and not isinstance(hook, GRADIENT_RULES) for _, hook in hooks_by_module(self._root[0])
        )

    def filtered(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Keep `concept`: a ⊙ U_kU_kᵀ(R ⊘ a) for relevance R, U_kU_kᵀg for a gradient g."""
        if self.is_open or self.subspaces is None:
            return gradient
        if not self.passes_relevance:
            return self._keep(gradient, self.subspaces)
        self.warn_of_loss(activation, gradient)
        if self.concept is None and self.subspaces.is_complete:
            return torch.where(activation != 0, gradient, 0)
        return activation * self._keep(context_from_relevance(activation, gradient), self.subspaces)

    def warn_of_loss(self, activation: Tensor, relevance: Tensor) -> None:
        """Warn if more than `tolerance` of the relevance sits on zero activations."""
        lost = lost_relevance(activation.detach(), relevance.detach())
        if lost > self.tolerance:
            warnings.warn(
                f"{lost:.1%} of the relevance at layer {self.name!r} sits on zero activations and is lost; "
                "the concept maps do not add up to the whole. Choose a layer whose zero activations carry no "
                "relevance, or rules that give them none",
                RelevanceLossWarning,
                stacklevel=3,
            )

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

    def _check(self, activation: object) -> None:
        if not isinstance(activation, Tensor):
            raise TypeError(
                f"layer {self.name!r} must output one tensor, got {type(activation).__name__}; choose a "
                "layer inside or around it that does"
            )
        shape, dim = tuple(activation.shape), self.channel_dim
        n_features = shape[dim] if -len(shape) <= dim < len(shape) else None
        if self.subspaces is not None and n_features != self.subspaces.n_features:
            raise ValueError(
                f"the subspaces have D = {self.subspaces.n_features} features, but layer {self.name!r} has "
                f"{n_features} along channel_dim={dim} of its output {shape}; use subspaces that were "
                "fitted at this layer, or give its channel_dim"
            )


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

    Notes
    -----
    The forward value is the identity, bit for bit. The backward value is R⁽ᵏ⁾ = a ⊙ U_kU_kᵀ(R ⊘ a), 0 where
    a = 0, for relevance R (section 3.2), and U_kU_kᵀg for a gradient g (Note B.1).

    The virtual layer is a child "virtual_layer" of the layer, of type `VirtualLayer`, so that a rule can be
    attached to it by type or name. It runs after every hook on the layer, so that a rule there covers the
    layer alone. Parts of the relevance that go around the layer (skip connections) are not filtered.

    Examples
    --------
    >>> composite = EpsilonPlus(canonizers=[SubspaceFilter("features.22", subspaces, 0)])  # doctest: +SKIP
    """

    def __init__(
        self,
        layer: str | nn.Module,
        subspaces: Subspaces | None,
        concept: Concept = None,
        channel_dim: int = 1,
        *,
        slot: str | None = None,
        tolerance: float = 1e-3,
    ) -> None:
        if subspaces is not None and not isinstance(subspaces, Subspaces):
            raise TypeError(f"subspaces must be a drsa_core.Subspaces, got {type(subspaces).__name__}")
        if slot not in (None, "relevance", "gradient"):
            raise ValueError(f"slot must be 'relevance', 'gradient' or None, got {slot!r}")
        if subspaces is None and concept is not None:
            raise ValueError(f"concept {concept!r} needs subspaces, got None")
        if subspaces is not None and isinstance(concept, int | str):
            subspaces.select([concept])  # raises if there is no such concept
        self.layer, self.subspaces, self.concept, self.channel_dim = layer, subspaces, concept, channel_dim
        self.slot, self.tolerance = slot, tolerance
        self.module: nn.Module | None = None
        self.virtual_layer: VirtualLayer | None = None
        self._handles: list[RemovableHandle] = []
        self._hook_handle: RemovableHandle | None = None
        self._runs_before = 0

    def apply(self, root_module: nn.Module) -> list[SubspaceFilter]:
        """Insert the virtual layer and return the instance that removes it."""
        return [registered_copy(self, root_module)]

    def register(self, root_module: nn.Module) -> None:
        """Insert the virtual layer into this model."""
        name, module = find_layer(root_module, self.layer)
        if CHILD_NAME in module._modules:
            raise ValueError(f"layer {name!r} has a SubspaceFilter already; remove it first")
        _warn_of_training(root_module)
        virtual_layer = VirtualLayer(
            root_module, name, self.subspaces, self.concept, self.channel_dim, self.slot, self.tolerance
        )
        self.module, self.virtual_layer = module, virtual_layer
        module.add_module(CHILD_NAME, virtual_layer)
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
        self._handles, self._hook_handle = [], None
        if self.module is not None and self.module._modules.get(CHILD_NAME) is self.virtual_layer:
            del self.module._modules[CHILD_NAME]
        self.module = self.virtual_layer = None

    def copy(self) -> SubspaceFilter:
        """A filter with the same parameters, not inserted anywhere."""
        return SubspaceFilter(
            self.layer,
            self.subspaces,
            self.concept,
            self.channel_dim,
            slot=self.slot,
            tolerance=self.tolerance,
        )

    # Hooks take positional arguments only, as Zennit's own.

    def _before_model(self, module: nn.Module, args: Any) -> None:
        if self.virtual_layer is not None:
            self.virtual_layer.n_runs = 0

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.virtual_layer is not None and self.virtual_layer.n_runs == 0:
            raise ValueError(
                f"layer {self.virtual_layer.name!r} was not run in the forward pass of "
                f"{type(module).__name__}; choose a layer that is called as a module"
            )

    def _before_layer(self, module: nn.Module, args: Any) -> None:
        # Hooks run in the order of their registration. Registering anew puts the virtual layer behind those
        # that a composite adds after its canonizers.
        if self._hook_handle is not None:
            self._hook_handle.remove()
        self._hook_handle = module.register_forward_hook(self._after_layer)
        self._runs_before = 0 if self.virtual_layer is None else self.virtual_layer.n_runs

    def _after_layer(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.virtual_layer is None or self.virtual_layer.n_runs > self._runs_before:
            return None  # a container, such as Sequential, has run its new child by itself
        return self.virtual_layer(output)


def hooks_by_module(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """The Zennit hooks that are registered on a model's modules, once each."""
    for module in model.modules():
        owners = (getattr(function, "__self__", None) for function in module._forward_hooks.values())
        # Zennit registers several methods of a hook; dict keeps the order and drops the repetitions.
        for hook in dict.fromkeys(owner for owner in owners if isinstance(owner, Hook)):
            yield module, hook


def _warn_of_training(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if module.training and isinstance(module, _UNSAFE_IN_TRAINING):
            warnings.warn(
                f"{name!r} ({type(module).__name__}) is in training mode, so that explanations are random or "
                "depend on the rest of the batch; call model.eval() first",
                stacklevel=4,
            )
            return
