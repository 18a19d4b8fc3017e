"""Figures, as matplotlib objects that are never shown by themselves. Needs the extra `plot`."""

from .maps import concept_maps

__all__ = ["concept_maps"]
