"""What the page shows: pictures as data URIs, one colour for each concept, small charts as SVG."""

from __future__ import annotations

import base64
import colorsys
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from markupsafe import Markup, escape
from PIL import Image
from torch import Tensor

_WIDTH, _HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 14, 42
#: Side of the crops around a concept, as a part of the picture's side.
CROP = 0.4
#: Maps are shown at this many pixels a side, at most: finer ones are grain.
MAP_SIDE = 56
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
    """Lines over a common frame, with a legend; the summary is for those who do not see the chart."""
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
    """Points of groups (colour, x, y), and the diagonal on which both axes agree."""
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


def concept_colours(n_concepts: int) -> list[str]:
    """As many colours, told apart by people who do not see all; after six they go around the colour wheel."""
    colours = list(_FIRST[:n_concepts])
    for i in range(n_concepts - len(colours)):
        parts = colorsys.hls_to_rgb((0.12 + 0.618 * i) % 1, 0.45, 0.6)
        colours.append("#" + "".join(f"{round(255 * part):02x}" for part in parts))
    return colours


def rgb(colour: str) -> tuple[int, int, int]:
    """Red, green and blue, 0 to 255, of a colour as CSS writes it."""
    red, green, blue = bytes.fromhex(colour[1:])
    return red, green, blue


def jpeg(pixels: Tensor, side: int | None = None, quality: int = 85) -> str:
    """Pixels (3, H, W) in [0, 1] as a data URI, scaled to a side if one is given."""
    array = (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    image = Image.fromarray(array)
    if side is not None and image.size != (side, side):
        enlarges = side > image.width
        how = Image.Resampling.NEAREST if enlarges and image.width < 48 else Image.Resampling.LANCZOS
        image = image.resize((side, side), how)
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=quality, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def peak(relevance: Tensor) -> tuple[int, int]:
    """Row and column around which most of the positive relevance (H, W) lies."""
    height, width = relevance.shape
    window = max(1, round(CROP * min(height, width) / 2) | 1)
    positive = relevance.clamp(min=0)[None, None]
    sums = torch.nn.functional.avg_pool2d(positive, window, 1, window // 2, count_include_pad=True)[0, 0]
    place = int(sums.argmax())
    return place // width, place % width


def crop_box(relevance: Tensor) -> tuple[int, int, int]:
    """Top, left and side of the square around a map's peak, inside of the picture."""
    height, width = relevance.shape
    side = max(4, round(CROP * min(height, width)))
    row, column = peak(relevance)
    top = min(max(0, row - side // 2), height - side)
    left = min(max(0, column - side // 2), width - side)
    return top, left, side


def cropped(pixels: Tensor, relevance: Tensor) -> Tensor:
    """The square of a picture (3, H, W) around the peak of a map (H, W)."""
    top, left, side = crop_box(relevance)
    return pixels[:, top : top + side, left : left + side]


def over_photograph(pixels: Tensor, relevance: Tensor, limit: float, colour: str) -> Tensor:
    """A map (H, W) in a concept's colour over the photograph in grey; what counts against it is left out."""
    strength = (smooth(relevance).clamp(min=0) / limit).clamp(0, 1).sqrt()
    grey = 0.25 + 0.65 * pixels.mean(0, keepdim=True).expand(3, -1, -1)
    tint = torch.tensor(rgb(colour))[:, None, None] / 255
    return grey * (1 - 0.85 * strength) + tint * 0.85 * strength


def smooth(relevance: Tensor) -> Tensor:
    """A map at `MAP_SIDE` pixels a side at most, brought back to its size."""
    small = shrunk(relevance)
    return torch.nn.functional.interpolate(
        small[None, None], tuple(relevance.shape), mode="bilinear", align_corners=False
    )[0, 0]


def shrunk(relevance: Tensor) -> Tensor:
    """Means of (…, H, W) over squares, so that no side is longer than `MAP_SIDE`."""
    pool = max(1, -(-relevance.shape[-1] // MAP_SIDE))
    flat = relevance.reshape(-1, 1, *relevance.shape[-2:])
    small = torch.nn.functional.avg_pool2d(flat, pool, ceil_mode=True)
    return small.reshape(*relevance.shape[:-2], *small.shape[-2:])


def strength(maps: Tensor) -> float:
    """What counts as full colour: the 99.5 % quantile of |R| of the shrunk maps, or the largest."""
    values = shrunk(maps).abs().flatten()
    limit = float(np.quantile(values.numpy(), 0.995)) or float(values.max())
    return limit or 1.0


def packed(maps: Tensor, limit: float) -> str:
    """Maps (K, H, W) as signed bytes in base64: ±127 is ±limit."""
    values = (shrunk(maps) / limit * 127).clamp(-127, 127).round().to(torch.int8)
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()
