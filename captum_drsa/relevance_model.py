"""Step 2 of Note B: the relevance model x ↦ R̂_k(x) = (U_kᵀφ(x))ᵀ(U_kᵀ[c]), the network up to the layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from drsa_core import Subspaces, filter_context
from drsa_core.checks import full_precision
from drsa_core.layer import Request
from torch import Tensor, nn


class RelevanceModel(nn.Module):
    """The network up to the layer, read out by the filtered contexts U_kU_kᵀ[c]; output (n, K).

    Called with the inputs, those additional forward arguments that have a row for each example, and last the
    numbers (n,) of the examples that the rows come from. Captum repeats these as it repeats the rows: the
    numbers say whose context is meant.

    Parameters
    ----------
    request : Request
    context : tensor, shape (N, …, D, …)
        [c], held constant.
    subspaces : Subspaces
    concept_axis : bool
        Whether the inputs come as (n, 1, …), see `explain_by_gradient`.
    """

    def __init__(
        self, request: Request, context: Tensor, subspaces: Subspaces, concept_axis: bool = False
    ) -> None:
        super().__init__()
        self.forward_func = request.forward  # a child module if it is one: DeepLift looks for its layers
        self.layer_name = request.layer_name
        self._request = (request,)  # in a tuple, so that the layer does not become a child a second time
        self._concept_axis = concept_axis
        # Methods that perturb take differences of outputs, of which half precision leaves a digit or two.
        context = context.detach().to(torch.promote_types(context.dtype, torch.float32))
        filtered = filter_context(context, subspaces, request.channel_dim)  # (K, N, …, D, …)
        self._filtered = filtered.transpose(0, 1).flatten(2)  # (N, K, positions × D)

    def forward(self, *args: Any) -> Tensor:
        """R̂_k of every row, shape (n, K)."""
        *rows, example = args
        (request,) = self._request
        inputs, of_rows = rows[: len(request.inputs)], iter(rows[len(request.inputs) :])
        if self._concept_axis:
            inputs = [x.squeeze(1) for x in inputs]
        further = zip(request.args, request.has_batch_axis, strict=True)
        all_args = [next(of_rows) if batched else value for value, batched in further]
        return self.relevance(request.activation_of((*inputs, *all_args)), example)

    def of_example(self, request: Request, i: int) -> RelevanceModel:
        """The relevance model of example i alone, for its request."""
        model = copy.copy(self)
        model._request, model._filtered = (request,), self._filtered[i : i + 1]
        return model

    @property
    def n_concepts(self) -> int:
        """Number K of concepts."""
        return int(self._filtered.shape[1])

    @full_precision()
    def relevance(self, activation: Tensor, example: Tensor) -> Tensor:
        """R̂_k of activations (n, …, D, …) under the contexts of the examples named, shape (n, K).

        In float32 for half precision.
        """
        rows = activation.flatten(1).to(self._filtered.dtype)
        if len(self._filtered) == 1:
            return rows @ self._filtered[0].T
        # Example by example, so that no context is copied for every row.
        relevance = rows.new_zeros(len(rows), self.n_concepts)
        for i in range(len(self._filtered)):
            relevance[example == i] = rows[example == i] @ self._filtered[i].T
        return relevance


def args_of_rows(request: Request) -> tuple[Any, ...]:
    """What a `RelevanceModel` takes after the inputs: what Captum may repeat with the rows."""
    further = zip(request.args, request.has_batch_axis, strict=True)
    numbers = torch.arange(len(request), device=request.inputs[0].device)
    return (*(value for value, batched in further if batched), numbers)


def baseline_relevance(
    request: Request,
    model: RelevanceModel,
    baselines: Any,
    together: Callable[..., Iterable[tuple[Tensor, ...]]] | None,
) -> Tensor:
    """R̂_k(x̃) under the context of each example, shape (N, K); the mean if x̃ is a distribution.

    `together` says which rows of the baselines of several inputs make one x̃ then: `zip`, or all combinations.
    """
    references = as_tensors(request, baselines)
    example = torch.arange(len(request), device=request.inputs[0].device)
    parts = [tuple(references)] if together is None else together(*(r.split(1) for r in references))
    relevance = []
    for part in parts:
        inputs = tuple(r.expand_as(x) for r, x in zip(part, request.inputs, strict=True))
        relevance.append(model.relevance(replace(request, inputs=inputs).activation(), example))
    return torch.stack(relevance).mean(0)


def check_baselines(request: Request, baselines: Any, is_distribution: bool, is_exact: bool) -> None:
    """Refuse baselines that do not fit the inputs: Captum would print the whole tensors.

    Parameters
    ----------
    is_distribution : bool
        Whether any number of rows is right, as for `GradientShap`.
    is_exact : bool
        Whether axes of size 1 are not stretched, as in `DeepLift`, and rows of several inputs go together.
    """
    given = baselines if isinstance(baselines, tuple) else (baselines,) * len(request.inputs)
    if len(given) != len(request.inputs):
        raise ValueError(
            f"baselines must be one for each of the {len(request.inputs)} inputs, got {len(given)}"
        )
    n_rows = [len(baseline) if isinstance(baseline, Tensor) and baseline.ndim else 1 for baseline in given]
    if is_distribution and is_exact and len(set(n_rows)) > 1:
        raise ValueError(
            f"baselines of several inputs go together row by row, but there are {n_rows}; give as many for "
            "each input"
        )
    for x, baseline in zip(request.inputs, given, strict=True):
        if not isinstance(baseline, Tensor):
            continue
        shape, rows = tuple(baseline.shape), len(baseline) if baseline.ndim else 0
        fits_example = len(shape) <= x.ndim and all(
            mine in (1, theirs) for mine, theirs in zip(shape[:0:-1], x.shape[:0:-1], strict=False)
        )
        fits_example = shape[1:] == tuple(x.shape[1:]) or (fits_example and not is_exact)
        has_rows = rows > 0 if is_distribution else rows == 1 or shape == tuple(x.shape)
        if not (fits_example and has_rows):
            one = ", ".join(map(str, x.shape[1:]))
            wanted = f"(n, {one}) with any n" if is_distribution else f"{tuple(x.shape)} or (1, {one})"
            raise ValueError(
                f"baselines of an input {tuple(x.shape)} must have the shape {wanted}, got {shape}"
            )


def as_tensors(request: Request, baselines: Any) -> list[Tensor]:
    """Baselines of each input as tensors (1, …), (N, …) or (n_baselines, …); 0 if there are none."""
    given = baselines if isinstance(baselines, tuple) else (baselines,) * len(request.inputs)
    return [
        baseline.to(x)
        if isinstance(baseline, Tensor)
        else torch.full_like(x[:1], 0 if baseline is None else baseline)
        for x, baseline in zip(request.inputs, given, strict=True)
    ]
