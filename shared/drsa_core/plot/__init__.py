"""Figures, as matplotlib objects that are never shown by themselves. Needs the extra `plot`."""

from .bars import relevance_bars
from .by_class import confusion_matrices, relevance_boxes, relevance_scatter, roc_curves
from .curves import delta_aupc_bars, flipping_curves, scores_against, training_curves
from .evidence import ablation_scatter, choice_of_k
from .feature_bars import concept_bars
from .grid import concept_grid
from .known import known_concepts
from .manipulated import manipulated_map
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
    "confusion_matrices",
    "delta_aupc_bars",
    "flipping_curves",
    "known_concepts",
    "manipulated_map",
    "relevance_bars",
    "relevance_boxes",
    "relevance_scatter",
    "roc_curves",
    "scores_against",
    "training_curves",
]
