"""Labelled baselines: subspaces from concepts with names, NetDissect (Note H) and IBD (Note I)."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from .checks import ArrayLike, as_float, as_int, as_int_labels, check_matrix, check_nonzero, unit_rows
from .prca import Activations, mean_relevance_of_features, unpack_pairs, with_provenance
from .subspaces import RESIDUAL, Subspaces


def netdissect_subspaces(
    concepts: Mapping[int, str] | Sequence[str] | str | PathLike[str],
    a: Activations,
    c: ArrayLike | None = None,
    n_subspaces: int | None = 4,
) -> Subspaces:
    """One subspace per concept, spanned by the canonical vectors of the filters that NetDissect gave it.

    Concepts hold different numbers N_k of filters, so they are ranked by mean relevance per filter,
    E[R_k] / N_k (Note H). No IoU threshold is applied: every filter has a concept, as in the paper.

    Parameters
    ----------
    concepts : mapping, sequence or path
        The concept of each filter: {filter: concept}, a sequence in the order of the filters, or the path
        of a NetDissect tally, a CSV file with columns `unit` (counted from 1) and `label`.
    a, c : array or tensor, shape (N, D)
        Activations and contexts by which the concepts are ranked; or `Pairs` as `a`, and no `c`.
    n_subspaces : int or None
        How many of the best concepts to keep; None keeps all.

    Returns
    -------
    Subspaces
        Named after the concepts, best first; not completed.
    """
    samples = unpack_pairs(a, c)
    check_nonzero(samples.a, samples.c)
    n_features = samples.a.shape[1]
    if isinstance(concepts, str | PathLike):
        concepts = _read_tally(Path(concepts))
    elif not isinstance(concepts, Mapping):
        concepts = dict(enumerate(concepts))
    if sorted(concepts) != list(range(n_features)):
        raise ValueError(
            f"concepts must name a concept for each of the {n_features} filters 0…{n_features - 1}, "
            f"got {len(concepts)} filters from {min(concepts, default=None)} to {max(concepts, default=None)}"
        )
    filters: dict[str, list[int]] = {}
    for index in range(n_features):
        filters.setdefault(concepts[index], []).append(index)
    if n_subspaces is not None:
        n_subspaces = as_int(n_subspaces, "n_subspaces", 1, len(filters))
    relevance = mean_relevance_of_features(samples)
    # Ties in the order of the filters: the sort is stable.
    ranked = sorted(filters, key=lambda name: float(relevance[filters[name]].mean()), reverse=True)
    kept = ranked[:n_subspaces]
    identity = torch.eye(n_features, dtype=samples.a.dtype, device=samples.a.device)
    basis = torch.cat([identity[:, filters[name]] for name in kept], dim=1)
    metadata = with_provenance({"solver": {"name": "NetDissect"}}, samples.provenance)
    return Subspaces(basis, [len(filters[name]) for name in kept], kept, metadata=metadata)


def ibd_subspaces(vectors: ArrayLike, names: Sequence[str] | None = None, residual: bool = True) -> Subspaces:
    """One-dimensional subspaces from concept vectors that need not be orthogonal (Note I).

    With U the vectors in columns and U⁺ = (UᵀU)⁻¹Uᵀ, the virtual layer is (U⁺)ᵀUᵀ and the relevance
    R_k = (u_kᵀa)(u⁺_k c). It is conserved with the residual, but need not be positive for c = a.

    Parameters
    ----------
    vectors : array or tensor, shape (K, D)
        Linearly independent concept vectors, e.g. weights of concept classifiers.
    names : sequence of str, optional
        Names of the concepts.
    residual : bool
        Add what the concepts do not span as a last block.
    """
    rows = check_matrix(vectors, "vectors")
    # Lengths cancel in R_k; unit vectors keep the numbers in range, and the rank tells about directions.
    basis = unit_rows(rows).T
    rank = int(torch.linalg.matrix_rank(basis))
    if rank < basis.shape[1]:
        raise ValueError(
            f"the {basis.shape[1]} concept vectors must be linearly independent, but span only {rank} "
            f"of {basis.shape[0]} dimensions; leave out duplicates and zeros"
        )
    dual = torch.linalg.pinv(basis).T
    if names is not None and RESIDUAL in names:
        raise ValueError(f"the name {RESIDUAL!r} is kept for what the concepts do not span")
    found = Subspaces(basis, [1] * basis.shape[1], names, dual, metadata={"solver": {"name": "IBD"}})
    return (found.completed() if residual else found).to(dtype=rows.dtype)


def concept_vectors(a: ArrayLike, labels: ArrayLike | Sequence[int], weight_decay: float = 1e-3) -> Tensor:
    """Directions that tell labelled activations from all others: the concept vectors of IBD (Note I).

    A logistic regression for each label against the rest, by L-BFGS.

    Parameters
    ----------
    a : array or tensor, shape (N, D)
        Activations at single positions.
    labels : array, tensor or sequence of int, length N
        From 0 to K − 1, each at least once.
    weight_decay : float
        Of the weights, for activations with a mean square of 1.

    Returns
    -------
    tensor, shape (K, D)
        The weights, for `ibd_subspaces`.
    """
    rows, decay = check_matrix(a, "a (activations)"), as_float(weight_decay, "weight_decay", 0)
    numbers = as_int_labels(labels, len(rows), "activation").to(rows.device)
    n_labels = int(numbers.max()) + 1
    if n_labels < 2 or torch.unique(numbers).tolist() != list(range(n_labels)):
        raise ValueError(
            f"labels must be the numbers 0…K − 1 with K ≥ 2, each at least once, got {torch.unique(numbers)}"
        )
    # Tensors of inference mode take no part in a backward pass; a copy from outside of it does.
    with torch.inference_mode(False), torch.enable_grad():
        scaled = rows.double().clone()
        scaled /= scaled.square().mean().sqrt().clamp(min=1e-300)
        wanted = torch.nn.functional.one_hot(numbers, n_labels).to(scaled)
        weights = scaled.new_zeros(n_labels, rows.shape[1]).requires_grad_()
        biases = scaled.new_zeros(n_labels).requires_grad_()
        optimiser = torch.optim.LBFGS(
            [weights, biases], max_iter=1000, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            optimiser.zero_grad()
            logits = scaled @ weights.T + biases
            misfit = torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
            value: Tensor = misfit.mean(0).sum() + decay / 2 * weights.square().sum()
            value.backward()
            return value

        optimiser.step(loss)
    return weights.detach().to(rows.dtype)


def _read_tally(path: Path) -> dict[int, str]:
    with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a mark in front
        rows = list(csv.DictReader(file))
    if not rows or not {"unit", "label"} <= rows[0].keys():
        raise ValueError(f"{path} must be a CSV file with columns unit and label, as NetDissect's tally.csv")
    concepts: dict[int, str] = {}
    for line, row in enumerate(rows, start=2):  # the first line holds the names of the columns
        unit, label = row["unit"] or "", row["label"]
        if not unit.strip().isdecimal() or not label or int(unit) - 1 in concepts:
            raise ValueError(
                f"{path}, line {line}: unit must be a new number from 1 and label a name, got {row}"
            )
        concepts[int(unit) - 1] = label
    return concepts
