"""Removing a Clever Hans strategy where it arises: `ProjectedModel` sets activations back to the usual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..checks import (
    HALF,
    as_float,
    as_float_tensor,
    as_int,
    check_finite,
    check_matrix,
    full_precision,
    own_copy,
)
from ..fingerprint import model_fingerprint
from ..layer import Request, check_fits, find_layer
from ..provenance import Provenance, check_provenance
from ..subspaces import Subspaces
from .refinement import DropIn, as_concepts

_LINEAR = (nn.Linear, nn.modules.conv._ConvNd)


class ProjectedModel(DropIn):
    """A model in which some concepts are set back to their usual activation, only where they stand out.

    `RefinedModel` subtracts relevance from one output (Eq. 12). That is exact only if R_k is the part of the
    output that the concept is responsible for. Where LRP's relevance is on another scale, it takes too much,
    and it cannot give back what the strategy has done to the other outputs. Here the concept is changed at
    the layer, and the network above draws its own conclusions:

        s_p = (U_kᵀa_p)ᵀ(U_kᵀc̄),     a_p ← a_p − U_kU_kᵀ(a_p − ā) at positions p with s_p > t_k.

    s_p is the relevance that the concept would have with the mean context c̄, so that a prediction takes one
    forward pass and no backward pass. t_k is a high quantile of s_p over reference images, which do not show
    the strategy: on such images hardly anything changes. ā is the mean activation of the references.

    Parameters
    ----------
    model : module
        The original. It is left as it is. Submodules and parameters are shared with it, as in `RefinedModel`.
    layer : str or module
        The layer at which the concepts were learned, or its dotted name.
    subspaces : Subspaces
        The concepts.
    concepts : sequence of int
        CH: the numbers of the concepts that are Clever Hans strategies.
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
    The model runs as it is. Zennit's canonizers merge a batch norm into the linear layer before it, so that
    LRP sees another activation there than the model has: concepts of such a layer are refused. Learn them at
    the batch norm, or after it.

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
        super().__init__(model)
        self.layer_name, found_layer = find_layer(model, layer)
        self.concepts, self.channel_dim = as_concepts(concepts), as_int(channel_dim, "channel_dim")
        if max(self.concepts) >= subspaces.n_subspaces:
            raise ValueError(f"there are {subspaces.n_subspaces} subspaces, but concepts = {self.concepts}")
        if (made := subspaces.provenance) is not None:
            used = replace(
                made, model=model_fingerprint(model), layer=self.layer_name, channel_dim=self.channel_dim
            )
            check_provenance(made, used, "subspaces", strict)
            _check_activation(model, found_layer, self.layer_name, made)
        quantile = as_float(quantile, "quantile", 0, 1)
        context = as_float_tensor(context, "context")
        reference = check_matrix(as_float_tensor(reference, "reference"), "reference")
        for name, found in (("context", context.shape), ("reference", reference.shape[1:])):
            if found != (subspaces.n_features,):
                raise ValueError(
                    f"{name} must have D = {subspaces.n_features} features as the subspaces, got shape "
                    f"{tuple(found)}; e.g. pairs.c.mean(0) as context and pairs.a as reference"
                )
        check_finite(context, "context")
        directions = torch.stack([subspaces.project_context(context, k, 0) for k in self.concepts])
        object.__setattr__(self, "subspaces", subspaces)
        object.__setattr__(self, "directions", own_copy(directions))
        object.__setattr__(self, "usual", reference.mean(0))
        # By sorting: torch's quantile refuses more than 16 million values.
        with full_precision():
            scores = (reference @ directions.to(reference).T).sort(0).values
        at = min(int(quantile * len(scores)), len(scores) - 1)
        object.__setattr__(self, "thresholds", scores[at])

    @full_precision()
    def scores(self, a: Tensor) -> Tensor:
        """s_p of each concept, shape (…, len(concepts)), of activations (N, …, D, …).

        In float32 for half precision, where contexts of 1e-8 are zero.
        """
        a = a.float() if a.dtype in HALF else a
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
        request = Request(self.original, layer, self.layer_name, (x,), 0, self.channel_dim)
        output: Tensor = request.run(self.set_back)
        return output


def _check_activation(model: nn.Module, layer: nn.Module, name: str, made: Provenance) -> None:
    """Refuse concepts of an activation that LRP has seen and the model has not."""
    # Gradients without rules need no canonizers.
    if made.backend != "zennit" or not (made.method.startswith("LRP(") or " under " in made.method):
        return
    # In the order of definition, which is how Zennit's canonizers find a batch norm behind a linear layer.
    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    last = [module for module in layer.modules() if not any(True for _ in module.children())][-1]
    follower = next((after for before, after in pairwise(leaves) if before is last), None)
    if isinstance(last, _LINEAR) and isinstance(follower, nn.modules.batchnorm._BatchNorm):
        raise ValueError(
            f"layer {name!r} ends with a {type(last).__name__}, and a {type(follower).__name__} follows, "
            "which canonizers merge into it for LRP: the subspaces are of an activation that the model "
            "itself does not have. Learn them at the batch norm or after it; if no canonizer was used, give "
            "subspaces.with_provenance(None)"
        )
