"""Is LRP valid on this model, with this composite? What a user must know before trusting a map."""

from .diagnosis import Diagnosis, LayerRelevance
from .doctor import doctor

__all__ = ["Diagnosis", "LayerRelevance", "doctor"]
