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
from .solvers.choice import ChoiceOfK, Split, choose_k
from .solvers.stability import Stability, stability
from .subspaces import Subspaces

__all__ = [
    "DRSA",
    "DSA",
    "PCA",
    "PRCA",
    "Certificate",
    "ChoiceOfK",
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
    "Split",
    "Stability",
    "Subspaces",
    "check_provenance",
    "choose_k",
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
    "stability",
    "target_order",
]
