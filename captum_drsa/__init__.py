"""Captum adapter: K-way attributions from Captum attributors."""

from drsa_core.contexts import GradientContext, IntegratedGradientsContext

from .attribution import DisentangledAttribution, collect
from .contexts import LayerAttributionContext, LRPContext, ShapleyContext
from .methods import patch_mask

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
