"""Why the model's response matters, in two dimensions: the toy figures of sections 4.1 and 4.2.

Top: PCA turns to where activations are large, PRCA to where they are relevant. Bottom: the same with heavy
tails, DSA (c = a) against DRSA, one subspace of one dimension each. On the right, what each direction from 0
to 180° would be worth; the solvers must stand on the summits of their curves.

The paper does not give its points and its model, so these are our own, of the same kind.

    python examples/toy_figures.py --figure toy_figures.png
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from drsa_core import DRSA, DSA, PCA, PRCA, Subspaces
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

Found: TypeAlias = "dict[str, tuple[float, str]]"  # name of the solver ↦ its angle in degrees, its colour
Degrees: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

OURS, BLIND = "#c8102e", "#1f4ea1"  # PRCA and DRSA; PCA and DSA, which do not see the model


class Toy(NamedTuple):
    """Activations (N, 2) and a model y = Σ_j v_j max(0, w_jᵀa), `weights` w (J, 2), `signs` v (J,)."""

    a: Tensor
    weights: Tensor
    signs: Tensor

    def output(self, a: Tensor) -> Tensor:
        """y, shape (N,)."""
        return (a @ self.weights.T).clamp(min=0) @ self.signs

    def contexts(self) -> Tensor:
        """c = ∂y/∂a, shape (N, 2). The model has no biases, so that aᵀc = y."""
        return ((self.a @ self.weights.T > 0).to(self.a) * self.signs) @ self.weights


def direction(degrees: float | Degrees) -> Tensor:
    """Unit vectors, shape (…, 2)."""
    radians = torch.as_tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([radians.cos(), radians.sin()], dim=-1)


def prca_toy(n_samples: int, seed: int) -> Toy:
    """A cloud that varies most across the direction in which the model's output grows."""
    generator = np.random.default_rng(seed)
    along, across = direction(15), direction(105)
    sizes = generator.normal(size=(n_samples, 2)) * (0.35, 1.5) + (1.0, 0.4)
    a = torch.as_tensor(sizes) @ torch.stack([along, across])
    return Toy(a, direction(np.array([0.0, 40.0])), torch.tensor([1.0, 0.6], dtype=torch.float64))


def drsa_toy(n_samples: int, seed: int) -> Toy:
    """Two arms with heavy tails: the longer one hardly counts, the shorter one is what the model looks at."""
    generator = np.random.default_rng(seed)
    on_long_arm = generator.random(n_samples) < 0.5
    length = generator.exponential(size=n_samples) * np.where(on_long_arm, 1.4, 0.9)
    angles = np.where(on_long_arm, 110.0, 25.0) + generator.normal(size=n_samples) * 5
    a = direction(angles) * torch.as_tensor(length)[:, None]
    weights = direction(np.array([0.0, 50.0, 120.0]))
    return Toy(a, weights, torch.tensor([1.0, 0.5, -0.3], dtype=torch.float64))


def average_relevance(a: Tensor, c: Tensor, degrees: Degrees) -> Tensor:
    """E[(uᵀa)(uᵀc)] for unit vectors u at each angle: what PRCA maximises, with c = a what PCA does."""
    u = direction(degrees)
    return ((a @ u.T) * (c @ u.T)).mean(0)


def soft_max_relevance(a: Tensor, c: Tensor, degrees: Degrees) -> Tensor:
    """M²_n[max(0, (uᵀa)(uᵀc))]: what DRSA maximises for one subspace, with c = a what DSA does."""
    u = direction(degrees)
    return ((a @ u.T) * (c @ u.T)).clamp(min=0).square().mean(0).sqrt()


def angle_of(subspaces: Subspaces) -> float:
    """The angle of the first subspace's only direction, between 0 and 180°."""
    x, y = subspaces.blocks[0][:, 0].tolist()
    return math.degrees(math.atan2(y, x)) % 180


def draw_space(axis: Axes, toy: Toy, found: Found) -> None:
    """Points, the model's output as contours, and the directions that were found."""
    low, high = toy.a.clamp(max=0).amin(0), toy.a.clamp(min=0).amax(0)  # with the origin
    middle, half = (low + high) / 2, 0.55 * float((high - low).max())
    x_line, y_line = (torch.linspace(float(m) - half, float(m) + half, 200).double() for m in middle)
    grid = torch.stack(torch.meshgrid(x_line, y_line, indexing="xy"), dim=-1)
    output = toy.output(grid.reshape(-1, 2)).reshape(200, 200)
    limit = float(output.abs().max())
    axis.contourf(x_line, y_line, output, levels=np.linspace(-limit, limit, 21), cmap="RdGy_r", alpha=0.45)
    axis.plot(*toy.a.T.tolist(), "o", color="0.15", markersize=2.6, alpha=0.6, markeredgewidth=0)
    for name, (degrees, colour) in found.items():
        x, y = (4 * half * direction(degrees)).tolist()  # beyond the frame on both sides
        axis.plot([-x, x], [-y, y], color=colour, linewidth=2, label=f"{name}, {degrees:.0f}°")
    limits = [(float(m) - half, float(m) + half) for m in middle]
    axis.set(xlim=limits[0], ylim=limits[1], xlabel="$a_1$", ylabel="$a_2$", aspect="equal")
    axis.legend(loc="best", fontsize=9)


def draw_sweep(axis: Axes, degrees: Degrees, curves: dict[str, tuple[Tensor, str]], found: Found) -> None:
    """Values by angle, and a line at each direction that was found."""
    for name, (values, colour) in curves.items():
        axis.plot(degrees, values, color=colour, label=name)
    for degrees_found, colour in found.values():
        axis.axvline(degrees_found, color=colour, linewidth=1.2, linestyle="--")
    axis.set(xlim=(0, 180), xticks=range(0, 181, 45), xlabel="angle of the subspace in degrees")
    axis.spines[["top", "right"]].set_visible(False)


def figure(n_samples: int, seed: int) -> Figure:
    """Both toys, one row each; prints what was found."""
    degrees = np.linspace(0, 180, 721)
    drawn = Figure(figsize=(8.4, 7.4), layout="constrained")
    (space, sweep), (space_2, sweep_2) = drawn.subplots(2, 2)

    toy = prca_toy(n_samples, seed)
    a, c = toy.a, toy.contexts()
    found = {
        "PCA": (angle_of(PCA(1).fit(a).subspaces_), BLIND),
        "PRCA": (angle_of(PRCA(1).fit(a, c).subspaces_), OURS),
    }
    values = average_relevance(a, c, degrees)
    draw_space(space, toy, found)
    space.set_title("section 4.1: activations, and the model's output (red)", fontsize=10)
    draw_sweep(sweep, degrees, {"average relevance": (values, "0.2")}, found)
    sweep.set_title("average relevance $E[(u^⊤a)(u^⊤c)]$", fontsize=10)
    sweep.axhline(0, color="0.6", linewidth=0.8)
    for name, (angle, _) in found.items():
        at = float(average_relevance(a, c, np.array([angle]))[0])
        print(f"{name:4} at {angle:6.2f}°: average relevance {at:.3f} of {float(values.max()):.3f}")

    toy = drsa_toy(n_samples, seed)
    a, c = toy.a, toy.contexts()
    dsa, drsa = (solver(dims=[1], random_state=seed).fit(a, c) for solver in (DSA, DRSA))
    found = {"DSA": (angle_of(dsa.subspaces_), BLIND), "DRSA": (angle_of(drsa.subspaces_), OURS)}
    objectives = {
        "DSA (c = a)": (soft_max_relevance(a, a, degrees), BLIND),
        "DRSA": (soft_max_relevance(a, c, degrees), OURS),
    }
    draw_space(space_2, toy, found)
    space_2.set_title("section 4.2: two arms; the model looks at one", fontsize=10)
    normalised = {name: (curve / curve.max(), colour) for name, (curve, colour) in objectives.items()}
    draw_sweep(sweep_2, degrees, normalised, found)
    sweep_2.set_title("objectives $M^2_n[R^+_n]$, each divided by its maximum", fontsize=10)
    sweep_2.legend(fontsize=9)
    for (name, (angle, _)), (curve, _) in zip(found.items(), objectives.values(), strict=True):
        summit = degrees[int(curve.argmax())]
        print(f"{name:4} at {angle:6.2f}°: the summit of its objective is at {summit:.2f}°")
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=400, help="points in each toy (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--figure", type=Path, default=Path("toy_figures.png"), help="default: %(default)s")
    options = parser.parse_args()
    figure(options.samples, options.seed).savefig(options.figure, dpi=80)
    print(f"wrote {options.figure}")


if __name__ == "__main__":
    main()
