"""The attribution method: which one is valid on a model, and the wrapper of its adapter."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeAlias

import torch
from captum.attr import InputXGradient, IntegratedGradients, ShapleyValueSampling
from drsa_core import Subspaces
from torch import Tensor
from zennit.attribution import Gradient
from zennit.composites import EpsilonPlus
from zennit.core import Composite

from captum_drsa import DisentangledAttribution, ShapleyContext, patch_mask
from zennit_drsa import DisentangledAttributor, doctor
from zennit_drsa.doctor import remedies

from .networks import Network, Rules
from .progress import BadInput, one_line

NAMES = {
    "lrp": "Layer-wise Relevance Propagation",
    "ig": "Integrated Gradients",
    "gxi": "Gradient × Input",
    "shapley": "Shapley values",
}
#: Permutations and steps on the input of Note D, where a method has them.
SAMPLES = {"ig": 10, "shapley": 25}
#: Side of the patches of Shapley values (Note D).
PATCH = 16
#: Forward passes that cost about as much as one image: to collect pairs; one explanation, and each concept.
PASSES = {"lrp": (6, 6, 2), "gxi": (4, 6, 1), "ig": (130, 160, 15), "shapley": (4000, 8000, 1000)}

Wrapper: TypeAlias = DisentangledAttributor | DisentangledAttribution


def make_wrapper(
    method: str,
    network: Network,
    layer: str,
    subspaces: Subspaces | None = None,
    *,
    samples: int | None = None,
    channel_dim: int = 1,
) -> Wrapper:
    """The adapter's wrapper of a method at a layer; `samples` are permutations of "shapley"."""
    if method == "lrp":
        gradient = Gradient(network.model, network.composite(layer))
        return DisentangledAttributor(gradient, layer, subspaces, channel_dim=channel_dim)
    kinds = {"gxi": InputXGradient, "ig": IntegratedGradients, "shapley": ShapleyValueSampling}
    context = ShapleyContext(n_samples=samples or SAMPLES[method]) if method == "shapley" else None
    return DisentangledAttribution(
        kinds[method](network.model), layer, subspaces, context_method=context, channel_dim=channel_dim
    )


def options_of(method: str, inputs: Tensor, samples: int | None = None) -> dict[str, Any]:
    """What the wrapper's `explain` takes beside inputs and target."""
    if method == "ig":
        return {"n_steps": samples or SAMPLES[method]}
    if method == "shapley":
        number = samples or SAMPLES[method]
        return {"feature_mask": patch_mask(inputs, PATCH), "n_samples": number, "perturbations_per_eval": 14}
    return {}


def entries_of_patch(method: str, inputs: Tensor) -> Tensor | int:
    """How many entries of a map share a value: Captum gives each the relevance of the whole patch."""
    if method != "shapley":
        return 1
    mask = patch_mask(inputs, PATCH)
    return torch.bincount(mask.flatten())[mask] * inputs.shape[1]


@contextmanager
def repeatable(seed: int = 0) -> Iterator[None]:
    """Samplers of Captum, which draw from the global generator, draw the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class SeededBatches(Iterable[Tensor]):
    """Batches that each have a seed of their own, also where those before are not computed again."""

    def __init__(self, batches: list[Tensor], seed: int) -> None:
        self.batches, self.seed = batches, seed

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        for number, batch in enumerate(self.batches):
            torch.manual_seed(self.seed + number)
            yield batch


@dataclass(frozen=True)
class Choice:
    """The method, why it is that one, and what the doctor found."""

    backend: str
    network: Network  # with the LRP rules that passed, where they did
    reason: str
    is_other: bool  # than was asked for
    examination: dict[str, Any] | None  # None if the doctor was not asked


def choose_method(
    wanted: str,
    network: Network,
    inputs: Tensor,
    target: int,
    force: bool = False,
    layer: str | None = None,
) -> Choice:
    """The wanted method, or for "lrp" on a model where it is not valid, Integrated Gradients.

    Integrated Gradients need no rules, and their totals are known (Note B.3). The doctor examines the rules
    for the layer on the inputs; `force` takes LRP also where it finds fault with it.
    """
    if wanted not in NAMES:
        raise BadInput(f"backend must be one of {', '.join(NAMES)}, got {wanted!r}")
    if wanted != "lrp":
        return Choice(wanted, network, f"{NAMES[wanted]}, as asked for.", False, None)
    first: dict[str, Any] | None = None
    failures: list[str] = []
    for rules in _candidates(network, inputs):
        try:
            composite = rules(layer)
            own = rules is network.composite
            name = type(composite).__name__ if own else _rules_name(composite)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                diagnosis = doctor(network.model, composite, inputs, target, verbose=False)
        except Exception as error:  # whatever rules or canonizers raise on a model that they do not suit
            failures.append(one_line(error, 160))
            continue
        found = _as_entries(diagnosis, name)
        if diagnosis.ok:
            reason = f"LRP with the rules of {name}: the doctor finds it valid on this model."
            return Choice("lrp", replace(network, composite=rules), reason, False, found)
        first = first or found
    why = "; ".join(first["findings"][:2]) if first else failures[0] if failures else "no rules are known"
    if force and first is not None:
        return Choice("lrp", network, f"LRP by force, though the doctor finds: {why}.", False, first)
    reason = f"{NAMES['ig']} instead of LRP, which is not valid on this model as it is: {one_line(why, 240)}."
    return Choice("ig", network, reason, True, first)


def _candidates(network: Network, inputs: Tensor) -> Iterator[Rules]:
    """The network's own rules, then those that the doctor would suggest; new composites each time."""
    yield network.composite

    def offered() -> Iterator[Any]:
        return remedies(network.model, EpsilonPlus(), inputs)

    for number, _ in enumerate(offered()):
        yield lambda layer, number=number: next(islice(offered(), number, None))[1]  # type: ignore[misc]


def _rules_name(composite: Composite) -> str:
    name = type(composite).__name__
    canonizers = ", ".join(type(canonizer).__name__ for canonizer in composite.canonizers)
    return f"{name} with {canonizers}" if canonizers and name == "EpsilonPlus" else name


def _as_entries(diagnosis: Any, rules: str) -> dict[str, Any]:
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
