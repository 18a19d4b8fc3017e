"""Relevant subspaces: collection, PRCA, DRSA, and the value `Subspaces` that the adapters take."""

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
from .provenance import Provenance, ProvenanceWarning, check_provenance, describe_target, target_order
from .solvers import (
    DRSA,
    DSA,
    PCA,
    PRCA,
    ConvergenceWarning,
    MaxRel,
    NotFittedError,
    RandomSubspaces,
    ibd_subspaces,
    netdissect_subspaces,
)
from .subspaces import Subspaces
from .token_maps import TokenLayout, TokenMaps

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
    "TokenLayout",
    "TokenMaps",
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
