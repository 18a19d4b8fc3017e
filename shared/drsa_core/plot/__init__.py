"""Figures, as matplotlib objects that are never shown by themselves. Needs the extra `plot`."""

from .bars import relevance_bars
from .curves import delta_aupc_bars, flipping_curves, scores_against, training_curves
from .evidence import ablation_scatter, choice_of_k
from .grid import concept_grid
from .known import known_concepts
from .manipulated import manipulated_map
from .maps import concept_maps
from .showcases import confusion_matrices, relevance_boxes, relevance_scatter, roc_curves

__all__ = [
    "ablation_scatter",
    "choice_of_k",
    "concept_grid",
    "concept_maps",
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
