"""Figures, as matplotlib objects that are never shown by themselves. Needs the extra `plot`."""

from .bars import concept_bars, relevance_bars
from .choice import choice_of_k
from .maps import concept_grid, concept_maps
from .tokens import concept_text, concept_text_html

__all__ = [
    "choice_of_k",
    "concept_bars",
    "concept_grid",
    "concept_maps",
    "concept_text",
    "concept_text_html",
    "relevance_bars",
]
