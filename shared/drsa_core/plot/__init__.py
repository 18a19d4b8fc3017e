"""Figures, as matplotlib objects that are never shown by themselves. Needs the extra `plot`."""

from .bars import relevance_bars
from .curves import delta_aupc_bars, flipping_curves, scores_against, training_curves
from .evidence import ablation_scatter, choice_of_k
from .feature_bars import concept_bars
from .grid import concept_grid
from .maps import concept_maps
from .text import concept_text, concept_text_html

__all__ = [
    "ablation_scatter",
    "choice_of_k",
    "concept_bars",
    "concept_grid",
    "concept_maps",
    "concept_text",
    "concept_text_html",
    "delta_aupc_bars",
    "flipping_curves",
    "relevance_bars",
    "scores_against",
    "training_curves",
]
