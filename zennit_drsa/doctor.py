"""Is LRP valid on this model, with this composite? `validate` refuses wrong maps, `doctor` explains.

Both watch a forward pass of the model under its rules. `validate` stops at what makes maps wrong without an
error; `doctor` also measures the relevance that each layer hands down, names operations in the model's own
code that relevance crosses without a rule, and tries what could help.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from drsa_core.layer import eager
from drsa_core.model_state import restored
from drsa_core.nfnet import NFNetCanonizer
from torch import Tensor, nn
from zennit.canonizers import Canonizer, SequentialMergeBatchNorm
from zennit.composites import EpsilonPlus
from zennit.core import Composite

from ._zennit import (
    hooks_on,
    is_merged,
    running_statistics,
    take_hooks_off,
)
from .canonizers import CANONIZERS
from .family_composites import NFNetGamma, TransformerGamma
from .kept import BIASES, CanonicalPart
from .operations import Watch
from .validity import Checks, relative_change, under, validate

__all__ = ["Diagnosis", "LayerRelevance", "doctor", "remedies", "validate"]


@dataclass(frozen=True)
class LayerRelevance:
    """Relevance that a module received at its output and handed to its input, over the batch."""

    name: str
    kind: str
    rule: str | None
    received: float
    handed_down: float
    magnitude: float
    has_bias: bool
    keeps: str = BIASES

    @property
    def lost(self) -> float:
        """Relevance that did not pass (negative if the module made some)."""
        return self.received - self.handed_down


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found; `ok` says whether an LRP map of this model and composite can be trusted.

    Attributes
    ----------
    relevance : float
        The explained logits, summed over the batch.
    layers : list of LayerRelevance
        All modules that relevance crossed, in the order of the forward pass.
    unmerged_norms, without_rule, non_finite : list of str
        Batch norms left unmerged; modules without a rule; modules with a non-finite output or relevance.
    functional : list of str
        Operations in a module's code that do more than move, copy or select values, without a rule.
    drift : dict
        Relevance that a module lost (or made, if negative) in a way that none of its rules explains.
    lost_in_layers_with_bias, lost_in_other_layers : float
        Share of the relevance that stayed in layers under a rule: in biases and stabilisers; in the latter.
    logit_change : float
        Largest change of an output by canonization, relative to the largest output.
    training : list of str
        The outermost modules that are in training mode; the examination itself runs in evaluation mode.
    suggestion : str or None
        What makes LRP valid, tried on this model and input; or, if nothing does, what to use instead.
    kept : dict
        Share of the relevance that stayed in parts of a canonical form, by what they are.
    reused : list of str
        Modules that run more than once in a forward pass under a rule that remembers one run only.
    derived : list of str
        Layers that make other weights of their parameters, under a rule that exchanges the parameters.
    """

    relevance: float
    layers: list[LayerRelevance]
    unmerged_norms: list[str]
    functional: list[str]
    without_rule: list[str]
    non_finite: list[str]
    drift: dict[str, float]
    lost_in_layers_with_bias: float
    lost_in_other_layers: float
    logit_change: float
    training: list[str]
    suggestion: str | None = None
    kept: dict[str, float] = field(default_factory=dict)
    reused: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)

    @property
    def in_training(self) -> bool:
        """Whether a part of the model is in training mode, where dropout and norms act differently."""
        return bool(self.training)

    @property
    def findings(self) -> list[str]:
        """What is wrong under this composite, one string each; the mode of the model is not counted."""
        found = [f"{name} (batch norm) is not merged" for name in self.unmerged_norms]
        found += [f"{name} has no rule" for name in (*self.functional, *self.without_rule)]
        found += [f"{name} runs more than once" for name in self.reused]
        found += [f"{name} makes other weights of its parameters" for name in self.derived]
        found += [f"{name} has values that are not finite" for name in self.non_finite]
        found += [f"{name} loses or makes relevance ({change:+.3g})" for name, change in self.drift.items()]
        if not self.logit_change <= 1e-3:  # NaN counts
            found.append(f"the logits change by {self.logit_change:.1e}")
        return found

    @property
    def ok(self) -> bool:
        """Whether nothing was found that makes a map wrong. Relevance in biases is part of the method."""
        return not self.findings and not self.in_training

    def table(self, layers: Sequence[LayerRelevance] | None = None) -> str:
        """Relevance per layer, as a Markdown table."""
        lines = ["| layer | module | rule | received | handed down |", "|---|---|---|---|---|"]
        for layer in self.layers if layers is None else layers:
            numbers = f"{layer.received:.4g} | {layer.handed_down:.4g}"
            lines.append(f"| {layer.name or '(model)'} | {layer.kind} | {layer.rule or '–'} | {numbers} |")
        return "\n".join(lines)

    def __str__(self) -> str:
        modes = f"{_counted(self.training)}: call model.eval()" if self.in_training else "none"
        rows = {
            "batch norms left unmerged": _counted(self.unmerged_norms),
            "operations without a rule": _counted(self.functional),
            "modules without a rule": _counted(self.without_rule),
            "modules that run more than once": _counted(self.reused),
            "layers that make other weights of their parameters": _counted(self.derived),
            "non-finite values": _counted(self.non_finite),
            "relevance lost or made without a rule": _counted(
                [f"{k} ({v:+.3g})" for k, v in self.drift.items()]
            ),
            "modules in training mode": modes,
            "change of the logits by canonization": f"{self.logit_change:.1e}",
            "share lost in layers with a bias": f"{self.lost_in_layers_with_bias:.2%}",
            "share lost to stabilisers elsewhere": f"{self.lost_in_other_layers:.2%}",
            **{f"share kept by {name}": f"{share:.2%}" for name, share in self.kept.items()},
        }
        lines = [f"LRP on this model: {'valid' if self.ok else 'NOT valid'}", ""]
        lines += ["| what | found |", "|---|---|", *(f"| {what} | {found} |" for what, found in rows.items())]
        if self.suggestion:
            lines += ["", f"Suggestion: {self.suggestion}"]
        own = [layer for layer in self.layers if layer.rule or (layer.name or "(model)") in self.drift]
        worst = sorted(own, key=lambda layer: -abs(layer.lost))[:8]
        shown = [layer for layer in own if layer in worst]
        lines += ["", "Where relevance changes most (all layers: `.table()`):", "", self.table(shown)]
        return "\n".join(lines)


def doctor(
    model: nn.Module,
    composite: Composite,
    input: Tensor,
    target: int | Tensor | None = None,
    verbose: bool = True,
) -> Diagnosis:
    """Examine whether LRP with this composite is valid on this model; the model is left as it was.

    If it is not, canonizers that suit the model are tried, and only what passes is suggested.

    Parameters
    ----------
    model : module
        With an output of shape (N, classes).
    composite : zennit.core.Composite
        With its canonizers; not registered.
    input : tensor, shape (N, …)
        A few real inputs.
    target : int or tensor of shape (N,), optional
        Class to explain; the predicted one if left out.
    verbose : bool
        Whether to print the diagnosis.

    Raises
    ------
    TypeError, ValueError
        If an argument or the model's output is not as described. Errors of the composite itself are passed
        on, with a note on what would work.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(composite, Composite):
        raise TypeError(f"composite must be a Zennit composite, got {type(composite).__name__}")
    if not isinstance(input, Tensor) or not input.is_floating_point():
        found = input.dtype if isinstance(input, Tensor) else type(input).__name__
        raise TypeError(
            f"input must be a floating-point tensor, got {found}: relevance cannot reach integers. Of a "
            "model that embeds tokens, give the part above the embedding"
        )
    if input.ndim == 0 or len(input) == 0:
        raise ValueError(f"input must be a batch with at least one example, got shape {tuple(input.shape)}")
    model = eager(model)

    def diagnose(composite: Composite) -> Diagnosis:
        with restored(model), torch.inference_mode(False):
            return _examine(model, composite, input, target)

    try:
        diagnosis = diagnose(composite)
    except Exception as error:
        suggestion = _suggest(model, composite, input, diagnose, None)
        if suggestion is not None:
            error.add_note(f"doctor: {suggestion}")
        raise
    if diagnosis.findings:
        diagnosis = replace(diagnosis, suggestion=_suggest(model, composite, input, diagnose, diagnosis))
    if verbose:
        print(diagnosis)
    return diagnosis


# ---------------------------------------------------------------------- one examination


def _examine(model: nn.Module, composite: Composite, input: Tensor, target: int | Tensor | None) -> Diagnosis:
    """A forward and a backward pass under the rules; the caller restores the model."""
    training = [name for name, module in model.named_modules() if module.training]
    for module in model.modules():
        module.training = False
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    statistics = running_statistics(model)
    own_forward = {module for module in model.modules() if "forward" in vars(module)}
    with torch.no_grad():
        original = _checked_output(model(input.clone()), len(input))  # a copy, as models may work in place
    classes = _checked_classes(target, original)
    names = {module: name for name, module in model.named_modules()}

    with under(composite, model), ExitStack() as stack:
        modules = list(model.modules())
        names |= {module: name for name, module in model.named_modules()}
        for module in modules:
            # Zennit counts attention among the activations, whose rule would explain each token by itself.
            if isinstance(module, nn.MultiheadAttention) and _rule(module) == "Pass":
                take_hooks_off(module)
        replaced = {m for m in modules if "forward" in vars(m) and m not in own_forward}
        rules = {module: rule for module in modules if (rule := _rule(module)) is not None}
        for module in modules:
            is_norm = module in replaced and next(module.children(), None) is None and _has_bias(module)
            if isinstance(module, CanonicalPart) or is_norm:
                rules.setdefault(module, "canonical form")
        watch, checks = Watch(), Checks(model, refuse=False)
        stack.enter_context(watch.measured(modules))
        with checks.watching(), torch.enable_grad():
            x = input.detach().clone().requires_grad_()
            output = model(x.clone())
        if not output.requires_grad:
            raise ValueError(
                "the model's output does not depend on its input through autograd: relevance cannot reach "
                "the input. Is there a torch.no_grad(), a detach() or a rounding in its forward?"
            )
        start = output.detach() * nn.functional.one_hot(classes, output.shape[1])
        # A forward that a canonizer wrote is not the model's code; what it loses is measured.
        lossy = watch.lossy_operations(output, rules.keys(), replaced)
        torch.autograd.grad(output, x, start, allow_unused=True)
        unmerged = {
            names[module]
            for module in watch.order
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
            and rules.get(module, "Pass") == "Pass"
            and not is_merged(module, statistics)
        }

    layers = [
        LayerRelevance(
            name=names[module],
            kind=type(module).__name__,
            rule=rules.get(module),
            received=watch.received[module],
            handed_down=watch.handed_down[module],
            magnitude=watch.magnitude[module],
            has_bias=_has_bias(module),
            keeps=module.keeps if isinstance(module, CanonicalPart) else BIASES,
        )
        for module in watch.order
        if module in watch.received
    ]
    found = {layer.name: layer for layer in layers}
    above = {name: [found[parent] for parent in _parents(name) if parent in found] for name in found}
    outermost = [layer for layer in layers if not any(parent.rule for parent in above[layer.name])]
    total = float(start.double().sum())
    scale = abs(total) or 1.0
    lost: Counter[str] = Counter()
    for layer in outermost:
        if layer.rule:
            of_bias = f"{BIASES} {layer.has_bias}"
            lost[layer.keeps if layer.keeps != BIASES else of_bias] += layer.lost / scale  # type: ignore[assignment]
    canonical = {names[module] for module in replaced} | unmerged
    has_parameters = {names[m] for m in modules if next(m.parameters(), None) is not None}
    drift, without_rule = {}, []
    for layer in outermost:
        if layer.rule:
            continue
        children = [child for child in layers if above[child.name] and above[child.name][0] is layer]
        unexplained = layer.lost - sum(child.lost for child in children)
        # Sums of many terms of both signs: rounding grows with their magnitude.
        if not abs(unexplained) <= 1e-3 * scale + 1e-4 * layer.magnitude:
            drift[layer.name or "(model)"] = unexplained
        if not children and layer.name in has_parameters - canonical:
            without_rule.append(layer)
    named = {(layer.name, layer.kind) for layer in without_rule}
    places = {(names[m], type(m).__name__) if m else ("", "outside of modules"): m for m in lossy}
    return Diagnosis(
        relevance=total,
        layers=layers,
        unmerged_norms=[names[module] for module in watch.order if names[module] in unmerged],
        # What is named as a whole, such as a norm, needs no list of its parts.
        functional=[
            f"{place[0] or '(model)'} ({place[1]}: {', '.join(sorted(lossy[module]))})"
            for place, module in sorted(
                places.items(), key=lambda item: list(names).index(item[1]) if item[1] else -1
            )
            if place not in named
        ],
        without_rule=[f"{layer.name or '(model)'} ({layer.kind})" for layer in without_rule],
        non_finite=[names[module] or "(model)" for module in watch.order if module in watch.non_finite],
        drift=drift,
        lost_in_layers_with_bias=lost.pop(f"{BIASES} True", 0.0),
        lost_in_other_layers=lost.pop(f"{BIASES} False", 0.0),
        logit_change=relative_change(output.detach(), original),
        training=[n or "(model)" for n in training if not any(parent in training for parent in _parents(n))],
        kept=dict(lost),
        reused=list(checks.reused),
        derived=list(checks.derived),
    )


def _parents(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _rule(module: nn.Module) -> str | None:
    return next((type(hook).__name__ for hook in hooks_on(module)), None)


def _has_bias(module: nn.Module) -> bool:
    # A batch norm without one still subtracts its mean.
    is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return getattr(module, "bias", None) is not None or is_norm


def _checked_output(output: object, batch: int) -> Tensor:
    wish = "the model's output must be one tensor of shape (N, classes)"
    if not isinstance(output, Tensor) or not output.is_floating_point():
        found = output.dtype if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(
            f"{wish}, got {found}; wrap the model so that it returns the logits, in floating point, one of "
            "transformers by TransformersModel"
        )
    if output.ndim != 2 or len(output) != batch or not output.shape[1]:
        hint = "; add the axis of classes, as in output[:, None]" if output.ndim == 1 else ""
        raise ValueError(f"{wish}, got {tuple(output.shape)} for {batch} examples{hint}")
    return output


def _checked_classes(target: int | Tensor | None, output: Tensor) -> Tensor:
    """The class to explain, one for each example."""
    examples, classes = output.shape
    chosen = output.argmax(1) if target is None else torch.as_tensor(target, device=output.device)
    if chosen.is_floating_point() or chosen.shape not in ((), (examples,)):
        raise ValueError(
            f"target must be one class (int) or one for each of the {examples} examples, got {target}"
        )
    if bool((chosen < 0).any()) or bool((chosen >= classes).any()):
        raise ValueError(f"target must be in 0 … {classes - 1}, got {chosen.tolist()}")
    return chosen.long().expand(examples)


# ---------------------------------------------------------------------- what could help

_WITHOUT_LRP = (
    "use a method that needs no rules, such as Gradient × Input, Integrated Gradients or Shapley values: "
    "captum_drsa.DisentangledAttribution(captum.attr.InputXGradient(model), layer, subspaces), or "
    "zennit.attribution.IntegratedGradients(model) without a composite in zennit_drsa.DisentangledAttributor"
)


def remedies(model: nn.Module, composite: Composite, input: Tensor) -> Iterator[tuple[str, Composite]]:
    """What could make LRP valid on a model: what a user is to write, and the same built, one after the other.

    Canonizers come with the rules of the user's composite, and then with those of `EpsilonPlus`.
    """
    if NFNetGamma.suits(model):
        box = float(input.min()), float(input.max())
        yield (
            "use zennit_drsa.NFNetGamma(low, high), which has the canonizer and rules for NFNets",
            NFNetGamma(*box),
        )
    canonizers: list[tuple[str, Callable[[], Canonizer]]] = [
        (f"{known.__module__.partition('.')[0]}.{known.__name__}()", known)
        for known in CANONIZERS
        if known.suits(model) and known is not NFNetCanonizer
    ]
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        canonizers.append(("zennit.canonizers.SequentialMergeBatchNorm()", SequentialMergeBatchNorm))
    if TransformerGamma.suits(model):
        yield (
            "use zennit_drsa.TransformerGamma(), which has the canonizer and rules for transformers",
            TransformerGamma(),
        )
    for code, build in canonizers:
        own_rules = Composite(module_map=composite.module_map, canonizers=[build()])
        yield f"give the composite canonizers=[{code}]", own_rules
        yield f"use zennit.composites.EpsilonPlus(canonizers=[{code}])", EpsilonPlus(canonizers=[build()])
    yield "use zennit.composites.EpsilonPlus()", EpsilonPlus()


def _suggest(
    model: nn.Module,
    composite: Composite,
    input: Tensor,
    diagnose: Callable[[Composite], Diagnosis],
    diagnosis: Diagnosis | None,
) -> str | None:
    """The first remedy that passes; else the one that leaves least; else another method.

    `diagnosis` is that of the user's composite, or None if it failed; then there is only the first answer.
    """
    best: tuple[str, list[str]] | None = None
    for text, trial in remedies(model, composite, input):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                findings = diagnose(trial).findings
        except Exception:  # whatever a canonizer raises on a model that it is not made for
            continue
        if not findings:
            return text
        if best is None or len(findings) < len(best[1]):
            best = text, findings
    if diagnosis is None:
        return None
    kinds = [type(module).__name__.lower() for module in model.modules()]
    if any("attention" in name for name in [*kinds, *diagnosis.functional]):
        return f"LRP has no rules for attention here: {_WITHOUT_LRP}"
    if diagnosis.reused and len(diagnosis.reused) == len(diagnosis.findings):
        return (
            "give each use of these modules a module of its own, for instance copy.deepcopy(module), which "
            f"has the same weights, or {_WITHOUT_LRP}"
        )
    if best is None or len(best[1]) >= len(diagnosis.findings):
        best = "nothing here makes LRP valid on this model as it is", diagnosis.findings
    else:
        best = f"{best[0]}; no canonizer here knows what is left ({_shorten(best[1], '; ')})", best[1]
    return (
        f"{best[0]}: write the operations as modules, in the model or by a canonizer "
        "(torch.nn.AdaptiveAvgPool2d for pooling, zennit.layer.Sum for sums, torch.nn.ReLU and its kin), or "
        f"{_WITHOUT_LRP}"
    )


def _shorten(names: Sequence[str], separator: str = ", ", limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + more


def _counted(names: Sequence[str]) -> str:
    return f"{len(names)}: {_shorten(names)}" if names else "none"
