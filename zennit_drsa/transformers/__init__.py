"""Transformers: the parts of their canonical form, and families of them as tables."""

from . import huggingface, open_clip, timm, torchvision
from .canonizer import ATTENTION, FAMILIES, Family, TransformerCanonizer
from .huggingface import TransformersModel

FAMILIES += [
    huggingface.TEXT,
    huggingface.VIT,
    open_clip.FAMILY,
    timm.VIT,
    timm.SWIN,
    torchvision.VIT,
    torchvision.SWIN,
]

__all__ = ["ATTENTION", "FAMILIES", "Family", "TransformerCanonizer", "TransformersModel"]
