"""Points and weights on [0, 1]: those of Gauss and Legendre, and nested ones for refinement."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


def gauss_legendre(n_points: int) -> tuple[Array, Array]:
    """Points and weights (n,) of Gauss and Legendre's rule, as Captum's."""
    points, weights = np.polynomial.legendre.leggauss(n_points)
    return (points + 1) / 2, weights / 2


def fejer(n_points: int) -> tuple[Array, Array]:
    """Points and weights (n,) of Fejér's second rule, exact for polynomials of degree n − 1.

    Its points (1 + cos(jπ/(n + 1))) / 2 hold those of (n − 1)/2 points at every second place, which Gauss and
    Legendre's do not. There is none at the ends, where a network without biases has a kink.
    """
    angles = np.pi * np.arange(1, n_points + 1) / (n_points + 1)
    odd = 2 * np.arange(1, (n_points + 1) // 2 + 1) - 1
    series = (np.sin(np.outer(angles, odd)) / odd).sum(1)
    return (1 + np.cos(angles)) / 2, 2 * np.sin(angles) * series / (n_points + 1)


def nested_levels(first: int, n_levels: int) -> list[tuple[Array, Array]]:
    """Fejér's rules of 2^first − 1 points and n_levels − 1 times twice as many and one.

    Each comes as the points (p,) that it adds, and the weights of all points so far, shape (2^m − 1,), in the
    order in which the points were added.
    """
    levels: list[tuple[Array, Array]] = []
    order: Array = np.zeros(0)  # j / 2^m of all points so far
    for m in range(first, first + n_levels):
        points, weights = fejer(2**m - 1)
        places = np.arange(1, 2**m, 1 if m == first else 2)
        order = np.concatenate([order, places / 2**m])
        levels.append((points[places - 1], weights[np.rint(order * 2**m).astype(int) - 1]))
    return levels
