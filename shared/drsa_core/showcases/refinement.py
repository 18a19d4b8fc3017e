"""Removing a Clever Hans strategy after training: `RefinedModel` (section 6.1, Eq. 12)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..checks import as_float_tensor, as_int, check_finite, own_copy

ConceptRelevance = Callable[[Tensor, int], Tensor]
"""`concept_relevance(x, target)`: inputs (N, …) and the index of an output to relevance R_k, shape (N, K)."""


def mean_relevance(
    concept_relevance: ConceptRelevance, loader: Iterable[Any], target: int, progress: bool = True
) -> Tensor:
    """E[R_k] over images of the class, shape (K,): what `RefinedModel` takes for the usual relevance.

    Parameters
    ----------
    concept_relevance : callable
        As in `RefinedModel`.
    loader : iterable
        Batches: input tensors, or tuples or lists that start with one.
    target : int
        The class.
    progress : bool
        Show a progress bar.
    """
    target = as_int(target, "target", 0)
    total, n_images = None, 0
    for batch in tqdm(loader, desc="mean relevance", unit="batch", disable=not progress):
        x = batch[0] if isinstance(batch, tuple | list) else batch
        relevance = _checked(concept_relevance(x, target), len(x))
        # In float64: a sum over a data set, of batches that may differ in precision.
        added = relevance.double().sum(0)
        if total is not None and total.shape != added.shape:
            raise ValueError(
                f"concept_relevance gave {len(total)} concepts before, and {len(added)} for this batch"
            )
        total = added if total is None else total + added.to(total)
        dtype, n_images = relevance.dtype, n_images + len(x)
    if total is None or not n_images:
        raise ValueError("the loader gave no images")
    return (total / n_images).to(dtype)


def excess_relevance(relevance: Tensor, mean: Tensor) -> Tensor:
    """max(0, R_k − E[R_k]), shape (N, K), from R_k (N, K) and its mean (K,) (section 6.1)."""
    if relevance.ndim != 2 or mean.shape != relevance.shape[1:]:
        raise ValueError(
            f"relevance must have shape (N, K) and mean (K,), got {tuple(relevance.shape)} and "
            f"{tuple(mean.shape)}"
        )
    check_finite(relevance, "relevance")
    check_finite(mean, "mean")
    return (relevance - mean.to(relevance)).clamp(min=0)


class DropIn(nn.Module):
    """A stand-in for a model: the same submodules, parameters and keys of `state_dict`, and shared with it.

    Moving, loading or training one does so to the other.
    """

    original: nn.Module

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch module, got {type(model).__name__}")
        self.training = model.training
        # The model is not a submodule: its own children, parameters and buffers are ours, under their names,
        # so that every key and layer name of the original is one of the refined model.
        for own in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            object.__setattr__(self, own, getattr(model, own))
        object.__setattr__(self, "original", model)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the original with the own one."""
        self.original.train(mode)
        return super().train(mode)


class RefinedModel(DropIn):
    """f − Σ_{k ∈ CH} max(0, R_k − E[R_k]): a model without the evidence of some concepts (Eq. 12).

    A drop-in for the model: the same inputs and outputs, submodules, parameters and keys of `state_dict`,
    which it shares with the model (moving, loading or training one does so to the other).
    Only the output `target` is changed; wrap a refined model again to refine a second class.

    Parameters
    ----------
    model : module
        The original, with outputs of shape (N, n_outputs). It is left as it is.
    concept_relevance : callable
        `concept_relevance(x, target) -> (N, K)`: the relevance R_k of each concept for an output of
        the *original* model, e.g. the method of that name of `captum_drsa.DisentangledAttribution` or
        `zennit_drsa.DisentangledAttributor` (see the examples). It is called with gradients enabled, also
        under `no_grad` and `inference_mode`.
    target : int
        The output from which evidence is taken away.
    concepts : sequence of int
        CH: the numbers of the concepts that are Clever Hans strategies.
    mean_relevance : tensor, shape (K,), or None
        E[R_k] over training images of the class, e.g. from `mean_relevance`. None subtracts the relevance R_k
        itself, which also removes what the concept rightly has to say, and adds the evidence against it.

    Notes
    -----
    R_k is a number to autograd: gradients of the refined model are those of the original. R_k of Integrated
    Gradients, Shapley values and DeepLift are parts of the output; LRP leaves a share of it in biases, and
    subtracts that much too little (Note B; `zennit_drsa.doctor` prints the share).

    Examples
    --------
    >>> method = DisentangledAttribution(IntegratedGradients(model), "features.22", subspaces)
    >>> usual = mean_relevance(method.concept_relevance, loader, 478)
    >>> refined = RefinedModel(model, method.concept_relevance, 478, [3], usual)
    >>> refined(images).shape == model(images).shape
    True
    """

    mean_relevance: Tensor | None
    concept_relevance: ConceptRelevance

    def __init__(
        self,
        model: nn.Module,
        concept_relevance: ConceptRelevance,
        target: int,
        concepts: Sequence[int],
        mean_relevance: Tensor | None = None,
    ) -> None:
        super().__init__(model)
        if not callable(concept_relevance):
            raise TypeError(
                f"concept_relevance must be a function of (x, target), got {type(concept_relevance).__name__}"
            )
        self.concepts = as_concepts(concepts)
        if mean_relevance is not None:
            mean_relevance = own_copy(as_float_tensor(mean_relevance, "mean_relevance"))
            check_finite(mean_relevance, "mean_relevance")
            if mean_relevance.ndim != 1 or len(mean_relevance) <= max(self.concepts):
                raise ValueError(
                    f"mean_relevance must have shape (K,) with K above {max(self.concepts)}, the largest of "
                    f"concepts, got {tuple(mean_relevance.shape)}"
                )
        self.target = as_int(target, "target", 0)
        object.__setattr__(self, "concept_relevance", concept_relevance)
        object.__setattr__(self, "mean_relevance", mean_relevance)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (N, n_outputs), that of the target without the excess relevance."""
        if self.training:
            raise ValueError("a refined model is for predictions; call eval() first")
        explained = x.detach().clone()  # the model may write into its input
        output: Tensor = self.original(x)
        if not isinstance(output, Tensor):
            raise TypeError(f"the model must give a tensor (N, n_outputs), got {type(output).__name__}")
        if output.ndim != 2 or not 0 <= self.target < output.shape[1]:
            raise ValueError(
                f"the model must give outputs (N, n_outputs) with more than target = {self.target} of them, "
                f"got {tuple(output.shape)}"
            )
        target = nn.functional.one_hot(torch.tensor(self.target, device=x.device), output.shape[1])
        return output - self.evidence(explained).to(output)[:, None] * target

    def evidence(self, x: Tensor) -> Tensor:
        """What is subtracted from the output of the target, shape (N,)."""
        # Tensors of inference mode cannot take part in a backward pass; a copy from outside it can.
        with torch.inference_mode(False), torch.enable_grad():
            relevance = _checked(self.concept_relevance(x.detach().clone(), self.target), len(x))
        chosen = list(self.concepts)
        if relevance.shape[1] <= max(chosen):
            raise ValueError(
                f"concept_relevance gave {relevance.shape[1]} concepts, but concepts = {self.concepts}"
            )
        if self.mean_relevance is not None and len(self.mean_relevance) != relevance.shape[1]:
            raise ValueError(
                f"mean_relevance is of {len(self.mean_relevance)} concepts, but concept_relevance gave "
                f"{relevance.shape[1]}: they belong to different subspaces"
            )
        if self.mean_relevance is None:
            return relevance[:, chosen].sum(1)
        return excess_relevance(relevance[:, chosen], self.mean_relevance[chosen]).sum(1)


def as_concepts(concepts: Sequence[int]) -> tuple[int, ...]:
    """Numbers of the concepts to take out: different ones from 0, at least one."""
    numbers = tuple(as_int(k, "every entry of concepts") for k in concepts)
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise ValueError(f"concepts must be different numbers from 0, at least one, got {numbers}")
    return numbers


def _checked(relevance: object, n_images: int) -> Tensor:
    if not isinstance(relevance, Tensor) or relevance.ndim != 2 or len(relevance) != n_images:
        got = tuple(relevance.shape) if isinstance(relevance, Tensor) else type(relevance).__name__
        raise ValueError(
            f"concept_relevance must give a tensor ({n_images}, K), one row per image, got {got}"
        )
    check_finite(relevance, "the relevance from concept_relevance")
    return relevance.detach()
