"""Figures, as matplotlib objects that are never shown by themselves. Needs the extra `plot`."""

from .bars import relevance_bars
from .grid import concept_grid
from .known import known_concepts
from .manipulated import manipulated_map
from .maps import concept_maps
from .showcases import confusion_matrices, relevance_boxes, relevance_scatter, roc_curves

__all__ = [
    "concept_grid",
    "concept_maps",
    "confusion_matrices",
    "known_concepts",
    "manipulated_map",
    "relevance_bars",
    "relevance_boxes",
    "relevance_scatter",
    "roc_curves",
]
