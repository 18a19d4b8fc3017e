"""Captum adapter: K-way attributions from Captum attributors."""

from drsa_core.layer import GradientContext, IntegratedGradientsContext

from .attribution import DisentangledAttribution
from .collect import collect
from .context import LayerAttributionContext, ShapleyContext
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
