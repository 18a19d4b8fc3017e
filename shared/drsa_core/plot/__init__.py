"""Figures, as matplotlib objects that are never shown by themselves. Needs the extra `plot`."""

from .curves import delta_aupc_bars, flipping_curves, scores_against, training_curves
from .maps import concept_maps

__all__ = ["concept_maps", "delta_aupc_bars", "flipping_curves", "scores_against", "training_curves"]
