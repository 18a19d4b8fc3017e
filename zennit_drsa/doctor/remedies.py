"""What could make LRP valid on a model. Canonizers say which models they suit; `doctor` tries them.

To add a family of models, add one line to `REMEDIES`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from zennit.canonizers import Canonizer, SequentialMergeBatchNorm
from zennit.composites import EpsilonPlus
from zennit.core import Composite

from ..canonizer import kind
from ..models.nfnet import NFNetGamma
from ..models.timm import TimmCanonizer
from ..models.torchvision import TorchvisionCanonizer
from .diagnosis import Diagnosis

Trial = tuple[str, Composite]


@dataclass(frozen=True)
class Remedy:
    """Something to try on models that it suits: `trials` gives what the user is to write, and the same
    built."""

    suits: Callable[[nn.Module], bool]
    trials: Callable[[Composite, Tensor], Iterator[Trial]]


def canonizer(code: str, build: Callable[[], Canonizer], suits: Callable[[nn.Module], bool]) -> Remedy:
    """A canonizer, first with the rules of the user's composite, then with those of `EpsilonPlus`."""

    def trials(composite: Composite, input: Tensor) -> Iterator[Trial]:
        yield (
            f"give the composite canonizers=[{code}]",
            Composite(module_map=composite.module_map, canonizers=[build()]),
        )
        yield f"use zennit.composites.EpsilonPlus(canonizers=[{code}])", EpsilonPlus(canonizers=[build()])

    return Remedy(suits, trials)


def composite(code: str, build: Callable[[Tensor], Composite], suits: Callable[[nn.Module], bool]) -> Remedy:
    """A composite that brings its canonizer."""
    return Remedy(suits, lambda _, input: iter([(f"use {code}", build(input))]))


def _resnet_canonizer() -> Canonizer:
    from zennit.torchvision import ResNetCanonizer  # needs torchvision

    return ResNetCanonizer()


def _has_torchvision_resnet_blocks(model: nn.Module) -> bool:
    """Zennit writes the forward of torchvision's blocks anew, so that only those suit which inherit it."""
    blocks = [
        module
        for module in model.modules()
        if any(
            parent.__module__ == "torchvision.models.resnet"
            and parent.__name__ in ("BasicBlock", "Bottleneck")
            for parent in type(module).__mro__
        )
    ]
    return bool(blocks) and all(kind(block).__module__ == "torchvision.models.resnet" for block in blocks)


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


REMEDIES = (
    composite(
        "zennit_drsa.NFNetGamma(low, high), which has the canonizer and rules for NFNets",
        lambda input: NFNetGamma(float(input.min()), float(input.max())),
        NFNetGamma.suits,
    ),
    canonizer("zennit_drsa.TimmCanonizer()", TimmCanonizer, TimmCanonizer.suits),
    canonizer("zennit_drsa.TorchvisionCanonizer()", TorchvisionCanonizer, TorchvisionCanonizer.suits),
    canonizer("zennit.torchvision.ResNetCanonizer()", _resnet_canonizer, _has_torchvision_resnet_blocks),
    canonizer("zennit.canonizers.SequentialMergeBatchNorm()", SequentialMergeBatchNorm, _has_batch_norm),
    composite("zennit.composites.EpsilonPlus()", lambda input: EpsilonPlus(), lambda model: True),
)

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
    rewrite = (
        "write the operations as modules, in the model or by a canonizer (torch.nn.AdaptiveAvgPool2d for "
        f"pooling, zennit.layer.Sum for sums, torch.nn.ReLU and its kin), or {WITHOUT_LRP}"
    )
    if best is None or len(best[1]) >= len(diagnosis.findings):
        return f"nothing here makes LRP valid on this model as it is: {rewrite}"
    text, findings = best
    more = f" and {len(findings) - 4} more" if len(findings) > 4 else ""
    return f"{text}; what it leaves ({'; '.join(findings[:4])}{more}) no canonizer here knows: {rewrite}"


def _trials(model: nn.Module, composite: Composite, input: Tensor) -> Iterator[Trial]:
    for remedy in REMEDIES:
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
