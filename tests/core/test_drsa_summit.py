"""In two dimensions the directions around a solution can be tried, and none may be better."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drsa_core import DRSA, DSA


def two_arms(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Heavy tails along two directions, of which the contexts see one. Normalised, the gradient is large."""
    generator = np.random.default_rng(seed)
    radians = np.deg2rad(np.where(generator.random(400) < 0.5, 110, 25) + generator.normal(size=400) * 5)
    a = np.stack([np.cos(radians), np.sin(radians)], 1) * generator.exponential(size=(400, 1))
    c = (a @ np.array([[1.0, 0.0]]).T > 0) * np.array([[1.0, 0.1]])
    return torch.as_tensor(a), torch.as_tensor(c)


@pytest.mark.parametrize("solver", [DRSA, DSA])
@pytest.mark.parametrize("seed", range(6))
def test_the_direction_found_is_a_summit(solver, seed: int) -> None:
    a, c = two_arms(seed)
    fitted = solver(dims=[1], n_init=1, random_state=seed).fit(a, c)
    assert fitted.converged_
    (found,) = fitted.subspaces_.blocks
    # From one start it need not be the highest summit, but no direction within 5° of it may be higher.
    turns = torch.linspace(-5, 5, 201, dtype=torch.float64).deg2rad()
    nearby = torch.stack(
        [turns.cos() * found[0] - turns.sin() * found[1], turns.sin() * found[0] + turns.cos() * found[1]]
    )
    other = a if solver is DSA else c
    values = ((a @ nearby) * (other @ nearby)).clamp(min=0).square().mean(0).sqrt()
    # The solver stops when ten iterations gain less than 3e-5.
    assert values[100] >= values.max() * (1 - 3e-5)
