"""Acting on a concept: models without it, as drop-ins for the original (section 6.1).

`RefinedModel` subtracts the concept's relevance from one output (Eq. 12). `ProjectedModel` sets the concept's
activation back where it stands out, and lets the network above draw its conclusions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from .checks import (
    HALF,
    as_float,
    as_float_tensor,
    as_int,
    check_finite,
    check_matrix,
    full_precision,
    own_copy,
)
from .layer import check_fits, find_layer
from .provenance import Provenance, check_provenance, model_fingerprint
from .subspaces import Subspaces

__all__ = ["ConceptRelevance", "ProjectedModel", "RefinedModel", "excess_relevance", "mean_relevance"]

ConceptRelevance = Callable[[Tensor, int], Tensor]
"""`concept_relevance(x, target)`: inputs (N, …) and the index of an output to relevance R_k, shape (N, K)."""


def mean_relevance(
    concept_relevance: ConceptRelevance, loader: Iterable[Any], target: int, progress: bool = True
) -> Tensor:
    """E[R_k] over images of the class `target`, shape (K,): the usual relevance for `RefinedModel`.

    `loader` gives batches: input tensors, or tuples or lists that start with one.
    """
    batches = []
    for batch in tqdm(loader, desc="mean relevance", unit="batch", disable=not progress):
        x = batch[0] if isinstance(batch, tuple | list) else batch
        batches.append(_checked(concept_relevance(x, target), len(x)).cpu())
    if not batches or not sum(map(len, batches)):
        raise ValueError("the loader gave no images")
    return torch.cat(batches).double().mean(0).to(batches[-1].dtype)


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

    def __init__(self, model: nn.Module, **constants: object) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch module, got {type(model).__name__}")
        self.training = model.training
        # The model is not a submodule: its children, parameters and buffers are ours, under their names,
        # so that every key and layer name of the original is one of the refined model. Constants are no part
        # of the model either: torch would add a tensor or module to it.
        shared = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
        constants |= {name: getattr(model, name) for name in shared} | {"original": model}
        for name, value in constants.items():
            object.__setattr__(self, name, value)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the original, too."""
        self.original.train(mode)
        return super().train(mode)


class RefinedModel(DropIn):
    """f − Σ_{k ∈ CH} max(0, R_k − E[R_k]): a model without the evidence of some concepts (Eq. 12).

    A drop-in for the model: the same inputs and outputs, submodules, parameters and keys of `state_dict`, all
    shared with it. Only the output `target` is changed; wrap a refined model again to refine a second class.

    Parameters
    ----------
    model : module
        The original, with outputs of shape (N, n_outputs). It is not changed.
    concept_relevance : callable
        `concept_relevance(x, target) -> (N, K)`: R_k for an output of the *original* model, e.g. the method
        of that name of either wrapper. It is called with gradients enabled, also under `no_grad`.
    target : int
        The output from which evidence is taken away.
    concepts : sequence of int
        CH: the numbers of the concepts to take away.
    mean_relevance : tensor, shape (K,), or None
        E[R_k] over training images of the class, from `mean_relevance`. None subtracts all of R_k, also what
        the concept rightly has to say, and adds the evidence against it.

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
        if mean_relevance is not None:
            mean_relevance = own_copy(as_float_tensor(mean_relevance, "mean_relevance"))
            check_finite(mean_relevance, "mean_relevance")
        super().__init__(model, concept_relevance=concept_relevance, mean_relevance=mean_relevance)
        self.concepts, self.target = _as_concepts(concepts), as_int(target, "target", 0)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (N, n_outputs), that of the target without the excess relevance."""
        if self.training:
            raise ValueError("a refined model is for predictions; call eval() first")
        explained = x.detach().clone()  # the model may write into its input
        output: Tensor = self.original(x)
        if not isinstance(output, Tensor) or output.ndim != 2 or self.target >= output.shape[1]:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"the model must give outputs (N, n_outputs) with more than target = {self.target} of them, "
                f"got {got}"
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
        if self.mean_relevance is not None:
            relevance = excess_relevance(relevance, self.mean_relevance)
        return relevance[:, chosen].sum(1)


class ProjectedModel(DropIn):
    """A model in which some concepts are set back to their usual activation, only where they stand out.

    `RefinedModel` is exact only if R_k is the part of the output that the concept is responsible for, and it
    cannot give back what the strategy has done to the other outputs. Here the concept is changed at the
    layer, and the network above draws its own conclusions:

        s_p = (U_kᵀa_p)ᵀ(U_kᵀc̄),     a_p ← a_p − U_kU_kᵀ(a_p − ā) at positions p with s_p > t_k.

    s_p is the relevance that the concept would have with the mean context c̄, so that a prediction takes one
    forward pass and no backward pass. t_k is a high quantile of s_p over reference images, which do not show
    the strategy: on such images hardly anything changes. ā is the mean activation of the references.

    Parameters
    ----------
    model : module
        The original, shared as in `RefinedModel`.
    layer : str or module
        The layer at which the concepts were learned, or its dotted name.
    subspaces : Subspaces
        The concepts.
    concepts : sequence of int
        As in `RefinedModel`.
    context : tensor, shape (D,)
        c̄: mean context of images of the class, e.g. `pairs.c.mean(0)`.
    reference : tensor, shape (M, D)
        Activations at positions of images without the strategy, of any class, e.g. `pairs.a` of such images.
    quantile : float
        Share of the reference positions that lie below the threshold t_k.
    channel_dim : int
        Axis of the features in the layer's output.
    strict : bool
        Whether subspaces that were learned for another model or layer are an error instead of a
        `ProvenanceWarning`.

    Attributes
    ----------
    thresholds : tensor, shape (len(concepts),)
        t_k.

    Notes
    -----
    Zennit's canonizers merge a batch norm into the linear layer before it, so that LRP sees another
    activation there than the model has: concepts of such a layer are refused.

    Examples
    --------
    >>> method = DisentangledAttribution(IntegratedGradients(model), "features.22", subspaces)
    >>> pairs = method.collect(loader, 478)  # images of the class
    >>> clean = method.collect(loader, 478)  # images without the strategy
    >>> projected = ProjectedModel(model, "features.22", subspaces, [0], pairs.c.mean(0), clean.a)
    >>> projected(images).shape == model(images).shape
    True
    """

    subspaces: Subspaces
    directions: Tensor
    usual: Tensor
    thresholds: Tensor

    def __init__(
        self,
        model: nn.Module,
        layer: str | nn.Module,
        subspaces: Subspaces,
        concepts: Sequence[int],
        context: Tensor,
        reference: Tensor,
        quantile: float = 0.99,
        channel_dim: int = 1,
        *,
        strict: bool = False,
    ) -> None:
        layer_name, found_layer = find_layer(model, layer)
        concepts, channel_dim = _as_concepts(concepts), as_int(channel_dim, "channel_dim")
        if max(concepts) >= subspaces.n_subspaces:
            raise ValueError(f"there are {subspaces.n_subspaces} subspaces, but concepts = {concepts}")
        if (made := subspaces.provenance) is not None:
            used = replace(made, model=model_fingerprint(model), layer=layer_name, channel_dim=channel_dim)
            check_provenance(made, used, "subspaces", strict)
            _check_activation(model, found_layer, layer_name, made)
        context = as_float_tensor(context, "context")
        check_finite(context, "context")
        reference = check_matrix(reference, "reference")
        for name, shape in (("context", context.shape), ("reference", reference.shape[1:])):
            if shape != (subspaces.n_features,):
                raise ValueError(
                    f"{name} must have D = {subspaces.n_features} features as the subspaces, got shape "
                    f"{tuple(shape)}; e.g. pairs.c.mean(0) as context and pairs.a as reference"
                )
        directions = torch.stack([subspaces.project_context(context, k, 0) for k in concepts])
        # By sorting: torch's quantile refuses more than 16 million values.
        with full_precision():
            scores = (reference @ directions.to(reference).T).sort(0).values
        place = min(int(as_float(quantile, "quantile", 0, 1) * len(scores)), len(scores) - 1)
        super().__init__(
            model,
            subspaces=subspaces,
            directions=own_copy(directions),
            usual=reference.mean(0),
            thresholds=scores[place],
        )
        self.layer_name, self.concepts, self.channel_dim = layer_name, concepts, channel_dim

    @full_precision()
    def scores(self, a: Tensor) -> Tensor:
        """s_p of each concept, shape (…, len(concepts)), of activations (N, …, D, …)."""
        a = a.float() if a.dtype in HALF else a  # where contexts of 1e-8 are zero
        return a.movedim(self.channel_dim, -1) @ self.directions.to(a).T

    def set_back(self, a: Tensor) -> Tensor:
        """Activations (N, …, D, …) with the concepts set back to ā where they stand out."""
        check_fits(a, self.subspaces.n_features, self.layer_name, self.channel_dim)
        scores = self.scores(a)
        stands_out = scores > self.thresholds.to(scores)
        shape = [1] * a.ndim
        shape[self.channel_dim] = -1
        excess = a - self.usual.to(a).reshape(shape)
        for i, k in enumerate(self.concepts):
            change = self.subspaces.project(excess, k, self.channel_dim)
            a = a - stands_out[..., i].unsqueeze(self.channel_dim) * change
        return a

    def forward(self, x: Tensor) -> Tensor:
        """The model's outputs with the concepts set back; one forward pass."""
        _, layer = find_layer(self.original, self.layer_name)
        hook = layer.register_forward_hook(lambda _module, _inputs, activation: self.set_back(activation))
        try:
            output: Tensor = self.original(x)
        finally:
            hook.remove()
        return output


def _as_concepts(concepts: Sequence[int]) -> tuple[int, ...]:
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


def _check_activation(model: nn.Module, layer: nn.Module, name: str, made: Provenance) -> None:
    """Refuse concepts of an activation that LRP has seen and the model has not."""
    # Gradients without rules need no canonizers.
    if made.backend != "zennit" or not (made.method.startswith("LRP(") or " under " in made.method):
        return
    # In the order of definition, which is how Zennit's canonizers find a batch norm behind a linear layer.
    leaves, last = (
        [module for module in of.modules() if not list(module.children())] for of in (model, layer)
    )
    follower = next((after for before, after in pairwise(leaves) if before is last[-1]), None)
    is_linear = isinstance(last[-1], nn.Linear | nn.modules.conv._ConvNd)
    if is_linear and isinstance(follower, nn.modules.batchnorm._BatchNorm):
        raise ValueError(
            f"canonizers merge the {type(follower).__name__} after layer {name!r} into it for LRP: the "
            "subspaces are of an activation that the model does not have. Learn them at the batch norm or "
            "after it; if no canonizer was used, give subspaces.with_provenance(None)"
        )
