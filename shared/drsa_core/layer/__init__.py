"""The layer at which concepts are found: cutting the network there, what goes around it, giving it back."""

from .backward import BackwardPass
from .contexts import ContextMethod, GradientContext, IntegratedGradientsContext, contexts_by_example
from .cut import Cut, gradients_at_cut, gradients_at_inputs
from .find import eager, find_layer
from .guard import Guard, guarded, uninterrupted
from .keywords import inputs_in_place
from .losses import (
    TOLERANCE,
    RelevanceLossWarning,
    batch_dependence,
    lost_relevance,
    share_around,
    warn_of_bypass,
    warn_of_loss,
    warn_of_training,
)
from .random_numbers import drawn_again
from .request import Forward, Inputs, Request, copies, is_backward, with_batch_axes
from .shapes import as_activation, check_fits, sum_over_positions
from .upper_network import UpperNetwork
from .virtual_layer import context_from_relevance, filter_context, filter_relevance

__all__ = [
    "TOLERANCE",
    "BackwardPass",
    "ContextMethod",
    "Cut",
    "Forward",
    "GradientContext",
    "Guard",
    "Inputs",
    "IntegratedGradientsContext",
    "RelevanceLossWarning",
    "Request",
    "UpperNetwork",
    "as_activation",
    "batch_dependence",
    "check_fits",
    "context_from_relevance",
    "contexts_by_example",
    "copies",
    "drawn_again",
    "eager",
    "filter_context",
    "filter_relevance",
    "find_layer",
    "gradients_at_cut",
    "gradients_at_inputs",
    "guarded",
    "inputs_in_place",
    "is_backward",
    "lost_relevance",
    "share_around",
    "sum_over_positions",
    "uninterrupted",
    "warn_of_bypass",
    "warn_of_loss",
    "warn_of_training",
    "with_batch_axes",
]
