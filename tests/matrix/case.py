"""What a method of the matrix is: a call of the library, and the literal answer to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from tests.matrix import reference
from tests.matrix.networks import NETWORKS, Cut, feature_mask
from tests.matrix.reference import Problem

SEED = 5
CONTEXT_STEPS, STEPS, PERMUTATIONS = 7, 6, 4


@dataclass(frozen=True)
class Case:
    """One method on one network: what the library gets, and the same for the reference."""

    network: str
    model: Cut
    problem: Problem

    @property
    def mask(self) -> Tensor:
        """The players of perturbation methods."""
        return feature_mask(self.network)

    @property
    def baselines(self) -> Tensor:
        """Two reference inputs for the methods that want a distribution."""
        shape = self.problem.x.shape[1:]
        generator = torch.Generator().manual_seed(23)
        return (0.3 * torch.randn(2, *shape, generator=generator)).to(self.problem.x)


Answer: TypeAlias = Callable[[Case], Tensor]


@dataclass(frozen=True)
class Method:
    """`library` and `literal` give the same numbers on `networks`."""

    library: Answer
    literal: Answer
    networks: tuple[str, ...] = NETWORKS
    # Captum itself gives float32 for every input: Occlusion, Shapley values, KernelShap and Lime.
    in_single_precision: bool = False


def literal_maps(context: Any, explain: Any) -> Answer:
    """Both steps of Note B: the context, then `explain` on each R̂_k."""
    return lambda case: case.problem.maps(context, explain)


def literal_maps_of_players(context: Any, method: Any) -> Answer:
    """The same for methods that perturb the players of the case."""
    return lambda case: case.problem.maps(context, method(case.mask))


def lrp_context(rule: reference.Rule, times_output: bool) -> reference.Context:
    """c = R ⊘ a. Captum's LRP and both `collect` start from y, Zennit's own call from 1."""

    def context(p: Problem, x: Tensor, target: int) -> Tensor:
        a, arrived = reference.arriving(p, x, target, rule, times_output)
        return torch.where(a == 0, 0, arrived / torch.where(a == 0, 1, a))

    return context


def first_module(case: Case) -> nn.Module:
    """The first module of the network, which some composites treat by itself."""
    return case.problem.lower[0]


# A sum needs a canonizer for Zennit's LRP; `test_families` has real ones.
CHAINS = tuple(name for name in NETWORKS if "residual" not in name)
