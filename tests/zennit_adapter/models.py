"""Kept for tests that import these names from here."""

from tests.toys import arriving_at as slot_at
from tests.toys import randomise_batch_norm, small_input, small_model, subspaces, torchvision_model

__all__ = ["randomise_batch_norm", "slot_at", "small_input", "small_model", "subspaces", "torchvision_model"]
