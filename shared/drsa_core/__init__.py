"""Relevant subspaces: collection, PRCA, DRSA, and the value `Subspaces` that the adapters take."""

from .baselines import DSA, PCA, MaxRel, RandomSubspaces
from .concepts import ibd_subspaces, netdissect_subspaces
from .drsa import DRSA, ConvergenceWarning
from .estimator import NotFittedError
from .layers import find_layer, model_fingerprint
from .pairs import Pairs, PairStore, sample_pairs
from .prca import PRCA
from .subspaces import Subspaces
from .virtual_layer import context_from_relevance, filter_context, filter_relevance, lost_relevance

__all__ = [
    "DRSA",
    "DSA",
    "PCA",
    "PRCA",
    "ConvergenceWarning",
    "MaxRel",
    "NotFittedError",
    "PairStore",
    "Pairs",
    "RandomSubspaces",
    "Subspaces",
    "context_from_relevance",
    "filter_context",
    "filter_relevance",
    "find_layer",
    "ibd_subspaces",
    "lost_relevance",
    "model_fingerprint",
    "netdissect_subspaces",
    "sample_pairs",
]
