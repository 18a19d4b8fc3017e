"""Small charts as SVG, drawn by hand, and one colour for each concept."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

_WIDTH, _HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 14, 42
# Okabe and Ito's palette without black and yellow, which vanish on dark and light pages.
_FIRST = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True)
class Line:
    """A named line through points, `style` being a class of the page's CSS."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: str


def line_chart(lines: Sequence[Line], x_label: str, y_label: str, summary: str) -> Markup:
    """Lines over a common frame, with a legend if there are several.

    Parameters
    ----------
    summary : str
        What the chart says, for those who do not see it.
    """
    frame = _Frame([x for line in lines for x in line.x], [y for line in lines for y in line.y])
    body = []
    for line in lines:
        points = " ".join(frame.at(x, y) for x, y in zip(line.x, line.y, strict=True))
        body.append(f'<polyline class="line {line.style}" points="{points}"/>')
    if len(lines) > 1:
        for i, line in enumerate(lines):
            y = _TOP + 14 + 18 * i
            right = _WIDTH - _RIGHT
            body.append(
                f'<line class="line {line.style}" x1="{right - 26}" x2="{right}" y1="{y}" y2="{y}"/>'
                f'<text class="legend" x="{right - 32}" y="{y + 4}">{escape(line.name)}</text>'
            )
    return frame.svg(body, x_label, y_label, summary)


def point_chart(
    groups: Sequence[tuple[str, Sequence[float], Sequence[float]]], x_label: str, y_label: str, summary: str
) -> Markup:
    """Points, one colour for each group, and the diagonal on which both axes agree.

    Parameters
    ----------
    groups : sequence of (colour, x, y)
    """
    xs = [x for _, group, _ in groups for x in group]
    ys = [y for _, _, group in groups for y in group]
    frame = _Frame(xs, ys)
    low, high = max(frame.x[0], frame.y[0]), min(frame.x[1], frame.y[1])
    body = []
    if low < high:
        (x1, y1), (x2, y2) = frame.place(low, low), frame.place(high, high)
        body.append(f'<line class="line faint" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
    for colour, group_x, group_y in groups:
        for x, y in zip(group_x, group_y, strict=True):
            left, top = frame.place(x, y)
            body.append(
                f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3.5" fill="{colour}" fill-opacity=".75"/>'
            )
    return frame.svg(body, x_label, y_label, summary)


class _Frame:
    """Axes with round numbers."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.x, self.x_ticks = _ticks(xs)
        self.y, self.y_ticks = _ticks(ys)

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )

    def at(self, x: float, y: float) -> str:
        left, top = self.place(x, y)
        return f"{left:.1f},{top:.1f}"

    def svg(self, body: list[str], x_label: str, y_label: str, summary: str) -> Markup:
        parts = []
        bottom = _HEIGHT - _BOTTOM
        for tick in self.x_ticks:
            x, _ = self.place(tick, self.y[0])
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
            )
        for tick in self.y_ticks:
            _, y = self.place(self.x[0], tick)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
                f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
            )
        x, y = (_LEFT + _WIDTH - _RIGHT) / 2, (_TOP + bottom) / 2
        parts.append(
            f'<text class="axis" x="{x}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
            f'<text class="axis" transform="translate(13 {y}) rotate(-90)" text-anchor="middle">'
            f"{escape(y_label)}</text>"
        )
        return Markup(
            f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(summary)}">'
            + "".join([*parts, *body])
            + "</svg>"
        )


def _ticks(values: Sequence[float]) -> tuple[tuple[float, float], list[float]]:
    """Limits and about five round numbers between them."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if high == low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # To twelve digits of their own, however small the numbers are.
    ticks = [float(f"{i * step:.12g}") for i in range(first, last + 1)]
    return (ticks[0], ticks[-1]), ticks


def choice_charts(found: dict[str, Any]) -> dict[str, Markup]:
    """Why there are so many concepts: stability, and the objective on images left out, against K."""
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


@dataclass(frozen=True)
class Colour:
    """A colour as CSS writes it."""

    code: str

    @property
    def rgb(self) -> tuple[int, int, int]:
        """Red, green and blue, 0 to 255."""
        red, green, blue = (int(self.code[i : i + 2], 16) for i in (1, 3, 5))
        return red, green, blue


def concept_colours(n_concepts: int) -> list[Colour]:
    """As many colours, told apart by people who do not see all; after six they go around the colour wheel."""
    colours = [Colour(code) for code in _FIRST[:n_concepts]]
    for i in range(n_concepts - len(colours)):
        red, green, blue = colorsys.hls_to_rgb((0.12 + 0.618 * i) % 1, 0.45, 0.6)
        colours.append(Colour(f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"))
    return colours
