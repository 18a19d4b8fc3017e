from ..models.transformer import ATTENTION, TransformerCanonizer
from ..models.transformer_huggingface import TransformersModel

__all__ = ["ATTENTION", "TransformerCanonizer", "TransformersModel"]
