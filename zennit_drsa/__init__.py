"""Zennit adapter: K-way attributions from Zennit composites and attributors."""

from drsa_core import RelevanceLossWarning
from drsa_core.nfnet import NFNetCanonizer

from .attributor import DisentangledAttributor
from .canonizers import TimmCanonizer, TorchvisionCanonizer
from .composite import DisentangledComposite
from .doctor import doctor
from .family_composites import ConvNetGamma, NFNetGamma, TransformerGamma, VGGGamma
from .filter import SubspaceFilter, VirtualLayer
from .transformers import TransformerCanonizer, TransformersModel
from .zennit_pairs import collect

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
    "VirtualLayer",
    "collect",
    "doctor",
]
