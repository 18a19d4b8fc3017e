"""Figures, as matplotlib objects that are never shown by themselves. Needs the extra `plot`."""

from .known import known_concepts
from .manipulated import manipulated_map
from .maps import concept_maps

__all__ = ["concept_maps", "known_concepts", "manipulated_map"]
