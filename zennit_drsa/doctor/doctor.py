"""The function `doctor`: examine, conclude, and try what could help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from drsa_core.layer import eager
from torch import Tensor, nn
from zennit.core import Composite

from ..kept import BIASES
from .diagnosis import Diagnosis, LayerRelevance
from .examination import Examination, examine
from .remedies import suggest


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
        With its canonizers; not registered at the moment.
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
    _check(model, composite, input)
    model = eager(model)
    training = _outermost_in_training(model)

    def diagnose(composite: Composite) -> Diagnosis:
        return _conclude(examine(model, composite, input, target), training)

    try:
        diagnosis = diagnose(composite)
    except Exception as error:
        suggestion = suggest(model, composite, input, diagnose, None)
        if suggestion is not None:
            error.add_note(f"doctor: {suggestion}")
        raise
    if diagnosis.findings:
        diagnosis = replace(diagnosis, suggestion=suggest(model, composite, input, diagnose, diagnosis))
    if verbose:
        print(diagnosis)
    return diagnosis


def _check(model: object, composite: object, input: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(composite, Composite):
        raise TypeError(f"composite must be a Zennit composite, got {type(composite).__name__}")
    if len(composite.handles):
        raise ValueError("the composite is registered on a model; call its remove() first")
    if not isinstance(input, Tensor):
        raise TypeError(f"input must be a floating-point tensor, got {type(input).__name__}")
    if not input.is_floating_point():
        raise TypeError(
            f"input must be a floating-point tensor, got {input.dtype}: relevance cannot reach integers. "
            "Convert pixels with input.float(); of a model that embeds tokens, give the part above the "
            "embedding"
        )
    if input.ndim == 0 or len(input) == 0:
        raise ValueError(
            f"input must be a batch with at least one example, got a tensor of shape {tuple(input.shape)}"
        )


def _outermost_in_training(model: nn.Module) -> list[str]:
    """Modules in training mode that no other of them contains."""
    names = {name for name, module in model.named_modules() if module.training}
    return [
        name or "(model)"
        for name, module in model.named_modules()
        if module.training and not any(parent in names for parent in _parents(name))
    ]


def _conclude(examination: Examination, training: list[str]) -> Diagnosis:
    layers = examination.layers
    found = {layer.name: layer for layer in layers}
    ruled = [layer for layer in layers if layer.rule and not _has_ruled_ancestor(layer.name, found)]
    scale = abs(examination.relevance) or 1.0
    biased = [layer for layer in ruled if layer.keeps == BIASES]
    kept: Counter[str] = Counter()
    for layer in ruled:
        if layer.keeps != BIASES:
            kept[layer.keeps] += layer.lost / scale  # type: ignore[assignment]
    drift: dict[str, float] = {}
    without_rule: dict[str, str] = {}
    for layer in layers:
        if layer.rule or _has_ruled_ancestor(layer.name, found):
            continue
        children = [child for child in layers if _is_child(child.name, layer.name, found)]
        unexplained = layer.lost - sum(child.lost for child in children)
        # Sums of many terms of both signs: rounding grows with their magnitude.
        if not abs(unexplained) <= 1e-3 * scale + 1e-4 * layer.magnitude:
            drift[layer.name or "(model)"] = unexplained
        if (
            not children
            and layer.name in examination.parametric - examination.canonical
            and layer.name not in examination.unmerged_norms
        ):
            without_rule[layer.name] = f"{layer.name or '(model)'} ({layer.kind})"
    return Diagnosis(
        relevance=examination.relevance,
        layers=layers,
        unmerged_norms=examination.unmerged_norms,
        functional=[
            f"{name or '(model)'} ({kind}: {', '.join(sorted(operations))})"
            for (name, kind), operations in examination.operations.items()
            # What is named as a whole, such as a norm, needs no list of its parts.
            if name not in without_rule
        ],
        without_rule=list(without_rule.values()),
        non_finite=examination.non_finite,
        drift=drift,
        lost_in_layers_with_bias=sum(layer.lost for layer in biased if layer.has_bias) / scale,
        lost_in_other_layers=sum(layer.lost for layer in biased if not layer.has_bias) / scale,
        kept=dict(kept),
        logit_change=examination.logit_change,
        training=training,
        reused=examination.reused,
        derived=examination.derived,
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
