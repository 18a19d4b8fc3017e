"""Zennit adapter: K-way attributions from Zennit composites and attributors."""

from .attributor import DisentangledAttributor
from .collect import collect
from .composite import DisentangledComposite
from .filter import RelevanceLossWarning, SubspaceFilter, VirtualLayer
from .vgg import VGGGamma

__all__ = [
    "DisentangledAttributor",
    "DisentangledComposite",
    "RelevanceLossWarning",
    "SubspaceFilter",
    "VGGGamma",
    "VirtualLayer",
    "collect",
]
