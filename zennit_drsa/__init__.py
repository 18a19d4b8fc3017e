"""Zennit adapter: K-way attributions from Zennit composites and attributors."""

from drsa_core.nfnet import NFNetCanonizer

from .doctor import doctor
from .nfnet import NFNetGamma
from .timm import TimmCanonizer

__all__ = ["NFNetCanonizer", "NFNetGamma", "TimmCanonizer", "doctor"]
