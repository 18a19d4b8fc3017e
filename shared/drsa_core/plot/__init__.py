"""Figures, as matplotlib objects that are never shown by themselves. Needs the extra `plot`."""

from .bars import relevance_bars
from .grid import concept_grid
from .maps import concept_maps

__all__ = ["concept_grid", "concept_maps", "relevance_bars"]
