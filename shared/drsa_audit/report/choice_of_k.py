"""Why there are so many concepts: charts and a table of every K that was tried."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from .charts import Line, line_chart


def choice_charts(found: dict[str, Any]) -> dict[str, Markup]:
    """Stability, and the objective on images left out, against K.

    Parameters
    ----------
    found : dict
        As in `drsa_audit.concepts.Learned`.
    """
    ks, chosen = found["n_subspaces"], f"{found['best']} are shown"
    charts = {
        "choice": line_chart(
            [
                Line("least stable concept", ks, found["index"], "one"),
                Line("needed", ks, found["threshold"], "faint"),
            ],
            "number of concepts K",
            "stability",
            f"Stability of the least stable concept by number of concepts; {chosen}.",
        )
    }
    if "null_objective" in found:
        charts["objective"] = line_chart(
            [
                Line("images left out", ks, found["held_out"], "one"),
                Line("shuffled contexts", ks, found["null_objective"], "faint"),
            ],
            "number of concepts K",
            "objective J",
            f"Objective on images left out and with shuffled contexts by number of concepts; {chosen}.",
        )
    return charts


def choice_rows(found: dict[str, Any] | None) -> list[dict[str, str]]:
    """For each K its numbers as text, and what becomes of its concepts at the next K."""
    if not found or "splits" not in found:
        return []
    splits = [*found["splits"], None]
    return [
        {
            "n_subspaces": str(k),
            "index": f"{found['index'][i]:.2f}",
            "overlap": f"{found['overlap'][i]:.2f}",
            "held_out": f"{found['held_out'][i]:.3g}",
            "null_objective": f"{found['null_objective'][i]:.3g}",
            "split": "" if splits[i] is None else _what_splits(k, splits[i]),
        }
        for i, k in enumerate(found["n_subspaces"])
    ]


def _what_splits(n_subspaces: int, parents: list[int]) -> str:
    """In words: which concepts, numbered from 1, have several children among the next ones."""
    children = {
        k: [child + 1 for child, parent in enumerate(parents) if parent == k] for k in range(n_subspaces)
    }
    parts = [
        f"{k + 1} splits into {' and '.join(map(str, own))}" for k, own in children.items() if len(own) > 1
    ]
    parts += [f"{k + 1} has no successor" for k, own in children.items() if not own]
    return "; ".join(parts) or "all stay"
