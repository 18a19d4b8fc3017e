"""What one might take instead of DRSA: K directions found by other methods, with the solvers' interface.

They are the concept finders of CRAFT (non-negative factors of the activations), of ACE (clusters), of CRP
(single channels by their relevance), independent components, and a sparse dictionary. Each yields K
directions of the activation space. To split relevance they are made orthonormal, with as little change as
possible, and the rest of the space is one more block: the K + 1 maps add up to the whole.

All but `Channels` need scikit-learn (extra `peers`), and look at activations only.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any, Self

import numpy as np
import torch
from drsa_core.checks import ArrayLike, Seed, as_float, as_int, as_seed, unit_rows, unit_scale
from drsa_core.prca import Activations, Estimator, with_provenance
from drsa_core.subspaces import Subspaces
from torch import Tensor


def orthonormalised(directions: Tensor) -> Tensor:
    """The orthonormal columns closest to the given ones of unit length, V (VᵀV)^-½, shape (D, K).

    No direction comes first, other than in Gram and Schmidt's method.

    Parameters
    ----------
    directions : tensor, shape (D, K)
        Linearly independent, of any length.
    """
    unit = unit_rows(directions.T).T
    left, values, right = torch.linalg.svd(unit, full_matrices=False)
    if float(values[-1]) <= 1e-6 * float(values[0]):
        raise ValueError(
            f"the {directions.shape[1]} directions are linearly dependent and cannot be told apart; "
            "ask for fewer of them, or give more samples"
        )
    return left @ right


class Directions(Estimator):
    """K directions and the rest of the space, whatever finds them; `_find` is what differs.

    Parameters
    ----------
    n_subspaces : int
        Number K of directions.
    random_state : int or None
        Seed, at least 0; the same seed gives the same result.

    Attributes
    ----------
    subspaces_ : Subspaces
        K blocks of one dimension, sorted by mean relevance E[(u_kᵀa)(u_kᵀc)], and "residual".
    directions_ : tensor, shape (D, K)
        What the method found, before it was made orthonormal, in the order of the blocks.
    """

    def __init__(self, n_subspaces: int = 4, random_state: Seed = None) -> None:
        self.n_subspaces = n_subspaces
        self.random_state = random_state

    def fit(self, a: Activations, c: ArrayLike | None = None) -> Self:
        """Fit from activations and contexts of shape (N, D), or from `Pairs` alone.

        The contexts rank the directions; only `Channels` finds them by the contexts.
        """
        samples = self._samples(a, c)
        a, c = unit_scale(samples.a)[0], unit_scale(samples.c)[0]
        n_subspaces = as_int(self.n_subspaces, "n_subspaces", 1, a.shape[1])
        if len(a) < n_subspaces:
            raise ValueError(f"{n_subspaces} directions need at least as many samples, got {len(a)}")
        seed = as_seed(self.random_state)
        found = self._find(a, c, n_subspaces, seed).double().to(a.device)
        basis = orthonormalised(found).to(a)
        blocks = Subspaces(basis, [1] * n_subspaces)
        order = blocks.relevance(a, c).mean(0).argsort(descending=True)
        metadata = {"solver": {"name": type(self).__name__}, "seed": seed}
        self.directions_ = found[:, order].to(a)
        self.subspaces_ = Subspaces(
            basis[:, order], [1] * n_subspaces, metadata=with_provenance(metadata, samples.provenance)
        ).completed()
        return self

    def _find(self, a: Tensor, c: Tensor, n_subspaces: int, seed: int | None) -> Tensor:
        """Directions (D, K) from activations and contexts (N, D), both of unit scale."""
        raise TypeError(f"{type(self).__name__} is no method of its own; take one of its subclasses")


class NMF(Directions):
    """Non-negative matrix factorisation of the activations, A ≈ W H with W, H ≥ 0, as in CRAFT.

    A direction is a row of H. Activations must not be negative: the layer should end in a ReLU.
    """

    def _find(self, a: Tensor, c: Tensor, n_subspaces: int, seed: int | None) -> Tensor:
        if bool((a < 0).any()):
            raise ValueError(
                f"NMF needs activations that are not negative, got {float((a < 0).float().mean()):.1%} "
                "negative ones; choose a layer that ends in a ReLU"
            )
        solver = _sklearn("decomposition").NMF(n_subspaces, init="nndsvda", max_iter=400, random_state=seed)
        return torch.from_numpy(_fitted(solver, a, n_subspaces).components_.T.copy())


class ICA(Directions):
    """Independent components of the activations (FastICA): a direction is a column of the mixing matrix."""

    def _find(self, a: Tensor, c: Tensor, n_subspaces: int, seed: int | None) -> Tensor:
        solver = _sklearn("decomposition").FastICA(
            n_subspaces, whiten="unit-variance", max_iter=500, tol=1e-3, random_state=seed
        )
        # It whitens what differs from the mean.
        _check_span(a - a.double().mean(0), a, n_subspaces, "vary in")
        return torch.from_numpy(_fitted(solver, a, n_subspaces).mixing_.copy())


class KMeansDirections(Directions):
    """Centres of K clusters of the activations, as in ACE, where they are clusters of segments."""

    def _find(self, a: Tensor, c: Tensor, n_subspaces: int, seed: int | None) -> Tensor:
        solver = _sklearn("cluster").KMeans(n_subspaces, n_init=3, random_state=seed)
        return torch.from_numpy(_fitted(solver, a, n_subspaces).cluster_centers_.T.copy())


class SparseDictionary(Directions):
    """K atoms of a dictionary with sparse, non-negative codes: a sparse autoencoder's decoder in short.

    Parameters
    ----------
    n_subspaces, random_state
        As in `DRSA`.
    sparsity : float
        Weight of the codes' L1 norm, for activations with a mean square of 1.
    """

    def __init__(self, n_subspaces: int = 4, random_state: Seed = None, sparsity: float = 1.0) -> None:
        super().__init__(n_subspaces, random_state)
        self.sparsity = sparsity

    def _find(self, a: Tensor, c: Tensor, n_subspaces: int, seed: int | None) -> Tensor:
        sparsity = as_float(self.sparsity, "sparsity", 0)
        solver = _sklearn("decomposition").MiniBatchDictionaryLearning(
            n_subspaces,
            alpha=sparsity,
            max_iter=20,
            batch_size=256,
            fit_algorithm="cd",
            positive_code=True,
            random_state=seed,
        )
        scale = float(a.double().square().mean().sqrt())
        scaled = a / max(scale, 1e-30)
        atoms = torch.from_numpy(_fitted(solver, scaled, n_subspaces).components_.T.copy())
        # The codes of a are all zero where aᵀd is at most the weight of the L1 norm for every atom d.
        if float((scaled.double().cpu() @ atoms).max()) <= sparsity:
            raise ValueError(
                f"with sparsity = {sparsity:g} no activation has a code, so that the directions are those of "
                "the random start; lower it"
            )
        return atoms


class Channels(Directions):
    """The K channels of largest mean relevance E[a_j c_j], each a concept of its own, as in CRP."""

    def _find(self, a: Tensor, c: Tensor, n_subspaces: int, seed: int | None) -> Tensor:
        order = (a.double() * c.double()).mean(0).argsort(descending=True, stable=True)
        return torch.eye(a.shape[1], dtype=torch.float64, device=a.device)[:, order[:n_subspaces]]


def _sklearn(module: str) -> Any:
    try:
        return import_module(f"sklearn.{module}")
    except ImportError as error:
        raise ImportError("this method is scikit-learn's: pip install 'captum-zennit-drsa[peers]'") from error


def _fitted(solver: Any, a: Tensor, n_subspaces: int) -> Any:
    """Fit in float64. What scikit-learn says of convergence is no news: iterations are bounded on purpose."""
    _check_span(a, a, n_subspaces, "span")
    values: np.ndarray[Any, Any] = a.detach().cpu().double().numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return solver.fit(values)


def _check_span(x: Tensor, a: Tensor, n_subspaces: int, verb: str) -> None:
    """Raise if activations, or what differs from their mean, have fewer than K directions.

    The rest would be made up: by the random start, or by rounding errors that whitening blows up.
    """
    x, a = x.double(), a.double()
    energies = torch.linalg.eigvalsh(x.T @ x if len(x) >= x.shape[1] else x @ x.T)
    # The rounding of float32 has some 1e-15 of the energy.
    rank = int((energies > 1e-13 * a.square().sum()).sum())
    if rank < n_subspaces:
        raise ValueError(
            f"the activations {verb} only {rank} of {a.shape[1]} dimensions, where {n_subspaces} directions "
            "cannot be told apart; ask for fewer of them, or give more samples"
        )
