"""Draws packages, their modules and the imports between them as an SVG file.

A box is a package or a folder in one, with its modules and lines of code; an arrow is what one box imports of
another, as wide as there are such imports. Imports against the direction of the design are red.

    python -m tests.imports.draw --root . --out modules.svg
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from .modules import LIBRARY, Module, read_modules

# Rows of the drawing from top to bottom; imports go down, or from left to right in the last row.
ROWS = (("examples",), ("drsa_audit",), ("captum_drsa", "zennit_drsa"), ("drsa_core",))
COLOURS = {
    "examples": "#8a8a8a",
    "drsa_audit": "#7b3fa0",
    "captum_drsa": "#1f4ea1",
    "zennit_drsa": "#0b7a5b",
    "drsa_core": "#c77700",
}
LINE, COLUMN, GAP, ROW_GAP, MARGIN = 15, 140, 22, 96, 20  # pixels


@dataclass(frozen=True)
class Box:
    """A package, or a folder in one, at a place in the drawing."""

    name: str
    modules: list[Module]
    x: float
    y: float
    n_columns: int

    @property
    def width(self) -> float:
        """In pixels; the title must fit in."""
        return max(self.n_columns * COLUMN + 12, 8.2 * len(self.name) + 76)

    @property
    def height(self) -> float:
        """In pixels, with the title."""
        return 30 + LINE * math.ceil(max(1, len(self.modules)) / self.n_columns)

    @property
    def colour(self) -> str:
        """That of its package."""
        return COLOURS[self.name.partition(".")[0]]


def group_of(name: str, groups: Sequence[str]) -> str | None:
    """The box in which a module is shown: the longest group that its name begins with."""
    fitting = [group for group in groups if name == group or name.startswith(f"{group}.")]
    return max(fitting, key=len, default=None)


def place_boxes(modules: Sequence[Module]) -> list[Box]:
    """Boxes in rows, each row in the middle."""
    folders = {m.name.rpartition(".")[0] for m in modules if "." in m.name}
    groups = sorted(folders | {m.package for m in modules})
    members: dict[str, list[Module]] = {group: [] for group in groups}
    for module in modules:
        if module.name not in members:  # `__init__` stands for the box itself
            members[group_of(module.name, groups) or module.package].append(module)
    boxes: list[Box] = []
    y = float(MARGIN + 30)
    for row in ROWS:
        found = [group for group in groups if group.partition(".")[0] in row]
        if not found:
            continue
        line, x = [], float(MARGIN)
        for group in found:
            box = Box(group, members[group], x, y, max(1, min(6, math.ceil(len(members[group]) / 9))))
            line.append(box)
            x += box.width + GAP
        boxes += line
        y += max(box.height for box in line) + ROW_GAP
    widths = {y: max(b.x + b.width for b in boxes if b.y == y) for y in {b.y for b in boxes}}
    widest = max(widths.values())
    return [replace(box, x=box.x + (widest - widths[box.y]) / 2) for box in boxes]


def count_imports(modules: Sequence[Module], boxes: Sequence[Box]) -> Counter[tuple[str, str]]:
    """How many imports lead from one box to another."""
    groups = [box.name for box in boxes]
    found: Counter[tuple[str, str]] = Counter()
    for module in modules:
        source = group_of(module.name, groups)
        for imported in module.imports:
            target = group_of(imported, groups)
            if source is not None and target is not None and source != target:
                found[source, target] += 1
    return found


def is_upward(source: Box, target: Box) -> bool:
    """Whether an import goes against the design: up, or from one adapter to the other."""
    packages = {box.name.partition(".")[0] for box in (source, target)}
    return target.y < source.y or (target.y == source.y and len(packages) > 1)


def draw_arrow(source: Box, target: Box, n_imports: int, at: float) -> str:
    """A curve from the source, a share `at` along its edge, to the middle of the target."""
    colour = "#d00000" if is_upward(source, target) else source.colour
    x1 = source.x + at * source.width
    if source.y == target.y:  # below the row
        y1, x2, y2 = source.y + source.height, target.x + target.width / 2, target.y + target.height
        low = max(y1, y2) + 26 + 0.05 * abs(x2 - x1)
        curve = f"M{x1:.0f},{y1:.0f} C{x1:.0f},{low:.0f} {x2:.0f},{low:.0f} {x2:.0f},{y2 + 7:.0f}"
        tip = f"M{x2 - 5:.0f},{y2 + 8:.0f} h10 l-5,-8 z"
        label_x, label_y = (x1 + x2) / 2, 0.125 * (y1 + y2) + 0.75 * low + 4
    else:
        y1, y2 = source.y + source.height, target.y
        if target.y < source.y:
            y1, y2 = source.y, target.y + target.height
        # Sources arrive side by side, in the order in which they stand.
        x2 = target.x + target.width * (0.25 + 0.5 * min(1, max(0, (x1 - target.x) / target.width)))
        half = (y2 - y1) / 2
        curve = f"M{x1:.0f},{y1:.0f} C{x1:.0f},{y1 + half:.0f} {x2:.0f},{y2 - half:.0f} {x2:.0f},{y2 - 7:.0f}"
        tip = f"M{x2 - 5:.0f},{y2 - 8:.0f} h10 l-5,8 z"
        label_x, label_y = 0.35 * x1 + 0.65 * x2, 0.35 * y1 + 0.65 * y2
    width = 0.8 + 0.5 * math.sqrt(n_imports)
    return (
        f'<path d="{curve}" fill="none" stroke="{colour}" stroke-width="{width:.1f}" opacity="0.55"/>'
        f'<path d="{tip}" fill="{colour}"/>'
        f'<text x="{label_x:.0f}" y="{label_y:.0f}" class="n" fill="{colour}">{n_imports}</text>'
    )


def draw_box(box: Box) -> str:
    """A frame with the title and the modules, in columns."""
    lines = sum(module.lines for module in box.modules)
    parts = [
        f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{box.height:.0f}" rx="6" '
        f'fill="white" stroke="{box.colour}" stroke-width="1.6"/>',
        f'<text x="{box.x + 8:.0f}" y="{box.y + 17:.0f}" class="t" fill="{box.colour}">{escape(box.name)} '
        f'<tspan class="l">{lines} lines</tspan></text>',
    ]
    n_rows = math.ceil(max(1, len(box.modules)) / box.n_columns)
    for i, module in enumerate(box.modules):
        short = module.name.rpartition(".")[2]
        x = box.x + 8 + i // n_rows * COLUMN
        y = box.y + 34 + i % n_rows * LINE
        parts.append(
            f'<text x="{x:.0f}" y="{y:.0f}" class="m" fill="#222">{escape(short)} '
            f'<tspan class="l">{module.lines}</tspan></text>'
        )
    return "".join(parts)


def draw(modules: Sequence[Module], title: str) -> str:
    """The whole drawing, as SVG."""
    boxes = place_boxes(modules)
    by_name = {box.name: box for box in boxes}
    imports = count_imports(modules, boxes)
    library = [m for m in modules if m.package in LIBRARY]
    width = max(box.x + box.width for box in boxes) + MARGIN
    height = max(box.y + box.height for box in boxes) + MARGIN + 100
    total = f"{title}: {len(library)} modules, {sum(m.lines for m in library)} lines in the library"
    legend = "grey: lines of code · at arrows: number of imports · red: an import upwards"
    arrows = []
    for source in boxes:
        # From left to right, so that curves of one box cross little.
        targets = sorted((t for s, t in imports if s == source.name), key=lambda t: by_name[t].x)
        for i, name in enumerate(targets, start=1):
            arrows.append(
                draw_arrow(source, by_name[name], imports[source.name, name], i / (len(targets) + 1))
            )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}">',
            "<style>text{font-family:Helvetica,Arial,sans-serif}.h{font-size:16px}.t{font-size:13px;"
            "font-weight:bold}.m{font-size:11.5px}.l{font-size:10px;fill:#999;font-weight:normal}"
            ".n{font-size:11px;text-anchor:middle;paint-order:stroke;stroke:white;stroke-width:3px}</style>",
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fbfaf7"/>',
            f'<text x="{MARGIN}" y="26" class="h">{escape(total)}</text>',
            f'<text x="{MARGIN}" y="{height - 14:.0f}" class="l">{escape(legend)}</text>',
            *arrows,  # behind the boxes, so that names can be read
            *(draw_box(box) for box in boxes),
            "</svg>\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path("."), help="the repository (default: here)")
    parser.add_argument("--out", type=Path, default=Path("modules.svg"), help="default: %(default)s")
    parser.add_argument("--title", default="modules and imports", help="default: %(default)s")
    parser.add_argument("--no-examples", action="store_true", help="draw the library alone")
    options = parser.parse_args()
    packages = LIBRARY if options.no_examples else (*LIBRARY, "examples")
    modules = read_modules(options.root, packages)
    options.out.write_text(draw(modules, options.title))
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
