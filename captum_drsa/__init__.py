"""Captum adapter: K-way attributions from Captum attributors."""

from drsa_core.layer import GradientContext, IntegratedGradientsContext

from .attribution import DisentangledAttribution
from .captum_lrp import LRPContext
from .captum_pairs import collect
from .context import LayerAttributionContext, ShapleyContext
from .image_patches import patch_mask

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
