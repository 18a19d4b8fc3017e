"""Families of models: what each file in `zennit_drsa/models` offers, and which of it suits a model.

A new family is one new file there. It may define

* `REMEDIES`, a sequence of `Remedy`: what `doctor` tries on models that it suits, and what `FamilyCanonizer`
  chooses from;
* its canonizer, a `NetworkCanonizer` that says what it `suits`, and its composite, under
  `zennit.composites.register_composite`.

A new family of transformers is one file `transformer_….py` that defines `FAMILY`; see
`models/transformer_family.py`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

from torch import Tensor, nn
from zennit.canonizers import Canonizer, SequentialMergeBatchNorm
from zennit.composites import EpsilonPlus
from zennit.core import Composite

from ._zennit import applied_reversibly

Suits: TypeAlias = Callable[[nn.Module], bool]
Trial: TypeAlias = tuple[str, Composite]


@dataclass(frozen=True)
class Remedy:
    """Something that makes LRP valid on models that it suits.

    Attributes
    ----------
    suits : function
        Whether a model is one of these.
    trials : function
        User's composite and input ↦ what the user is to write, and the same built.
    canonizer : function
        Builds the canonizer; None if there is none.
    """

    suits: Suits
    trials: Callable[[Composite, Tensor], Iterator[Trial]]
    canonizer: Callable[[], Canonizer] | None = None


def canonizer(code: str, build: Callable[[], Canonizer], suits: Suits) -> Remedy:
    """A canonizer, first with the rules of the user's composite, then with those of `EpsilonPlus`."""

    def trials(composite: Composite, input: Tensor) -> Iterator[Trial]:
        yield (
            f"give the composite canonizers=[{code}]",
            Composite(module_map=composite.module_map, canonizers=[build()]),
        )
        yield f"use zennit.composites.EpsilonPlus(canonizers=[{code}])", EpsilonPlus(canonizers=[build()])

    return Remedy(suits, trials, build)


def composite(
    code: str,
    build: Callable[[Tensor], Composite],
    suits: Suits,
    canonizer: Callable[[], Canonizer] | None = None,
) -> Remedy:
    """A composite that brings its canonizer."""
    return Remedy(suits, lambda _, input: iter([(f"use {code}", build(input))]), canonizer)


def remedies() -> list[Remedy]:
    """What the families offer, file by file in alphabetical order, and then what suits many models."""
    package = import_module(".models", __package__)
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    found: list[Remedy] = []
    for name in names:
        found += getattr(import_module(f"{package.__name__}.{name}"), "REMEDIES", ())
    return [*found, *_GENERAL]


def has_batch_norm(model: nn.Module) -> bool:
    """Whether there is a batch norm in the model."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


_GENERAL = (
    canonizer("zennit.canonizers.SequentialMergeBatchNorm()", SequentialMergeBatchNorm, has_batch_norm),
    composite("zennit.composites.EpsilonPlus()", lambda input: EpsilonPlus(), lambda model: True),
)


CHAINS = ("vgg", "alexnet", "squeezenet")
"""Files of networks in torchvision and timm in which relevance crosses nothing but layers with a rule."""


def networks_but(files: Collection[str], model: nn.Module) -> Iterator[tuple[str, str]]:
    """Name and class of what torchvision or timm define for networks, but for those in these files."""
    for name, module in model.named_modules():
        for parent in type(module).__mro__:
            library, _, rest = parent.__module__.partition(".models.")
            file = rest.partition(".")[0]
            if library in ("torchvision", "timm") and file not in files and not file.startswith("_"):
                yield name, type(module).__name__
                break


class FamilyCanonizer(Canonizer):  # type: ignore[misc]
    """The canonizer of the family that a model belongs to, chosen when it is applied.

    Where no family is known, batch norms that follow a linear layer are merged into it, and a model without
    any is left as it is.
    """

    def apply(self, root_module: nn.Module) -> list[Any]:
        """Apply the first canonizer that suits the model, and return the instances that take it back.

        Raises
        ------
        ValueError
            If there is a network of torchvision or timm in the model that needs one, and none is known.
        """
        suitable = (r for r in remedies() if r.canonizer is not None and r.suits(root_module))
        remedy = next(suitable, None)
        if remedy is None or remedy in _GENERAL:
            # In GoogLeNet, too, branches are only put side by side.
            for name, network in networks_but((*CHAINS, "googlenet"), root_module):
                raise ValueError(
                    f"{name or 'the model'} is a {network}, for which no canonizer is known: its relevance "
                    "would be wrong. zennit_drsa.doctor(model, EpsilonPlus(), input) says what is missing. "
                    "Give the composite canonizers of your own, or use a method that needs no rules, such as "
                    "Integrated Gradients"
                )
        if remedy is None or remedy.canonizer is None:
            return []
        return applied_reversibly(remedy.canonizer(), root_module)

    def register(self) -> None:
        """Nothing: `apply` registers another canonizer."""

    def remove(self) -> None:
        """Nothing: what `apply` returns is removed by itself."""
