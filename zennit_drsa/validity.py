"""`validate` refuses what would give wrong maps without an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from drsa_core.layer import batch_dependence, eager, find_layer, positional_inputs
from drsa_core.lrp import check_exchangeable, is_additive
from drsa_core.model_state import restored
from torch import Tensor, nn
from zennit.core import Composite

from ._zennit import (
    check_norms,
    exchanges_parameters,
    has_cover,
    holds_relevance,
    hooks_by_module,
    hooks_on,
    keeps_of_forward,
    puts_identities,
    register,
    runs_with_input_alone,
    unregister,
)
from .canonizers import kind
from .kept import tensors_in


def validate(
    model: nn.Module,
    composite: Composite | None,
    layer: str | nn.Module,
    example: Tensor,
    *,
    registered: bool = False,
    signal: str | None = None,
) -> None:
    """Refuse a model on which these rules would give wrong maps without an error.

    The model is left as it was.

    Parameters
    ----------
    model : module
    composite : zennit.core.Composite or None
        None stands for plain gradients or, if `registered`, for whatever rules are on the model.
    layer : str or module
        The concept layer.
    example : tensor, shape (N, …)
        An input; one example of it is run, or all if the output depends on the batch.
    registered : bool
        Whether the composite is on the model already. It is there afterwards, too.
    signal : {"relevance", "gradient"}, optional
        What flows backwards, if the user has said so; the rules are then taken as they are.

    Raises
    ------
    ValueError
        If a norm has no rule, if a weight that rules exchange is no parameter, if a module with a rule runs
        twice, without gradients or with further arguments, if the layer is inside of a module whose rule is
        for the whole of it, or if canonizers change the output.
    """
    model = eager(model)
    layer_name, _ = find_layer(model, layer)
    is_training = batch_dependence(model)[0] is not None
    example = (example if is_training else example[:1]).detach()
    canonizers = [] if composite is None else composite.canonizers
    keeps_output = all(getattr(type(canonizer), "keeps_output", False) is True for canonizer in canonizers)

    def run(build_graph: bool) -> Any:
        with torch.set_grad_enabled(build_graph):
            return model(example.clone().requires_grad_(build_graph).clone())

    def under_rules() -> Any:
        if signal is None:
            _check_cover(model, layer_name)
            check_carriers(model, composite)
        with Checks(model).watching():
            return run(True)

    rules = None if registered else composite
    with torch.random.fork_rng({example.device} if example.is_cuda else ()), torch.inference_mode(False):
        with under(rules, model):
            canonized = under_rules()
        if keeps_output or is_training or not isinstance(canonized, Tensor):
            return
        if registered and composite is not None:
            unregister(composite)
        try:
            with restored(model):
                untouched = run(False)
        finally:
            if registered and composite is not None:
                register(composite, model)
    change = relative_change(canonized.detach(), untouched)
    # Merging batch norms rounds differently; half precision has few digits.
    tolerance = 1e-3 if untouched.dtype in (torch.float32, torch.float64) else 0.05
    if untouched.isfinite().all() and not change <= tolerance:
        raise ValueError(
            f"the composite changes the model's output by {change:.1%} of its largest value, so that "
            f"another function would be explained (canonizers: "
            f"{', '.join(type(canonizer).__name__ for canonizer in canonizers)}); see zennit_drsa.doctor for "
            "canonizers that suit this model"
        )


def under(composite: Composite | None, model: nn.Module) -> restored:
    """Context in which the rules are on the model."""
    if composite is None:
        return restored(model)
    return restored(model, lambda: register(composite, model), lambda: unregister(composite))


def relative_change(output: Tensor, original: Tensor) -> float:
    """The largest change, relative to the largest output."""
    return float((output - original).abs().max() / original.abs().max().clamp(min=1e-30))


# ---------------------------------------------------------------------- what rules cannot serve


def _check_cover(model: nn.Module, layer_name: str) -> None:
    """Refuse a layer inside of a module with a rule for the whole of it: no relevance reaches the layer."""
    name = layer_name
    while name:
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
        for hook in filter(has_cover, hooks_on(module)):
            raise ValueError(
                f"layer {layer_name!r} is inside of {name or 'the model'} ({type(module).__name__}), whose "
                f"rule {type(hook).__name__} is for the whole of it: no relevance reaches the layer. Choose "
                "a layer outside, or that module itself, or give rules to the modules inside instead"
            )


def check_carriers(model: nn.Module, composite: Composite | None) -> None:
    """Refuse gradients of a model in which a canonizer has modules hand relevance on in their place."""
    for handle in [] if composite is None or holds_relevance(model) else composite.handles:
        if getattr(handle, "carries_relevance", False):
            raise ValueError(
                f"{type(handle).__name__} makes modules of this {type(model).__name__} hand relevance on, "
                "but no rule that carries relevance is active: what comes out would be neither that nor a "
                "gradient. Leave the canonizer out, as gradients need none, or use LRP rules"
            )


class Checks:
    """Modules with rules, watched in a forward pass: each must run once, with one input and its own weights.

    Rules that keep the input of their module (Zennit's `BasicHook`, `GraphRule` here) would compute the
    relevance of a first run with the input of the second.

    Parameters
    ----------
    model : module
        With its rules registered.
    refuse : bool
        Whether second runs and derived weights are errors, or listed in `reused` and `derived`.
    """

    def __init__(self, model: nn.Module, refuse: bool = True) -> None:
        self._model, self._refuse = model, refuse
        self._names = {module: name for name, module in model.named_modules()}
        self._ran: set[nn.Module] = set()
        self.reused: dict[str, None] = {}
        self.derived: dict[str, None] = {}
        if holds_relevance(model):
            check_norms(model)
        for module, hook in hooks_by_module(model):
            if exchanges_parameters(hook):
                check_exchangeable(module, self._names[module])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Check forward passes that are made in this context."""
        ruled = [(name, module) for module, name in self._names.items() if hooks_on(module)]
        handles = [m.register_forward_pre_hook(self._check, prepend=True, with_kwargs=True) for _, m in ruled]
        handles += positional_inputs(m for _, m in ruled)  # the last to be prepended is the first to run
        # Before its first pass a `SubspaceFilter` makes one of its own.
        handles.append(self._model.register_forward_pre_hook(lambda *_: self._ran.clear()))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _check(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self._names[module]
        where = f"{name!r} ({type(module).__name__})"
        needs_graph = any(x.requires_grad for x in tensors_in((args, kwargs)))
        for hook in hooks_on(module):
            if needs_graph and not torch.is_grad_enabled() and puts_identities(hook):
                raise ValueError(
                    f"module {name!r} runs without gradients inside of the model, where rules cannot be "
                    "applied: switch checkpointing off, or set use_reentrant=False in it; or take "
                    "the torch.no_grad() away"
                )
            if module in self._ran and keeps_of_forward(hook):
                self.reused.setdefault(f"{name} ({type(module).__name__}: {type(hook).__name__})")
                if self._refuse:
                    raise ValueError(
                        f"module {where} runs more than once in a forward pass, but its rule "
                        f"{type(hook).__name__} remembers one input only: the maps would be wrong. Give each "
                        "use a module of its own, for instance copy.deepcopy(module), which has the same "
                        "weights; or use a composite without such a rule there, such as ConvNetGamma, or none"
                    )
            if runs_with_input_alone(hook) and (further := _further_arguments(module, args, kwargs)):
                raise ValueError(
                    f"module {where} is called with more than its input ({', '.join(further)}), but its "
                    f"rule {type(hook).__name__} runs it again with that input only: the maps would be "
                    "wrong. Have the model apply what the argument does outside of this module, or use "
                    "other rules"
                )
        # A run without a graph is not differentiated; it does harm if it comes after one with a graph.
        if needs_graph and torch.is_grad_enabled():
            if module not in self._ran and any(map(exchanges_parameters, hooks_on(module))):
                self._check_weights(module, args)
            self._ran.add(module)

    def _check_weights(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # What a canonizer has written, and layers of torch, use their parameters as they are.
        is_known = "forward" in vars(module) or kind(module).__module__.partition(".")[0] == "torch"
        if is_known or module.training or not module._parameters or is_additive(module, args[0][:1].detach()):
            return
        self.derived.setdefault(f"{self._names[module]} ({type(module).__name__})")
        if self._refuse:
            raise ValueError(
                f"layer {self._names[module]!r} ({type(module).__name__}) does not use its parameters "
                "directly (standardised weights or low-rank updates, for instance), so that LRP rules cannot "
                "exchange them. Explain a copy of the model with torch's own layer there and the weights "
                "that this one works out to, or use rules that leave weights alone (γ = 0, Epsilon)"
            )


def _further_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Arguments but for the first that differ from their defaults."""
    if len(args) < 2 and not kwargs:
        return []
    known = signature(module.forward)

    def is_default(name: str, value: object) -> bool:
        default = known.parameters[name].default
        # Tensors compare entry by entry, and none of them is a default.
        return value is default or (isinstance(value, bool | int | float | str) and value == default)

    given = list(known.bind(*args, **kwargs).arguments.items())[1:]
    return [name for name, value in given if not is_default(name, value)]
