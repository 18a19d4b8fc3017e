"""The literal relevance model: section 3 and Note B written out for one example and one concept at a time.

Nothing here comes from the library, and nothing is clever. A network is two lists of modules, `lower` and
`upper`. A backward pass is a loop over the modules of a list; each module is differentiated alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
import torch
from drsa_core import Subspaces
from torch import Tensor, nn

from tests.matrix.networks import N_CLASSES, Cut, Residual, plain

Rule: TypeAlias = Callable[[nn.Module, Tensor, Tensor], Tensor]


def run(modules: Sequence[nn.Module], z: Tensor) -> Tensor:
    """The modules one after the other."""
    for module in modules:
        z = module(z)
    return z


def pull_back(modules: Sequence[nn.Module], z: Tensor, signal: Tensor, rule: Rule) -> Tensor:
    """A backward pass: each module hands what arrives at its output to its input, as the rule says."""
    entering = []
    with torch.no_grad():
        for module in modules:
            entering.append(z)
            z = module(z)
    for module, z in zip(reversed(modules), reversed(entering), strict=True):
        if isinstance(module, Residual):  # both summands get what arrives at the sum
            signal = signal + pull_back(list(module.branch), z, signal, rule)
        else:
            signal = rule(module, z, signal)
    return signal


def vjp(function: Callable[[Tensor], Tensor], z: Tensor, signal: Tensor) -> Tensor:
    """Jᵀ signal, with a contiguous signal: torch's batch norm misreads another one."""
    z = z.detach().requires_grad_()
    with torch.enable_grad():
        (result,) = torch.autograd.grad(function(z), z, signal.contiguous())
    return result


def gradient(module: nn.Module, z: Tensor, signal: Tensor) -> Tensor:
    """The chain rule."""
    return vjp(module, z, signal)


# ---------------------------------------------------------------------- a problem to explain


@dataclass(frozen=True)
class Problem:
    """One batch, cut at the layer; `lower` and `upper` are plain copies of the model's parts."""

    lower: list[nn.Module]
    upper: list[nn.Module]
    x: Tensor
    target: Tensor
    subspaces: Subspaces
    channel_dim: int

    @classmethod
    def of(cls, model: Cut, x: Tensor, target: Tensor, subspaces: Subspaces) -> Problem:
        """The problem that a test gives to the library."""
        lower = [plain(module) for module in model.lower]
        upper = [*(plain(module) for module in model.upper), nn.Flatten(), plain(model.head)]
        return cls(lower, upper, x.detach(), target, subspaces, model.channel_dim)

    def below(self, n_modules: int = 1) -> Problem:
        """The same problem with the output of the first modules as the input."""
        e = run(self.lower[:n_modules], self.x).detach()
        return replace(self, lower=self.lower[n_modules:], x=e)

    def examples(self) -> list[tuple[Tensor, int]]:
        """Each example as a batch of one, with its class."""
        return [(self.x[i : i + 1], int(self.target[i])) for i in range(len(self.x))]

    def phi(self, x: Tensor) -> Tensor:
        """a = φ(x)."""
        return run(self.lower, x)

    def start(self, a: Tensor, target: int) -> Tensor:
        """∂y/∂output, shape (1, classes)."""
        return nn.functional.one_hot(torch.tensor([target]), N_CLASSES).to(a)

    def filtered(self, c: Tensor) -> list[Tensor]:
        """U_kV_kᵀc for each k, the transpose of the virtual layer V_kU_kᵀ; V = U where there is no dual."""
        dual = self.subspaces.basis if self.subspaces.dual is None else self.subspaces.dual
        parts, first = [], 0
        for size in self.subspaces.dims:
            columns = slice(first, first + size)
            first += size
            matrix = (self.subspaces.basis[:, columns] @ dual[:, columns].T).to(c)
            parts.append((c.movedim(self.channel_dim, -1) @ matrix.T).movedim(-1, self.channel_dim))
        return [part.contiguous() for part in parts]

    def relevance(self, x: Tensor, filtered: Tensor) -> Tensor:
        """R̂_k(x) = φ(x)ᵀ U_kV_kᵀ[c] of each row, shape (n,), given U_kV_kᵀ[c]."""
        return (self.phi(x) * filtered).flatten(1).sum(1)

    def maps(
        self, context: Context, explain: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
    ) -> Tensor:
        """Both steps: c by `context`, then `explain(R̂_k, x)` for every example and concept."""
        rows = []
        for x, target in self.examples():
            parts = self.filtered(context(self, x, target))
            rows.append(torch.cat([explain(partial(self.relevance, filtered=part), x) for part in parts]))
        return torch.stack(rows)


Context: TypeAlias = Callable[[Problem, Tensor, int], Tensor]

# ---------------------------------------------------------------------- step 1: contexts


def gradient_context(p: Problem, x: Tensor, target: int) -> Tensor:
    """c = ∂y/∂a."""
    a = p.phi(x).detach()
    return pull_back(p.upper, a, p.start(a, target), gradient)


def path_context(nodes: Sequence[tuple[float, float]]) -> Context:
    """c = ∫ ∂y/∂a dt on the path from 0 to a, by nodes t and weights."""

    def context(p: Problem, x: Tensor, target: int) -> Tensor:
        a = p.phi(x).detach()
        return sum_of(w * pull_back(p.upper, t * a, p.start(a, target), gradient) for t, w in nodes)

    return context


def shapley_context(n_samples: int) -> Context:
    """c_j = R_j / Σ a_j, R_j the mean contribution of map j over random orders of the maps (Note B.2).

    The orders are drawn with torch's generator, one `randperm` for each, as Captum draws them.
    """

    def context(p: Problem, x: Tensor, target: int) -> Tensor:
        a = p.phi(x).detach()
        maps = a.movedim(p.channel_dim, 0)
        gained = a.new_zeros(len(maps))
        for _ in range(n_samples):
            present = torch.zeros_like(maps)
            before = run(p.upper, present.movedim(0, p.channel_dim))[0, target]
            for j in torch.randperm(len(maps)).tolist():
                present[j] = maps[j]
                after = run(p.upper, present.movedim(0, p.channel_dim))[0, target]
                gained[j] += after - before
                before = after
        total = maps.flatten(1).sum(1)
        c = torch.where(total == 0, 0, gained / n_samples / torch.where(total == 0, 1, total))
        return c.reshape(-1, *[1] * (maps.ndim - 1)).expand_as(maps).movedim(0, p.channel_dim).contiguous()

    return context


# ---------------------------------------------------------------------- step 2: explaining R̂_k


def slope(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """∂f/∂x."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        (result,) = torch.autograd.grad(f(x).sum(), x)
    return result


def input_times_gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """x ⊙ ∂f/∂x."""
    return x * slope(f, x)


def saliency(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """|∂f/∂x|."""
    return slope(f, x).abs()


def integrated(
    nodes: Sequence[tuple[float, float]], baseline: float | Tensor = 0.0
) -> Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]:
    """(x − x̃) ⊙ ∫ ∂f/∂x dt."""

    def explain(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        steps = x - baseline
        return steps * sum_of(w * slope(f, baseline + t * steps) for t, w in nodes)

    return explain


def ablation(mask: Tensor, baseline: int = 0) -> Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]:
    """f(x) − f(x without the player), on every entry of the player."""

    def explain(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.no_grad():
            result = f(x).new_zeros(x.shape)
            for player in mask.unique():
                result += (f(x) - f(torch.where(mask == player, baseline, x))) * (mask == player)
        return result

    return explain


def shapley(mask: Tensor, baseline: int = 0) -> Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]:
    """The sum over all coalitions of Note A."""

    def explain(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        players = [int(player) for player in mask.unique()]
        n = len(players)
        with torch.no_grad():
            result = f(x).new_zeros(x.shape)
            for player in players:
                others = [other for other in players if other != player]
                for size in range(n):
                    weight = math.factorial(size) * math.factorial(n - 1 - size) / math.factorial(n)
                    for coalition in combinations(others, size):
                        without = torch.isin(mask, torch.tensor(coalition, dtype=mask.dtype))
                        with_it = without | (mask == player)
                        gained = f(torch.where(with_it, x, baseline)) - f(torch.where(without, x, baseline))
                        result += weight * gained * (mask == player)
        return result

    return explain


def only_the_window(mask: Tensor) -> Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]:
    """Zennit's occlusion: f of the input with nothing but the window, on every entry of the window."""

    def explain(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.no_grad():
            return sum_of(
                f(torch.where(mask == player, x, 0)) * (mask == player).to(x) for player in mask.unique()
            )

    return explain


def gauss_legendre(n: int) -> list[tuple[float, float]]:
    """Nodes and weights on [0, 1], the weights in float32 as Captum keeps them."""
    nodes, weights = np.polynomial.legendre.leggauss(n)
    return [(float(t), float(np.float32(w))) for t, w in zip((nodes + 1) / 2, weights / 2, strict=True)]


def exact_gauss_legendre(n: int) -> list[tuple[float, float]]:
    """Gauss and Legendre's nodes and weights on [0, 1] in double precision: those of path contexts."""
    nodes, weights = np.polynomial.legendre.leggauss(n)
    return [(float(t + 1) / 2, float(w) / 2) for t, w in zip(nodes, weights, strict=True)]


def right_ends(n: int) -> list[tuple[float, float]]:
    """Right Riemann sum on [0, 1], its nodes in float32 as Zennit keeps them."""
    return [(float(t), 1 / n) for t in torch.linspace(1 / n, 1, n)]


def sum_of(terms: Any) -> Tensor:
    """Σ of tensors."""
    return torch.stack(list(terms)).sum(0)


# ---------------------------------------------------------------------- DeepLift


def rescale_maps(p: Problem, baselines: Tensor) -> Tensor:
    """DeepLift's Rescale rule: an activation function is the secant Δout / Δin; mean over the baselines."""

    def one(x: Tensor, filtered: Tensor, baseline: Tensor) -> Tensor:
        secants = _secants(p.lower, x, baseline)

        def rule(module: nn.Module, z: Tensor, signal: Tensor) -> Tensor:
            return signal * secants[module] if module in secants else gradient(module, z, signal)

        return (x - baseline) * pull_back(p.lower, x, filtered, rule)

    rows = []
    for x, target in p.examples():
        parts = p.filtered(gradient_context(p, x, target))
        each = [[one(x, part, b[None]) for b in baselines] for part in parts]
        rows.append(torch.cat([sum_of(maps) / len(maps) for maps in each]))
    return torch.stack(rows)


def _secants(modules: Sequence[nn.Module], z: Tensor, reference: Tensor) -> dict[nn.Module, Tensor]:
    """Δout / Δin of every activation function."""
    secants: dict[nn.Module, Tensor] = {}
    for module in modules:
        after, after_reference = module(z).detach(), module(reference).detach()
        if isinstance(module, Residual):
            secants |= _secants(list(module.branch), z, reference)
        elif isinstance(module, nn.ReLU):
            change = z - reference
            flat = change.abs() < 1e-10
            secants[module] = torch.where(
                flat, (z > 0).to(z), (after - after_reference) / torch.where(flat, 1, change)
            )
        z, reference = after, after_reference
    return secants


class RelevanceOfConcept(nn.Module):
    """x ↦ R̂_k(x) of one concept as a module; the second argument says which example each row comes from."""

    def __init__(self, p: Problem, filtered: Tensor) -> None:
        super().__init__()
        self.lower, self.filtered = nn.Sequential(*p.lower), filtered

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return (self.lower(x) * self.filtered[index]).flatten(1).sum(1)


# ---------------------------------------------------------------------- one run of Captum for each concept


def captum_maps(
    p: Problem, context: Context, make: Callable[[nn.Module], Any], seed: int, **options: Any
) -> Tensor:
    """A Captum method on each R̂_k in turn, with the same random numbers for all of them.

    For methods that draw their samples, where no formula gives the result of one run. The generators are
    seeded before the contexts, and go on from there for each concept.
    """
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  GradientShap draws from it
    contexts = [p.filtered(context(p, x, target)) for x, target in p.examples()]
    state, numpy_state = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    maps = []
    for k in range(p.subspaces.n_subspaces):
        relevance = RelevanceOfConcept(p, torch.cat([parts[k] for parts in contexts]))
        torch.set_rng_state(state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        index = torch.arange(len(p.x))
        x = p.x.clone().requires_grad_(p.x.is_floating_point())
        maps.append(make(relevance).attribute(x, additional_forward_args=(index,), **options).detach())
    return torch.stack(maps, dim=1)


# ---------------------------------------------------------------------- the filtered backward pass


def arriving(p: Problem, x: Tensor, target: int, rule: Rule, times_output: bool) -> tuple[Tensor, Tensor]:
    """a, and what the rule brings to it from the output; LRP in Captum starts with y, Zennit with 1."""
    a = p.phi(x).detach()
    start = p.start(a, target)
    if times_output:
        start = start * run(p.upper, a).detach()
    return a, pull_back(p.upper, a, start, rule)


def propagated_relevance(p: Problem, rule: Rule, times_output: bool = False) -> Tensor:
    """LRP: R⁽ᵏ⁾ = a ⊙ U_kV_kᵀ(R ⊘ a) at the layer, then down."""
    rows = []
    for x, target in p.examples():
        a, arrived = arriving(p, x, target, rule, times_output)
        c = torch.where(a == 0, 0, arrived / torch.where(a == 0, 1, a))
        rows.append(torch.cat([pull_back(p.lower, x, a * part, rule) for part in p.filtered(c)]))
    return torch.stack(rows)


def propagated_gradient(p: Problem, rule: Rule) -> Tensor:
    """Gradients that linear rules modify: U_kV_kᵀg at the layer, then down."""
    rows = []
    for x, target in p.examples():
        _, arrived = arriving(p, x, target, rule, False)
        rows.append(torch.cat([pull_back(p.lower, x, part, rule) for part in p.filtered(arrived)]))
    return torch.stack(rows)


def propagated_by_sign(p: Problem, rule: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Rules that are not linear: below the layer, the signs of the whole decide for its parts.

    `rule(module, z, signal, whole)` gets the whole signal that arrives at the module.
    """
    rows = []
    for x, target in p.examples():
        _, arrived = arriving(p, x, target, lambda m, z, s: rule(m, z, s, s), False)
        wholes: dict[nn.Module, Tensor] = {}

        def remember(m: nn.Module, z: Tensor, s: Tensor, wholes: dict[nn.Module, Tensor] = wholes) -> Tensor:
            wholes[m] = s
            return rule(m, z, s, s)

        def part_rule(m: nn.Module, z: Tensor, s: Tensor, wholes: dict[nn.Module, Tensor] = wholes) -> Tensor:
            return rule(m, z, s, wholes[m])

        pull_back(p.lower, x, arrived, remember)
        rows.append(torch.cat([pull_back(p.lower, x, part, part_rule) for part in p.filtered(arrived)]))
    return torch.stack(rows)


def concept_relevance(p: Problem, context: Context) -> Tensor:
    """R_k = (U_kᵀa)ᵀ(V_kᵀc) over all positions, shape (N, K)."""
    rows = []
    for x, target in p.examples():
        parts = p.filtered(context(p, x, target))
        rows.append(torch.cat([p.relevance(x, part) for part in parts]))
    return torch.stack(rows).detach()


def exact_totals(p: Problem, context: Context) -> Tensor:
    """(φ(x) − φ(0))ᵀ U_kV_kᵀc, shape (N, K) (Note B.3)."""
    rows = []
    for x, target in p.examples():
        parts = p.filtered(context(p, x, target))
        zero = torch.zeros_like(x)
        rows.append(torch.cat([p.relevance(x, part) - p.relevance(zero, part) for part in parts]))
    return torch.stack(rows).detach()
