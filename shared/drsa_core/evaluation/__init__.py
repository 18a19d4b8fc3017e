"""How good concept maps are: patch flipping and scores of Notes D–G, statistics, prototypes (section 5)."""

from .ablation import ConceptAblation, compare_ablations, concept_ablation
from .fills import FILLS, Fill, Preprocessing
from .flipping import (
    FlippingCurves,
    check_maps,
    patch_flipping,
    patch_grid,
    patch_relevance,
    removal_counts,
    removal_ranks,
)
from .scores import (
    Prototypes,
    Summary,
    bootstrap_interval,
    class_means,
    delta_aupc,
    explain_func,
    peakness,
    select_prototypes,
    separability,
    summarise,
    top_images,
    total_relevance,
)

__all__ = [
    "FILLS",
    "ConceptAblation",
    "Fill",
    "FlippingCurves",
    "Preprocessing",
    "Prototypes",
    "Summary",
    "bootstrap_interval",
    "check_maps",
    "class_means",
    "compare_ablations",
    "concept_ablation",
    "delta_aupc",
    "explain_func",
    "patch_flipping",
    "patch_grid",
    "patch_relevance",
    "peakness",
    "removal_counts",
    "removal_ranks",
    "select_prototypes",
    "separability",
    "summarise",
    "top_images",
    "total_relevance",
]
