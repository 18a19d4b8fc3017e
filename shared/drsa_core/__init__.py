"""Relevant subspaces: collection, PRCA, DRSA, and the value `Subspaces` that the adapters take."""

from .collection import collect_pairs
from .contexts import GradientContext, IntegratedGradientsContext, UpperNetwork
from .distributed import RankError, Ranks, joined_ranks
from .drsa import DRSA, DSA, ConvergenceWarning
from .explainer import Certificate, Explainer, Explanation, Losses
from .labelled import concept_vectors, ibd_subspaces, netdissect_subspaces
from .layer import (
    RelevanceLossWarning,
    Request,
    Split,
    context_from_relevance,
    filter_context,
    filter_relevance,
    find_layer,
    lost_relevance,
)
from .many_classes import ClassIndex, fit_many
from .model_state import restored
from .objective import Objective
from .pair_store import PairStore, PairWriter
from .pairs import Pairs, PairShards, sample_pairs
from .prca import PCA, PRCA, MaxRel, NotFittedError, RandomSubspaces, Solver, learn_subspaces
from .provenance import (
    Provenance,
    ProvenanceWarning,
    check_provenance,
    describe_target,
    model_fingerprint,
    target_order,
)
from .stability import ChoiceOfK, Lineage, Stability, choose_k, stability
from .subspaces import Subspaces
from .targets import select_scores
from .token_maps import TokenLayout, TokenMaps

__all__ = [
    "DRSA",
    "DSA",
    "PCA",
    "PRCA",
    "Certificate",
    "ChoiceOfK",
    "ClassIndex",
    "ConvergenceWarning",
    "Explainer",
    "Explanation",
    "GradientContext",
    "IntegratedGradientsContext",
    "Lineage",
    "Losses",
    "MaxRel",
    "NotFittedError",
    "Objective",
    "PairShards",
    "PairStore",
    "PairWriter",
    "Pairs",
    "Provenance",
    "ProvenanceWarning",
    "RandomSubspaces",
    "RankError",
    "Ranks",
    "RelevanceLossWarning",
    "Request",
    "Solver",
    "Split",
    "Stability",
    "Subspaces",
    "TokenLayout",
    "TokenMaps",
    "UpperNetwork",
    "check_provenance",
    "choose_k",
    "collect_pairs",
    "concept_vectors",
    "context_from_relevance",
    "describe_target",
    "filter_context",
    "filter_relevance",
    "find_layer",
    "fit_many",
    "ibd_subspaces",
    "joined_ranks",
    "learn_subspaces",
    "lost_relevance",
    "model_fingerprint",
    "netdissect_subspaces",
    "restored",
    "sample_pairs",
    "select_scores",
    "stability",
    "target_order",
]
