"""One examination of a model under a composite: a forward and a backward pass with hooks at every module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from drsa_core.layer import guarded
from torch import Tensor, nn
from zennit.core import Composite, Hook

from .._zennit import hooks_on, take_hooks_off
from ..canonizer import is_merged
from ..composite import GuardedComposite
from ..kept import BIASES, CanonicalPart
from ..reuse import SecondRuns
from .diagnosis import LayerRelevance
from .operations import OperationTrace, tensors

_NORMS = nn.modules.batchnorm._BatchNorm
_Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Examination:
    """What was seen in one pass; `Diagnosis` says what the fields mean.

    `parametric` are the names of modules with parameters, `canonical` those of modules to which a canonizer
    gave another forward, `derived` layers that make other weights of the parameters which their rule
    exchanges, `operations` maps (name, kind) of a module to the operations of its code.
    """

    relevance: float
    layers: list[LayerRelevance]
    unmerged_norms: list[str]
    operations: dict[tuple[str, str], set[str]]
    canonical: set[str]
    parametric: set[str]
    non_finite: list[str]
    logit_change: float
    reused: list[str]
    derived: list[str]


def examine(
    model: nn.Module, composite: Composite, input: Tensor, target: int | Tensor | None
) -> Examination:
    """Run the model under the composite, forwards and backwards, and note what happens to relevance.

    Whatever happens, the model is afterwards as it was, and nothing is left on the composite.
    """
    return guarded(model, lambda: _examine(model, composite, input, target))


def _examine(
    model: nn.Module, composite: Composite, input: Tensor, target: int | Tensor | None
) -> Examination:
    names = _names(model)
    statistics = {
        m: m.running_var.data_ptr() for m in names if isinstance(m, _NORMS) and m.running_var is not None
    }
    own_forward = {module for module in names if "forward" in vars(module)}
    _hold_constant(model)
    with torch.no_grad():
        # Copies, as a model may work in place on its input.
        original = _check_output(model(input.clone()), len(input))
    start_class = _check_target(target, original)

    derived: list[str] = []

    def under_rules() -> Examination:
        _take_rules_off_attention(model)
        every_name = names | _names(model)
        modules = list(model.modules())
        rules = {module: rule for module in modules if (rule := _rule(module)) is not None}
        replaced = {m for m in modules if "forward" in vars(m) and m not in own_forward}
        # A layer whose canonical form has a rule of its own, such as layer norm.
        own = {m for m in modules if isinstance(m, CanonicalPart) or (m in replaced and _is_affine_leaf(m))}
        rules |= dict.fromkeys(own - rules.keys(), "canonical form")

        watch = _Watch()
        watch.attach(modules)
        reused: dict[str, None] = {}

        def note_reuse(module: nn.Module, hook: Hook) -> None:
            reused.setdefault(f"{every_name[module]} ({type(module).__name__}: {type(hook).__name__})")

        SecondRuns(model, note_reuse).watch()
        x = input.detach().clone().requires_grad_()
        with torch.enable_grad():
            output = model(x.clone())
        if not output.requires_grad:
            raise ValueError(
                "the model's output does not depend on its input through autograd: relevance cannot reach "
                "the input. Is there a torch.no_grad(), a detach() or a rounding in its forward?"
            )
        start = output.detach() * nn.functional.one_hot(start_class, output.shape[1])
        operations = _operations(watch.trace, output, every_name, rules, replaced)
        torch.autograd.grad(output, x, start, allow_unused=True)
        return Examination(
            relevance=float(start.double().sum()),
            layers=watch.layers(every_name, rules),
            unmerged_norms=[
                every_name[module]
                for module in watch.order
                if isinstance(module, _NORMS)
                and rules.get(module, "Pass") == "Pass"
                and not is_merged(module, statistics.get(module))
            ],
            operations=operations,
            canonical={every_name[module] for module in replaced},
            parametric={every_name[m] for m in modules if next(m.parameters(), None) is not None},
            non_finite=[every_name[m] or "(model)" for m in watch.order if m in watch.non_finite],
            logit_change=_relative_change(output.detach(), original),
            reused=list(reused),
            derived=derived,
        )

    examined = GuardedComposite(
        composite, derived=lambda name, module: derived.append(f"{name} ({type(module).__name__})")
    )
    return examined.registered(model, under_rules)


class _Watch:
    """Relevance at the outputs and inputs of modules, summed over calls, positions and the batch."""

    def __init__(self) -> None:
        self.order: dict[nn.Module, None] = {}
        self.received: Counter[nn.Module] = Counter()
        self.handed_down: Counter[nn.Module] = Counter()
        self.magnitude: Counter[nn.Module] = Counter()
        self.non_finite: set[nn.Module] = set()
        self.trace = OperationTrace()

    def attach(self, modules: list[nn.Module]) -> None:
        """Hooks on modules; the guard takes them off."""
        for module in modules:
            # First before, last behind the hooks of the composite: what is seen is what the rule received and
            # returned.
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._behind, always_call=True)

    def layers(self, names: dict[nn.Module, str], rules: dict[nn.Module, str]) -> list[LayerRelevance]:
        return [
            LayerRelevance(
                names[module],
                type(module).__name__,
                rules.get(module),
                float(self.received[module]),
                float(self.handed_down[module]),
                float(self.magnitude[module]),
                _has_bias(module),
                module.keeps if isinstance(module, CanonicalPart) else BIASES,
            )
            for module in self.order
            if module in self.received
        ]

    def _before(
        self, module: nn.Module, args: _Arguments, kwargs: dict[str, Any]
    ) -> tuple[_Arguments, dict[str, Any]]:
        self.order.setdefault(module)
        self.trace.enter(module, tensors((args, kwargs)))

        def tap(x: Tensor) -> Tensor:
            if not x.requires_grad:
                return x
            # A copy, so that what other users of x return is not counted here.
            x = x.clone()
            x.register_hook(lambda relevance: self._note(self.handed_down, module, relevance))
            return x

        return _map(args, tap), _map(kwargs, tap)

    def _behind(self, module: nn.Module, args: _Arguments, output: Any) -> None:
        self.trace.leave(tensors(output))
        for tensor in tensors(output):
            if not bool(tensor.isfinite().all()):
                self.non_finite.add(module)
            if tensor.requires_grad:
                tensor.register_hook(
                    lambda relevance: self._note(self.received, module, relevance, magnitude=True)
                )

    def _note(
        self, counter: Counter[nn.Module], module: nn.Module, relevance: Tensor, magnitude: bool = False
    ) -> None:
        counter[module] += float(relevance.double().sum())  # type: ignore[assignment]
        if magnitude:
            self.magnitude[module] += float(relevance.double().abs().sum())  # type: ignore[assignment]
        if not bool(relevance.isfinite().all()):
            self.non_finite.add(module)


def _operations(
    trace: OperationTrace,
    output: Tensor,
    names: dict[nn.Module, str],
    rules: dict[nn.Module, str],
    replaced: set[nn.Module],
) -> dict[tuple[str, str], set[str]]:
    """Operations without a rule, by the module whose code they are."""
    found: dict[tuple[str, str], set[str]] = {}
    for running, operation in trace.lossy(output):
        # A forward that a canonizer wrote is not the model's code; whether it conserves relevance is
        # measured.
        if any(module in rules for module in running) or (running and running[-1] in replaced):
            continue
        place = (names[running[-1]], type(running[-1]).__name__) if running else ("", "outside of modules")
        found.setdefault(place, set()).add(operation)
    order = {name: index for index, name in enumerate(names.values())}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0][0], -1)))


def _rule(module: nn.Module) -> str | None:
    return next((type(hook).__name__ for hook in hooks_on(module)), None)


def _take_rules_off_attention(model: nn.Module) -> None:
    """Zennit counts attention among the activations, and its rule `Pass` fails on three inputs.

    Even if it did not: attention mixes tokens, and `Pass` would explain each by itself.
    """
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and _rule(module) == "Pass":
            take_hooks_off(module)


def _is_affine_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None and _has_bias(module)


def _has_bias(module: nn.Module) -> bool:
    # A batch norm without one still subtracts its mean.
    return getattr(module, "bias", None) is not None or isinstance(module, _NORMS)


def _names(model: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in model.named_modules()}


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same lists, tuples and dictionaries, with a function applied to the tensors in them."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) is dict:
        return {key: _map(part, function) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(part, function) for part in value)
    return value


def _relative_change(output: Tensor, original: Tensor) -> float:
    return float((output - original).abs().max() / original.abs().max().clamp(min=1e-30))


def _check_output(output: object, batch: int) -> Tensor:
    wish = "the model's output must be one tensor of shape (N, classes)"
    if not isinstance(output, Tensor):
        raise TypeError(
            f"{wish}, got {type(output).__name__}; wrap the model so that it returns the logits, one of "
            "transformers by TransformersModel"
        )
    if output.ndim != 2 or len(output) != batch or not output.shape[1]:
        hint = "; add the axis of classes, as in output[:, None]" if output.ndim == 1 else ""
        raise ValueError(f"{wish}, got {tuple(output.shape)} for {batch} examples{hint}")
    if not output.is_floating_point():
        raise TypeError(f"{wish}, with logits in floating point, got {output.dtype}")
    return output


def _check_target(target: int | Tensor | None, output: Tensor) -> Tensor:
    """The class to explain, one for each example."""
    examples, classes = output.shape
    if target is None:
        return output.argmax(1)
    chosen = torch.as_tensor(target, device=output.device)
    if chosen.is_floating_point() or chosen.is_complex() or chosen.dtype == torch.bool:
        raise TypeError(f"target must be an int or a tensor of ints, got {chosen.dtype}")
    if chosen.ndim > 1 or (chosen.ndim == 1 and len(chosen) != examples):
        raise ValueError(
            f"target must be one class, or one for each of the {examples} examples, got shape "
            f"{tuple(chosen.shape)}"
        )
    if bool((chosen < 0).any()) or bool((chosen >= classes).any()):
        raise ValueError(f"target must be in 0 … {classes - 1}, got {chosen.tolist()}")
    return chosen.long().expand(examples)


def _hold_constant(model: nn.Module) -> None:
    """Evaluation mode, and gradients from the input alone; the guard puts both back."""
    for module in model.modules():
        module.training = False
    for parameter in model.parameters():
        parameter.requires_grad_(False)
