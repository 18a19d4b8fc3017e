"""Zennit adapter: K-way attributions from Zennit composites and attributors."""

from drsa_core import RelevanceLossWarning
from drsa_core.nfnet import NFNetCanonizer

from .attribution import DisentangledAttributor, collect
from .canonizers import TimmCanonizer, TorchvisionCanonizer
from .composites import DisentangledComposite, SubspaceFilter
from .doctor import doctor
from .family_composites import ConvNetGamma, NFNetGamma, TransformerGamma, VGGGamma
from .transformers import TransformerCanonizer, TransformersModel

__all__ = [
    "ConvNetGamma",
    "DisentangledAttributor",
    "DisentangledComposite",
    "NFNetCanonizer",
    "NFNetGamma",
    "RelevanceLossWarning",
    "SubspaceFilter",
    "TimmCanonizer",
    "TorchvisionCanonizer",
    "TransformerCanonizer",
    "TransformerGamma",
    "TransformersModel",
    "VGGGamma",
    "collect",
    "doctor",
]
