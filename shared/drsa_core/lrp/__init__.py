"""Layer-wise relevance propagation: canonical forms, and functions that carry relevance backwards.

`nfnet_canonizer` needs Zennit, so it is not imported here.
"""

from .canonical import (
    DropSmall,
    ModuleEdits,
    OverDenominator,
    PassRelevance,
    TimesInput,
    exchanged,
    parameters_of,
    passing,
    passing_forward,
    registered_copy,
)

__all__ = [
    "DropSmall",
    "ModuleEdits",
    "OverDenominator",
    "PassRelevance",
    "TimesInput",
    "exchanged",
    "parameters_of",
    "passing",
    "passing_forward",
    "registered_copy",
]
