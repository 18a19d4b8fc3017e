"""Captum adapter: K-way attributions from Captum attributors."""

from .attribution import DisentangledAttribution
from .collect import collect
from .context import (
    GradientContext,
    IntegratedGradientsContext,
    LayerAttributionContext,
    ShapleyContext,
)
from .lrp import LRPContext
from .patches import patch_mask

__all__ = [
    "DisentangledAttribution",
    "GradientContext",
    "IntegratedGradientsContext",
    "LRPContext",
    "LayerAttributionContext",
    "ShapleyContext",
    "collect",
    "patch_mask",
]
