"""The layer at which concepts are found: its name, the forward pass cut there, the virtual layer, losses."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .checks import warn_user
from .subspaces import Subspaces
from .targets import Target, select_scores, target_of_example

Forward: TypeAlias = Callable[..., Any]
Inputs: TypeAlias = "Tensor | tuple[Tensor, ...]"

#: Share of lost relevance beyond which there is a warning. Standard rules leave nothing on zero activations,
#: and most layers have nothing around them.
TOLERANCE = 1e-3


class RelevanceLossWarning(UserWarning):
    """The concept maps miss a part of the relevance, so that they do not add up to the whole."""


# ---------------------------------------------------------------------- naming the layer


def eager(model: nn.Module) -> nn.Module:
    """The module that hooks can reach: the original of a `torch.compile`d one."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "TorchScript modules do not run hooks; give the Python model that was scripted or traced"
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise TypeError("the model was built in torch.inference_mode() and has no gradients; load it outside")
    original = getattr(model, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else model


def find_layer(model: nn.Module, layer: str | nn.Module) -> tuple[str, nn.Module]:
    """Dotted name and module of a layer given as either.

    Raises
    ------
    ValueError
        If the model has no such layer; the closest names are suggested.
    """
    modules = dict(model.named_modules())
    if isinstance(layer, nn.Module):
        layer = getattr(layer, "_orig_mod", layer)
        for name, module in modules.items():
            if module is layer:
                return name, module
        raise ValueError(
            f"the layer {type(layer).__name__} is not a module of this {type(model).__name__}; take it from "
            "the model that is explained, or give its dotted name"
        )
    if not isinstance(layer, str):
        raise TypeError(f"layer must be a module or its dotted name, got {type(layer).__name__}")
    if layer in modules:
        return layer, modules[layer]
    aliases = dict(model.named_modules(remove_duplicate=False))
    if layer in aliases:  # one module, one name: provenances are compared by it
        return next((name, module) for name, module in modules.items() if module is aliases[layer])
    close = difflib.get_close_matches(layer, modules, n=3, cutoff=0.3)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "see model.named_modules()"
    raise ValueError(f"{type(model).__name__} has no layer {layer!r}; {hint}")


# ---------------------------------------------------------------------- one batch to explain


class _Stop(BaseException):
    """Ends a forward pass at the layer. Not an Exception, which a model might catch."""


@dataclass(frozen=True)
class Request:
    """One batch to explain.

    Attributes
    ----------
    forward : callable
        The model, or another forward function.
    layer, layer_name
        The module whose output is the activation a = φ(x), and its name in messages.
    inputs : tuple of tensor
        Shapes (N, …).
    target
        Which output is explained.
    channel_dim : int
        Axis of the features in the activation.
    args : tuple
        Additional forward arguments. As in Captum, tensors with N rows hold one row for each example;
        anything else is the same for all.
    """

    forward: Forward
    layer: nn.Module
    layer_name: str
    inputs: tuple[Tensor, ...]
    target: Target
    channel_dim: int = 1
    args: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs[0])

    @property
    def has_rows(self) -> tuple[bool, ...]:
        """Which of `args` hold one row for each example."""
        return tuple(isinstance(v, Tensor) and v.ndim > 0 and len(v) == len(self) for v in self.args)

    def mapped(self, change: Callable[[Tensor], Tensor], target: Target) -> Request:
        """The request with `change` applied to what has one row for each example."""
        args = tuple(change(v) if rows else v for v, rows in zip(self.args, self.has_rows, strict=True))
        return replace(self, inputs=tuple(map(change, self.inputs)), args=args, target=target)

    def example(self, i: int) -> Request:
        """The request for example i as a batch of one."""
        return self.mapped(lambda rows: rows[i : i + 1], target_of_example(self.target, i))

    def scores(self, output: object, n_rows: int | None = None) -> Tensor:
        """The explained score y of each of `n_rows` (default N) rows of the model's output, shape (n,)."""
        return select_scores(output, self.target, len(self) if n_rows is None else n_rows)

    @contextmanager
    def running(self, cut: Callable[[Tensor], Tensor]) -> Iterator[Any]:
        """The model's output, with `cut(activation)` passed on from the layer.

        A backward pass inside the context may run checkpointed parts again; they get `cut(activation)` too.
        """
        n_runs, in_forward, needs_graph = 0, True, torch.is_grad_enabled()

        def hook(module: nn.Module, args: object, output: object) -> Tensor:
            nonlocal n_runs
            n_runs += in_forward
            if n_runs > 1:
                raise ValueError(
                    f"layer {self.layer_name!r} runs more than once in a forward pass, so that it has no "
                    "single activation; choose a layer that runs once (e.g. the block around it)"
                )
            return cut(self._checked(output, len(self), needs_graph))

        handle = self.layer.register_forward_hook(hook)
        try:
            output = self.forward(*copies((*self.inputs, *self.args)))
            if not n_runs:
                raise ValueError(self._not_reached())
            in_forward = False
            yield output
        finally:
            handle.remove()

    def activation(self, *args: Any) -> Tensor:
        """φ(x), shape (N, …, D, …), for the request's arguments or others; the pass ends at the layer."""
        given, needs_graph = args or (*self.inputs, *self.args), torch.is_grad_enabled()
        found: list[Tensor] = []

        def hook(module: nn.Module, args: object, output: object) -> None:
            found.append(self._checked(output, len(given[0]), needs_graph))
            raise _Stop

        handle = self.layer.register_forward_hook(hook)
        try:
            self.forward(*copies(given))
        except _Stop:
            return found[0]
        finally:
            handle.remove()
        raise ValueError(self._not_reached())

    def refuse_tokens_first(self, activation: Tensor) -> bool:
        """Whether (N, T, D) could as well be (T, N, D): an error if it is, by a run of one example."""
        if activation.ndim != 3 or len(self) == 1 or activation.shape[1] != len(self):
            return False
        with torch.no_grad():
            self.example(0).activation()
        return True

    def _checked(self, output: object, n_examples: int, needs_graph: bool) -> Tensor:
        if needs_graph and not torch.is_grad_enabled():
            raise ValueError(
                f"layer {self.layer_name!r} runs without gradients inside the model: switch checkpointing "
                "off, or set use_reentrant=False in it; or take the torch.no_grad() away, or choose a layer "
                "above it"
            )
        return as_activation(output, self.layer, self.layer_name, self.channel_dim, n_examples)

    def _not_reached(self) -> str:
        return (
            f"layer {self.layer_name!r} was not run in the forward pass: it is no part of this model, or the "
            "model skips it for these inputs; choose a layer that is called as a module"
        )


def copies(args: Sequence[Any]) -> tuple[Any, ...]:
    """Copies of arguments that a forward function may overwrite, also inside lists and dictionaries."""
    return tuple(map(_copied, args))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return {key: _copied(part) for key, part in value.items()} if type(value) is dict else value


def positional_inputs(modules: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Hand the first input of modules with hooks on by position where a model gives it by name.

    Hooks of Captum and of Zennit 0.5.1 see positional arguments only. Those that are there already run after
    these.
    """
    handles = []
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks:
            handles.append(module.register_forward_pre_hook(_by_position, prepend=True, with_kwargs=True))
    return handles


def _by_position(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args or not kwargs:
        return None
    parameter = next(iter(signature(module.forward).parameters.values()))
    first = parameter.name
    if first not in kwargs or parameter.kind is parameter.KEYWORD_ONLY:
        raise ValueError(
            f"a {type(module).__name__} is called with the keywords {', '.join(sorted(kwargs))} only, none "
            "of which is its first argument, but rules need its input: call it as module(x)"
        )
    return (kwargs[first],), {name: value for name, value in kwargs.items() if name != first}


# ---------------------------------------------------------------------- shapes at the layer


_FEATURES_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.GroupNorm)


def as_activation(
    output: object, layer: nn.Module, name: str, channel_dim: int, n_examples: int | None = None
) -> Tensor:
    """A layer's output, if it is one floating-point tensor (N, …) with features along `channel_dim`."""
    if not isinstance(output, Tensor) or output.ndim < 2 or not output.is_floating_point():
        got = f"{output.dtype} {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(
            f"layer {name!r} must return one floating-point tensor of shape (N, D, …) or (N, …, D), got "
            f"{got}; "
            "choose a layer inside or around it that does"
        )
    shape = tuple(output.shape)
    if n_examples is not None and shape[0] != n_examples:
        hint = ""
        if shape[1] == n_examples:
            hint = "; if its second axis runs over them, build its attention or RNN with batch_first=True"
        raise ValueError(
            f"the first axis of a layer's output must run over the examples, {n_examples} here, but layer "
            f"{name!r} gives shape {shape}; choose another layer, e.g. the block around it{hint}. A single "
            "example is a batch too, x[None]"
        )
    if not -len(shape) <= channel_dim < len(shape) or channel_dim % len(shape) == 0:
        raise ValueError(
            f"channel_dim={channel_dim} is no axis of features in the activation of layer {name!r}, of shape "
            f"{shape}; use 1 for (N, D, …), -1 for tokens (N, T, D)"
        )
    if channel_dim == 1 and len(shape) > 2 and _has_features_last(layer, shape):
        warn_user(
            f"the activation of layer {name!r} has shape {shape}, which looks like tokens of {shape[-1]} "
            "features, but channel_dim=1 splits the tokens; set channel_dim=-1 to split features",
        )
    return output


def check_fits(activation: Tensor, n_features: int, name: str, channel_dim: int) -> None:
    """Raise if subspaces of `n_features` dimensions do not fit an activation."""
    if activation.shape[channel_dim] != n_features:
        raise ValueError(
            f"the subspaces have D = {n_features} features, but layer {name!r} has "
            f"{activation.shape[channel_dim]} along channel_dim={channel_dim} of its output "
            f"{tuple(activation.shape)}; use subspaces that were fitted at "
            "this layer, or give its channel_dim (-1 for tokens)"
        )


def _has_features_last(layer: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether the last module in the layer that has a width has that of the last axis."""
    for module in reversed(list(layer.modules())):
        if isinstance(module, _FEATURES_FIRST):
            return False
        width = getattr(module, "out_features", None) or getattr(module, "normalized_shape", (None,))[-1]
        if width == shape[-1]:
            return width != shape[1]
    return False


# ---------------------------------------------------------------------- the virtual layer (section 3)


def context_from_relevance(a: Tensor, relevance: Tensor) -> Tensor:
    """Context c = R ⊘ a, and 0 on inactive neurons (section 3.2)."""
    active = a != 0
    return torch.where(active, relevance / torch.where(active, a, 1), 0)


def filter_context(c: Tensor, subspaces: Subspaces, dim: int = 1) -> Tensor:
    """Contexts that pass back through each block, U_k V_kᵀ c.

    Parameters
    ----------
    c : tensor, shape (N, …, D, …)
        Contexts (or plain gradients), features along `dim`.

    Returns
    -------
    tensor, shape (K, N, …, D, …)
        The K parts along a new first axis, each of them contiguous.
    """
    return torch.stack([subspaces.project_context(c, k, dim) for k in range(subspaces.n_subspaces)])


def filter_relevance(a: Tensor, relevance: Tensor, subspaces: Subspaces, dim: int = 1) -> Tensor:
    """Relevance that passes through each block, R⁽ᵏ⁾ = a ⊙ U_k V_kᵀ (R ⊘ a), shape (K, N, …, D, …).

    For complete subspaces the parts add up to R exactly where a ≠ 0.
    """
    return a * filter_context(context_from_relevance(a, relevance), subspaces, dim)


# ---------------------------------------------------------------------- the forward pass, cut at the layer


class Cut:
    """The two ends of the graph at the layer; called with the activation in the forward pass.

    Attributes
    ----------
    below : tensor, shape (N, …, D, …)
        The activation, with its graph down to the inputs.
    above : tensor, shape (N, …, D, …)
        The same values: what the part above the layer depends on.
    """

    below: Tensor
    above: Tensor

    def __init__(self, is_connected: bool = False) -> None:
        # Connected ends give second derivatives; only without does what goes around the layer show.
        self._is_connected = is_connected

    def __call__(self, activation: Tensor) -> Tensor:
        # Copies: the next layer may work in place.
        self.below = activation.clone()
        if self._is_connected:
            self.above = self.below.clone()
        else:
            self.above = activation.detach().clone().requires_grad_(torch.is_grad_enabled())
        return self.above.clone()


class Split:
    """A forward pass, cut at the layer: taken back to the layer once, and from there to the inputs by
    `below`.

    Parameters
    ----------
    request : Request
    start : function, optional
        The output ↦ what the backward pass begins with. Default: the gradient of the explained score.
    passes_relevance : bool
        Whether rules are in force that pass relevance in place of gradients.
    activation : tensor, optional
        a, where rules run another network than the model; default: the activation of this forward pass.
    create_graph : bool
        Whether the results are to be differentiated again.
    tolerance : float
        Share of lost relevance beyond which there is a warning.

    Attributes
    ----------
    output : tensor
        The model's output, with its graph.
    activation : tensor, shape (N, …, D, …)
        a, detached.
    arriving : tensor, shape (N, …, D, …)
        What arrives from above: relevance R, or the gradient ∂y/∂a.
    context : tensor, shape (N, …, D, …)
        c = R ⊘ a (0 where a = 0), or the gradient itself (section 3.2, Note B.2).
    lost : float
        Share of the relevance at the layer that sits on zero activations.
    around : float or None
        Share of what reaches the inputs by paths around the layer; None where it cannot be told.
    """

    def __init__(
        self,
        request: Request,
        *,
        start: Callable[[Tensor], Tensor] | None = None,
        passes_relevance: bool = False,
        activation: Tensor | None = None,
        create_graph: bool = False,
        tolerance: float = TOLERANCE,
    ) -> None:
        # Token numbers and masks among the inputs have no gradient: they are constants.
        inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in request.inputs]
        self._inputs = tuple([x for x in inputs if x.requires_grad])
        self._name, self._create_graph = request.layer_name, create_graph
        self._cut = Cut(is_connected=create_graph)
        request = replace(request, inputs=tuple(inputs))
        with torch.enable_grad():
            with request.running(self._cut) as self.output:
                pass
            is_ambiguous = self._cut.below.ndim == 3 and activation is None
            if is_ambiguous and request.refuse_tokens_first(self._cut.below):
                with request.running(self._cut) as self.output:  # hooks hold what the last run left them
                    pass
            explained = request.scores(self.output).sum() if start is None else self.output
            sources = (self._cut.above,) if create_graph else (self._cut.above, *self._inputs)
            cotangent = None if start is None else start(self.output)
            arriving, *around = _gradients(explained, sources, cotangent, create_graph, retain_graph=True)
        if arriving is None:
            raise ValueError(
                f"no gradient flows from the explained score to layer {self._name!r}: the score does not "
                "depend on it, or the model detaches it (torch.no_grad, .detach(), argmax). Choose another "
                "layer or target"
            )
        self.arriving: Tensor = arriving
        self.activation = self._cut.below.detach() if activation is None else activation
        self._factor: Tensor | None = None
        self.context, self.lost = arriving, 0.0
        if passes_relevance:
            self._factor = self._cut.below if create_graph else self.activation
            self.context = context_from_relevance(self._factor, arriving)
            self.lost = lost_relevance(self.activation, arriving.detach())
            if self.lost > tolerance:
                warn_of_loss(self.lost, self._name)
        self.around: float | None = None if create_graph or not self._inputs else 0.0
        bypassed = _size(around)
        if bypassed > 0:
            self.around = bypassed / (_size(self.below(arriving)) + bypassed)
            if self.around > tolerance:
                warn_of_bypass(self.around, self._name)

    def below(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        """What reaches each input if `cotangent` leaves the layer downwards, shapes (N, …)."""
        # A strided cotangent makes batch norms compute nonsense for one example, without an error.
        return gradients_at_inputs(
            self._cut.below,
            self._inputs,
            self._name,
            cotangent.contiguous(),
            self._create_graph,
            retain_graph=True,
        )

    def cotangents(self, subspaces: Subspaces, dim: int) -> Iterator[Tensor]:
        """What leaves the layer downwards for each block: R⁽ᵏ⁾ = a ⊙ U_kU_kᵀc, or U_kU_kᵀc for gradients."""
        check_fits(self.activation, subspaces.n_features, self._name, dim)
        for k in range(subspaces.n_subspaces):
            part = subspaces.project_context(self.context, k, dim)
            yield part if self._factor is None else self._factor * part

    def through(self, subspaces: Subspaces, dim: int) -> tuple[Tensor, ...]:
        """What reaches each input through each block, shapes (N, K, …)."""
        by_concept = [self.below(part) for part in self.cotangents(subspaces, dim)]
        return tuple(torch.stack(parts, dim=1) for parts in zip(*by_concept, strict=True))


def gradients_at_inputs(
    outputs: Tensor,
    inputs: tuple[Tensor, ...],
    layer_name: str,
    cotangent: Tensor | None = None,
    create_graph: bool = False,
    retain_graph: bool = False,
) -> tuple[Tensor, ...]:
    """Gradients of the layer's output at the inputs, or an error that says why there are none."""
    found = []
    for gradient in _gradients(outputs, inputs, cotangent, create_graph, retain_graph):
        if gradient is None:
            raise ValueError(
                f"no gradient flows from layer {layer_name!r} to every input: choose a layer above all "
                "inputs, pass the others as additional_forward_args, or wrap a perturbation method, which "
                "needs none"
            )
        found.append(gradient)
    return tuple(found)


def _gradients(
    outputs: Tensor,
    sources: tuple[Tensor, ...],
    cotangent: Tensor | None,
    create_graph: bool,
    retain_graph: bool,
) -> Sequence[Tensor | None]:
    if not outputs.requires_grad:
        return [None] * len(sources)
    try:
        return torch.autograd.grad(
            outputs, sources, cotangent, retain_graph or create_graph, create_graph, allow_unused=True
        )
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise ValueError(
            "the model is checkpointed: switch that off, or set use_reentrant=False in it"
        ) from error


# ---------------------------------------------------------------------- what concept maps cannot hold


def lost_relevance(a: Tensor, relevance: Tensor) -> float:
    """Share of Σ|R| that sits on zero activations, where the virtual layer cannot pass it on."""
    total = relevance.abs().sum(dtype=torch.float64)  # sums of half precision overflow
    return float(relevance.abs()[a == 0].sum(dtype=torch.float64) / total) if total > 0 else 0.0


def warn_of_loss(lost: float, layer_name: str) -> None:
    """Warn that relevance sits on zero activations."""
    warn_user(
        f"{lost:.1%} of the relevance at layer {layer_name!r} sits on zero activations and is lost; the "
        "concept maps do not add up to the whole. Choose a layer whose zero activations carry no relevance "
        "(after the activation function, say), or rules that give them none",
        RelevanceLossWarning,
    )


def warn_of_bypass(share: float, layer_name: str) -> None:
    """Warn that a part of what reaches the inputs goes around the layer."""
    warn_user(
        f"{share:.1%} of what reaches the input goes around layer {layer_name!r} (a skip connection, say) "
        "and is in none of the concept maps, so that they do not add up to the whole. Choose the block "
        "around it, whose output is all that the layers above see",
        RelevanceLossWarning,
    )


def _size(parts: Iterable[Tensor | None]) -> float:
    size = 0.0
    for part in parts:
        if part is not None:
            size += float(part.detach().abs().sum(dtype=torch.float64))
    return size


_UNSAFE_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm, nn.RReLU)
# Of torchvision and timm, by name: they leave out branches at random.
_RANDOM_IN_TRAINING = ("StochasticDepth", "DropPath", "DropBlock2d", "DropBlock3d", "PatchDropout")


def batch_dependence(model: nn.Module) -> tuple[str | None, bool]:
    """The first module whose output depends on batch or chance, or None; and whether eval() cures it."""
    for name, module in model.named_modules():
        where = f"{name!r} ({type(module).__name__})" if name else type(module).__name__
        if module.training and _is_unsafe_in_training(module):
            return where, True
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if is_norm and not module.training and module.running_mean is None:
            return where, False
    return None, False


def warn_of_training(model: nn.Module) -> None:
    """Warn of layers whose output depends on the batch or on chance: explanations make no sense there."""
    where, in_training = batch_dependence(model)
    if where is not None:
        message = (
            "is in training mode, so that explanations depend on the batch or on chance; call model.eval() "
            "first"
            if in_training
            else "normalises by the statistics of the batch, in evaluation mode too; use "
            "track_running_stats=True, or explain the same batch each time"
        )
        warn_user(f"{where} {message}")


def _is_unsafe_in_training(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    return isinstance(module, _UNSAFE_IN_TRAINING) or type(module).__name__ in _RANDOM_IN_TRAINING


def replay_rng(inputs: Iterable[Tensor], enabled: bool = True) -> AbstractContextManager[None]:
    """Context after which the random generators give again what they gave inside it."""
    return torch.random.fork_rng({x.device for x in inputs if x.is_cuda}, enabled=enabled)


def sum_over_positions(values: Tensor, dim: int) -> Tensor:
    """Sum (N, …, K, …) over all axes but the first and `dim`, shape (N, K)."""
    moved = values.movedim(dim, 1)
    return moved.reshape(*moved.shape[:2], -1).sum(2)
