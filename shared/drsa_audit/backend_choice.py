"""Which attribution method is used: LRP where the doctor passes it, otherwise one that needs no rules."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor
from zennit.composites import EpsilonPlus
from zennit.core import Composite

from zennit_drsa import doctor
from zennit_drsa.doctor import Diagnosis, remedies

from .errors import BadInput, one_line
from .networks import Network, Rules

NAMES = {
    "lrp": "Layer-wise Relevance Propagation",
    "ig": "Integrated Gradients",
    "gxi": "Gradient × Input",
    "shapley": "Shapley values",
}
#: What is taken where LRP is not valid: it needs no rules, and its totals are known (Note B.3).
WITHOUT_RULES = "ig"


@dataclass(frozen=True)
class Choice:
    """The method, why it is that one, and what the doctor found.

    Attributes
    ----------
    backend : str
        Name of the backend.
    network : Network
        With the LRP rules that passed, where they did.
    reason : str
        One sentence for the user.
    is_other : bool
        Whether it is another one than was asked for.
    examination : dict or None
        What the doctor found; None if it was not asked.
    """

    backend: str
    network: Network
    reason: str
    is_other: bool
    examination: dict[str, Any] | None


def choose_backend(
    wanted: str,
    network: Network,
    inputs: Tensor,
    target: int,
    force: bool = False,
    layer: str | None = None,
) -> Choice:
    """The wanted method, or for "lrp" on a model where it is not valid, Integrated Gradients.

    Parameters
    ----------
    wanted : {"lrp", "ig", "gxi", "shapley"}
    network : Network
    inputs : tensor, shape (N, 3, H, W)
        A few real inputs for the doctor.
    target : int
        Number of the explained output.
    force : bool
        Take LRP also where the doctor finds fault with it.
    layer : str, optional
        Where concepts are found: some rules are others above it than below. The doctor examines these.
    """
    if wanted not in NAMES:
        raise BadInput(f"backend must be one of {', '.join(NAMES)}, got {wanted!r}")
    if wanted != "lrp":
        return Choice(wanted, network, f"{NAMES[wanted]}, as asked for.", False, None)
    first: tuple[str, Diagnosis] | None = None
    failures: list[str] = []
    for name, composite in _candidates(network, inputs, layer):
        try:
            diagnosis = examine(network, composite, inputs, target, layer)
        except Exception as error:  # whatever rules or canonizers raise on a model that they do not suit
            failures.append(f"{name}: {one_line(error, 160)}")
            continue
        if diagnosis.ok:
            chosen = replace(network, composite=composite)
            reason = f"LRP with the rules of {name}: the doctor finds it valid on this model."
            return Choice("lrp", chosen, reason, False, as_entries(diagnosis, name))
        first = first or (name, diagnosis)
    entries = None if first is None else as_entries(first[1], first[0])
    why = "; ".join(first[1].findings[:2]) if first else failures[0] if failures else "no rules are known"
    if force and first is not None:
        return Choice("lrp", network, f"LRP by force, though the doctor finds: {why}.", False, entries)
    other = NAMES[WITHOUT_RULES]
    reason = f"{other} instead of LRP, which is not valid on this model as it is: {one_line(why, 240)}."
    return Choice(WITHOUT_RULES, network, reason, True, entries)


def examine(
    network: Network, composite: Rules, inputs: Tensor, target: int, layer: str | None = None
) -> Diagnosis:
    """The doctor's diagnosis of LRP on a network, with the rules for this layer, without printing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return doctor(network.model, composite(layer), inputs, target, verbose=False)


def as_entries(diagnosis: Diagnosis, rules: str) -> dict[str, Any]:
    """What the doctor found, as JSON."""
    return {
        "ok": diagnosis.ok,
        "rules": rules,
        "findings": diagnosis.findings,
        "suggestion": diagnosis.suggestion,
        "logit_change": diagnosis.logit_change,
        "lost_in_layers_with_bias": diagnosis.lost_in_layers_with_bias,
        "lost_in_other_layers": diagnosis.lost_in_other_layers,
        "relevance": diagnosis.relevance,
        "layers": [
            {
                "name": layer.name or "(model)",
                "kind": layer.kind,
                "rule": layer.rule,
                "received": layer.received,
                "handed_down": layer.handed_down,
            }
            for layer in diagnosis.layers
            if layer.rule
        ],
    }


def _candidates(network: Network, inputs: Tensor, layer: str | None) -> Iterator[tuple[str, Rules]]:
    """The network's own rules, then what the families of models offer, as the doctor would suggest it."""
    try:
        own = network.composite(layer)
    except ValueError:
        pass
    else:
        yield type(own).__name__, network.composite
    for number, (_, trial) in enumerate(remedies(network.model, EpsilonPlus(), inputs)):
        yield _rules_name(trial), partial(_trial, network, inputs, number)


def _trial(network: Network, inputs: Tensor, number: int, layer: str | None) -> Composite:
    """A new composite each time: one can be registered on one model only."""
    return next(islice(remedies(network.model, EpsilonPlus(), inputs), number, None))[1]


def _rules_name(composite: Composite) -> str:
    canonizers = ", ".join(type(canonizer).__name__ for canonizer in composite.canonizers)
    name = "EpsilonPlus" if type(composite) is Composite else type(composite).__name__
    return f"{name} with {canonizers}" if canonizers and name == "EpsilonPlus" else name
