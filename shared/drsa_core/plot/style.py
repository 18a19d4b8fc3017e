"""What the figures share: two colours, names of concepts, labels with R and its share."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

#: Red counts for the prediction, blue against it.
FOR, AGAINST = "#c8102e", "#1f4ea1"


def concept_names(names: Sequence[str] | None, n_concepts: int) -> list[str]:
    """The given names, or S1 … SK."""
    if names is None:
        return [f"S{k + 1}" for k in range(n_concepts)]
    if isinstance(names, str) or len(names) != n_concepts:
        got = repr(names) if isinstance(names, str) else len(names)
        raise ValueError(
            f"names must be {n_concepts} strings, one for each map, got {got}; maps with a residual need a "
            "name for it too"
        )
    return list(names)


def share_label(total: float, whole: float, magnitude: float) -> str:
    """R of a panel and its share of the whole; no share where it would mislead.

    That is, where the whole is negative or the parts cancel: below a tenth of `magnitude`, Σ|R_k|.
    """
    share = f" ({100 * total / whole:.0f} %)" if whole > 0.1 * magnitude else ""
    return f"R = {total:.3g}{share}"


def number(value: float) -> str:
    """A small number for people: 0.12, 3.1e-07, 0."""
    return "0" if value == 0 else f"{value:.2g}"


def strip(axis: Axes) -> None:
    """Take off the frame above and on the right."""
    axis.spines[["top", "right"]].set_visible(False)
