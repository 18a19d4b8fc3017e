"""Concept maps for Quantus: an `explain_func` that its metrics can call. Quantus itself is not imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..checks import HALF, as_int
from .patches import check_maps


class ExplainFunc(Protocol):
    """What Quantus calls: model, inputs and targets ↦ attributions (N, 1, H, W)."""

    def __call__(self, model: nn.Module, inputs: Any, targets: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        """Attributions of a batch."""


def explain_func(
    attribute: Callable[[nn.Module, Tensor, Tensor], Tensor], concept: int | None = None
) -> ExplainFunc:
    """An `explain_func` for Quantus from a function that gives K concept maps.

    Parameters
    ----------
    attribute : callable
        (model, inputs (N, C, H, W), targets (N,)) ↦ maps (N, K, C, H, W). It must explain the model that it
        is given: some metrics of Quantus hand in one with other weights.
    concept : int, optional
        Which concept to explain. Default: the sum of all concepts, the standard map of complete subspaces.
        Quantus' `explain_func_kwargs={"concept": k}` overrides it.

    Returns
    -------
    callable
        With Quantus' signature; attributions are summed over colour channels, shape (N, 1, H, W), in float32
        for half precision.

    Examples
    --------
    `quantus.RegionPerturbation()(model, x, y, explain_func=function)` is then the metric of concept 2.

    >>> def attribute(model, x, y):
    ...     attributor = DisentangledAttributor(Gradient(model, composite), "features.22", subspaces)
    ...     return attributor.explain(x, y, whole=False).maps
    >>> function = explain_func(attribute, concept=2)
    >>> function(model, images.numpy(), labels.numpy()).shape
    (2, 1, 32, 32)
    """
    default = concept

    def explain(model: nn.Module, inputs: Any, targets: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        # Quantus adds keywords of its own (device, …), which say nothing about the concept.
        concept = kwargs.get("concept", default)
        parameter = next(model.parameters(), torch.empty(0))
        x = torch.as_tensor(inputs).to(parameter)
        y = torch.as_tensor(targets).long().reshape(-1).to(x.device)
        maps = check_maps(attribute(model, x, y), x)
        if maps.dtype in HALF:
            maps = maps.float()  # sums need the digits, and NumPy has no bfloat16
        if concept is None:
            chosen = maps.sum(1)
        else:
            chosen = maps[:, as_int(concept, "concept, if not None,", 0, maps.shape[1] - 1)]
        return chosen.sum(1, keepdim=True).cpu().numpy()

    return explain
