"""One colour for each concept, told apart by people who do not see all colours."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass

# Okabe and Ito's palette without black and yellow, which vanish on dark and light pages.
_FIRST = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


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
    """So many different colours; after the first six they go around the colour wheel."""
    colours = [Colour(code) for code in _FIRST[:n_concepts]]
    for i in range(n_concepts - len(colours)):
        red, green, blue = colorsys.hls_to_rgb((0.12 + 0.618 * i) % 1, 0.45, 0.6)
        colours.append(Colour(f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"))
    return colours
