"""What could make LRP valid on a model: families of models say what they offer, and `doctor` tries it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

from torch import Tensor, nn
from zennit.core import Composite

from ..families import Trial, remedies
from .diagnosis import Diagnosis

WITHOUT_LRP = (
    "use a method that needs no rules, such as Gradient × Input, Integrated Gradients or Shapley values: "
    "captum_drsa.DisentangledAttribution(captum.attr.InputXGradient(model), layer, subspaces), or "
    "zennit.attribution.IntegratedGradients(model) without a composite in zennit_drsa.DisentangledAttributor"
)


def suggest(
    model: nn.Module,
    composite: Composite,
    input: Tensor,
    diagnose: Callable[[Composite], Diagnosis],
    diagnosis: Diagnosis | None,
) -> str | None:
    """The first remedy that suits the model and passes; else the one that leaves least; else another method.

    `diagnosis` is that of the user's composite, or None if it failed; then there is only the first answer.
    """
    best: tuple[str, list[str]] | None = None
    for text, trial in _trials(model, composite, input):
        findings = _try(trial, diagnose)
        if findings == []:
            return text
        if findings is not None and (best is None or len(findings) < len(best[1])):
            best = text, findings
    if diagnosis is None:
        return None
    if _has_attention(model, diagnosis):
        return f"LRP has no rules for attention here: {WITHOUT_LRP}"
    if diagnosis.reused and len(diagnosis.reused) == len(diagnosis.findings):
        return (
            "give each use of these modules a module of its own, for instance copy.deepcopy(module), which "
            f"has the same weights, or {WITHOUT_LRP}"
        )
    rewrite = (
        "write the operations as modules, in the model or by a canonizer (torch.nn.AdaptiveAvgPool2d for "
        f"pooling, zennit.layer.Sum for sums, torch.nn.ReLU and its kin), or {WITHOUT_LRP}"
    )
    if best is None or len(best[1]) >= len(diagnosis.findings):
        return f"nothing here makes LRP valid on this model as it is: {rewrite}"
    text, findings = best
    more = f" and {len(findings) - 4} more" if len(findings) > 4 else ""
    return f"{text}; no canonizer here knows what is left ({'; '.join(findings[:4])}{more}): {rewrite}"


def _trials(model: nn.Module, composite: Composite, input: Tensor) -> Iterator[Trial]:
    for remedy in remedies():
        if remedy.suits(model):
            yield from remedy.trials(composite, input)


def _try(trial: Composite, diagnose: Callable[[Composite], Diagnosis]) -> list[str] | None:
    """What is wrong under a composite; None if the model does not run with it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return diagnose(trial).findings
    except Exception:  # whatever a canonizer raises on a model that it is not made for
        return None


def _has_attention(model: nn.Module, diagnosis: Diagnosis) -> bool:
    kinds = [type(module).__name__.lower() for module in model.modules()]
    return any("attention" in name for name in [*kinds, *diagnosis.functional])
