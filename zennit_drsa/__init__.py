"""Zennit adapter: K-way attributions from Zennit composites and attributors."""

from drsa_core import RelevanceLossWarning
from drsa_core.lrp.nfnet_canonizer import NFNetCanonizer

from .attribution import DisentangledAttributor, collect
from .composites import DisentangledComposite, SubspaceFilter
from .doctor import doctor
from .models.convnet import ConvNetGamma
from .models.nfnet import NFNetGamma
from .models.timm import TimmCanonizer
from .models.torchvision import TorchvisionCanonizer
from .models.transformer import TransformerCanonizer
from .models.transformer_gamma import TransformerGamma
from .models.transformer_huggingface import TransformersModel
from .models.vgg import VGGGamma

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
