"""Relevant subspaces: collection, PRCA, DRSA, and the value `Subspaces` that the adapters take."""

from .baselines import DSA, PCA, MaxRel, RandomSubspaces
from .concepts import ibd_subspaces, netdissect_subspaces
from .drsa import DRSA, ConvergenceWarning
from .estimator import NotFittedError
from .explanation import Certificate, Explanation, Losses
from .fingerprint import model_fingerprint
from .layer import (
    RelevanceLossWarning,
    context_from_relevance,
    filter_context,
    filter_relevance,
    find_layer,
    lost_relevance,
)
from .pair_store import PairStore, PairWriter
from .pairs import Pairs, sample_pairs
from .prca import PRCA
from .provenance import Provenance, ProvenanceWarning, check_provenance, describe_target, target_order
from .subspaces import Subspaces

__all__ = [
    "DRSA",
    "DSA",
    "PCA",
    "PRCA",
    "Certificate",
    "ConvergenceWarning",
    "Explanation",
    "Losses",
    "MaxRel",
    "NotFittedError",
    "PairStore",
    "PairWriter",
    "Pairs",
    "Provenance",
    "ProvenanceWarning",
    "RandomSubspaces",
    "RelevanceLossWarning",
    "Subspaces",
    "check_provenance",
    "context_from_relevance",
    "describe_target",
    "filter_context",
    "filter_relevance",
    "find_layer",
    "ibd_subspaces",
    "lost_relevance",
    "model_fingerprint",
    "netdissect_subspaces",
    "sample_pairs",
    "target_order",
]
