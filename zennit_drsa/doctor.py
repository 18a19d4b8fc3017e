"""Is LRP valid on this model, with this composite? What a user must know before trusting a map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from zennit.core import Composite, Hook

from .diagnosis import Diagnosis, LayerRelevance
from .timm import FAMILIES, MergedNorm

_PRODUCTS = {"mul", "mul_", "div", "div_", "true_divide", "matmul", "bmm", "einsum", "mean"}
_NORMS = nn.modules.batchnorm._BatchNorm
_SUMS = {"add", "add_", "sub", "sub_", "rsub"}


def doctor(
    model: nn.Module,
    composite: Composite,
    input: Tensor,
    target: int | Tensor | None = None,
    verbose: bool = True,
) -> Diagnosis:
    """Examine whether LRP with this composite is valid on this model; the model is left as it was.

    Parameters
    ----------
    model : module
        With an output of shape (N, classes).
    composite : zennit.core.Composite
        With its canonizers; not registered at the moment.
    input : tensor, shape (N, …)
        A few real inputs.
    target : int or tensor of shape (N,), optional
        Class to explain; the predicted one if left out.
    verbose : bool
        Whether to print the diagnosis.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(composite, Composite):
        raise TypeError(f"composite must be a Zennit composite, got {type(composite).__name__}")
    if not isinstance(input, Tensor) or not input.is_floating_point() or len(input) == 0:
        raise TypeError("input must be a floating-point tensor with at least one example")
    names = {module: name for name, module in model.named_modules()}
    statistics = {
        m: m.running_var.data_ptr() for m in names if isinstance(m, _NORMS) and m.running_var is not None
    }
    own_forward = {module for module in names if "forward" in vars(module)}
    with torch.no_grad(), _evaluation(model):
        original = model(input)
    if original.ndim != 2:
        raise ValueError(f"the model's output must have the shape (N, classes), got {tuple(original.shape)}")
    with _constant_parameters(model), _evaluation(model):
        calls = _functional_calls(model, composite, input)
        examination = _Examination()
        with composite.context(model), ExitStack() as stack:
            modules = dict(model.named_modules())
            names |= {module: name for name, module in modules.items()}
            rules = {module: rule for module in modules.values() if (rule := _rule(module)) is not None}
            replaced = {m for m in modules.values() if "forward" in vars(m) and m not in own_forward}
            # A layer whose canonical form has a rule of its own, such as layer norm.
            rules |= {m: "canonical form" for m in replaced - rules.keys() if _is_affine_leaf(m)}
            examination.watch(modules, stack)
            x = input.detach().clone().requires_grad_()
            output = model(x)
            chosen = (
                output.detach().argmax(1) if target is None else torch.as_tensor(target, device=output.device)
            )
            start = output.detach() * nn.functional.one_hot(chosen.expand(len(output)), output.shape[1])
            torch.autograd.grad(output, x, start, allow_unused=True)
            unmerged = [
                names[module]
                for module in examination.order
                if isinstance(module, _NORMS)
                and rules.get(module, "Pass") in ("Pass", "canonical form")
                and not _is_merged(module, statistics.get(module))
            ]
            layers = examination.layers(names, rules)
    return _conclude(
        model,
        layers,
        float(start.double().sum()),
        unmerged=unmerged,
        functional=[
            f"{name or '(model)'} ({kind}: {', '.join(sorted(ops))})" for (name, kind), ops in calls.items()
        ],
        canonical={names[module] for module in replaced},
        non_finite=[
            names[module] or "(model)" for module in examination.order if module in examination.non_finite
        ],
        logit_change=float((output.detach() - original).abs().max() / original.abs().max().clamp(min=1e-30)),
        verbose=verbose,
    )


def _conclude(
    model: nn.Module,
    layers: list[LayerRelevance],
    relevance: float,
    *,
    unmerged: list[str],
    functional: list[str],
    canonical: set[str],
    non_finite: list[str],
    logit_change: float,
    verbose: bool,
) -> Diagnosis:
    found = {layer.name: layer for layer in layers}
    ruled = [layer for layer in layers if layer.rule and not _has_ruled_ancestor(layer.name, found)]
    scale = abs(relevance) or 1.0
    drift: dict[str, float] = {}
    without_rule: list[str] = []
    for layer in layers:
        if layer.rule or _has_ruled_ancestor(layer.name, found):
            continue
        children = [child for child in layers if _is_child(child.name, layer.name, found)]
        unexplained = layer.lost - sum(child.lost for child in children)
        # Sums of many terms of both signs: rounding grows with their magnitude.
        if not abs(unexplained) <= 1e-3 * scale + 1e-4 * layer.magnitude:
            drift[layer.name or "(model)"] = unexplained
        if not children and layer.name not in canonical and _has_parameters(model, layer.name):
            without_rule.append(f"{layer.name} ({layer.kind})")
    without_rule = [name for name in without_rule if name.split(" ")[0] not in unmerged]
    problems = bool(unmerged or functional or without_rule or drift)
    diagnosis = Diagnosis(
        relevance=relevance,
        layers=layers,
        unmerged_norms=unmerged,
        functional=functional,
        without_rule=without_rule,
        non_finite=non_finite,
        drift=drift,
        lost_in_layers_with_bias=sum(layer.lost for layer in ruled if layer.has_bias) / scale,
        lost_in_other_layers=sum(layer.lost for layer in ruled if not layer.has_bias) / scale,
        logit_change=logit_change,
        in_training=model.training,
        suggestion=_suggest(model, bool(unmerged)) if problems else None,
    )
    if verbose:
        print(diagnosis)
    return diagnosis


class _Examination:
    """Relevance at the outputs and inputs of modules, summed over calls, positions and the batch."""

    def __init__(self) -> None:
        self.order: list[nn.Module] = []
        self.received: Counter[nn.Module] = Counter()
        self.handed_down: Counter[nn.Module] = Counter()
        self.magnitude: Counter[nn.Module] = Counter()
        self.non_finite: set[nn.Module] = set()

    def watch(self, modules: dict[str, nn.Module], stack: ExitStack) -> None:
        for module in modules.values():
            # First before, last behind the hooks of the composite: what is seen is what the rule received and
            # returned.
            handles: list[RemovableHandle] = [
                module.register_forward_pre_hook(self._before, prepend=True),
                module.register_forward_hook(self._behind),
            ]
            for handle in handles:
                stack.callback(handle.remove)

    def layers(self, names: dict[nn.Module, str], rules: dict[nn.Module, str]) -> list[LayerRelevance]:
        return [
            LayerRelevance(
                names[module],
                type(module).__name__,
                rules.get(module),
                float(self.received[module]),
                float(self.handed_down[module]),
                float(self.magnitude[module]),
                getattr(module, "bias", None) is not None,
            )
            for module in self.order
            if module in self.received
        ]

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if module not in self.order:
            self.order.append(module)

        def tap(x: Any) -> Any:
            if isinstance(x, Tensor) and x.requires_grad:
                # A copy, so that what other users of x return is not counted here.
                x = x.clone()
                x.register_hook(lambda relevance: self._note(self.handed_down, module, relevance))
            return x

        return tuple([tap(x) for x in arg] if isinstance(arg, list) else tap(arg) for arg in args)

    def _behind(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            if not bool(output.isfinite().all()):
                self.non_finite.add(module)
            if output.requires_grad:
                output.register_hook(
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


class _FunctionalCalls(TorchFunctionMode):
    """Note the sums of two tensors, and the products with anything, that a module's own code computes."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        name = name[1:] if name in ("iadd", "radd", "imul", "rmul", "isub", "itruediv") else name
        name = {"truediv": "div"}.get(name, name)
        carriers = sum(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        crossed = isinstance(result, Tensor) and result.requires_grad and carriers > 0
        if crossed and (name in _PRODUCTS or (name in _SUMS and carriers > 1)):
            self.note(name)
        return result


def _functional_calls(
    model: nn.Module, composite: Composite, input: Tensor
) -> dict[tuple[str, str], set[str]]:
    """Functional operations of the canonized model outside of modules with a rule, by module."""
    own_forward = {module for module in model.modules() if "forward" in vars(module)}
    with composite.context(model):
        ruled = {name for name, module in model.named_modules() if _rule(module)}
    calls: dict[tuple[str, str], set[str]] = {}
    running: list[tuple[str, nn.Module]] = []

    def note(operation: str) -> None:
        name, module = running[-1] if running else ("", model)
        # A forward that a canonizer wrote is no code of the model; whether it conserves relevance is measured
        # elsewhere.
        canonical = "forward" in vars(module) and module not in own_forward
        if not canonical and not any(name in ruled for name, _ in running):
            calls.setdefault((name, type(module).__name__), set()).add(operation)

    # Canonizers without rules: what remains in the code are the model's own operations.
    with Composite(canonizers=composite.canonizers).context(model), ExitStack() as stack:
        for name, module in model.named_modules():
            enter = module.register_forward_pre_hook(lambda m, _, name=name: running.append((name, m)))
            leave = module.register_forward_hook(lambda *_: (running.pop(), None)[1], always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        with _FunctionalCalls(note):
            model(input.detach().clone().requires_grad_())
    return calls


def _rule(module: nn.Module) -> str | None:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    owners = [owner for hook in hooks if isinstance(owner := getattr(hook, "__self__", None), Hook)]
    return type(owners[0]).__name__ if owners else None


def _is_affine_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None and getattr(module, "bias", None) is not None


def _is_merged(norm: Any, statistics: int | None) -> bool:
    """Merged by `TimmCanonizer`, or made an identity by Zennit, whose canonizers exchange the statistics."""
    if isinstance(vars(norm).get("forward"), MergedNorm):
        return True
    if norm.running_var is None or norm.running_var.data_ptr() == statistics:
        return False
    values = [(norm.running_var, 1), (norm.weight, 1), (norm.running_mean, 0), (norm.bias, 0)]
    return all(tensor is None or bool(torch.all(tensor == value)) for tensor, value in values)


def _suggest(model: nn.Module, unmerged: bool) -> str:
    kinds = {type(module).__name__: type(module).__module__ for module in model.modules()}
    if "NormFreeNet" in kinds:
        return "zennit_drsa.NFNetGamma(low, high), which has the canonizer and rules for NFNets"
    if any(kinds.get(name, "").startswith("timm.") for name in FAMILIES):
        return "give the composite canonizers=[zennit_drsa.TimmCanonizer()]"
    if kinds.get("ResNet", "").startswith("torchvision."):
        return "give the composite canonizers=[zennit.torchvision.ResNetCanonizer()]"
    if unmerged:
        return "give the composite canonizers=[zennit.canonizers.SequentialMergeBatchNorm()]"
    return (
        "a canonizer that replaces the operations named above by modules (zennit.layer.Sum for sums), "
        "and rules for them"
    )


def _parents(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _has_ruled_ancestor(name: str, found: dict[str, LayerRelevance]) -> bool:
    return any(parent in found and found[parent].rule for parent in _parents(name))


def _is_child(name: str, parent: str, found: dict[str, LayerRelevance]) -> bool:
    """Whether `parent` is the closest module above that relevance crossed."""
    return name != parent and next((p for p in _parents(name) if p in found), None) == parent


def _has_parameters(model: nn.Module, name: str) -> bool:
    try:
        return next(model.get_submodule(name).parameters(), None) is not None
    except AttributeError:  # a module of the canonical form
        return True


@contextmanager
def _constant_parameters(model: nn.Module) -> Iterator[None]:
    """Let gradients flow from the input alone."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, in which running statistics stay as they are."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
