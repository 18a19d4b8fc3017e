"""Layer-wise relevance propagation: canonical forms, and functions that carry relevance backwards.

`nfnet_canonizer` needs Zennit, so it is not imported here.
"""

from .canonical import (
    SMALLEST,
    DropSmall,
    ModuleEdits,
    OverDenominator,
    OverGammaDenominator,
    PassRelevance,
    TimesInput,
    at_least_single,
    by_contribution,
    check_exchangeable,
    exchanged,
    is_additive,
    parameters_of,
    passing,
    passing_forward,
    registered_copy,
)

__all__ = [
    "SMALLEST",
    "DropSmall",
    "ModuleEdits",
    "OverDenominator",
    "OverGammaDenominator",
    "PassRelevance",
    "TimesInput",
    "at_least_single",
    "by_contribution",
    "check_exchangeable",
    "exchanged",
    "is_additive",
    "parameters_of",
    "passing",
    "passing_forward",
    "registered_copy",
]
