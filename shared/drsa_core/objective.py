"""The DRSA objective and its derivatives (section 4.2): all that touches samples is here."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from .checks import check_finite, check_nonzero, times_power_of_two, unit_scale
from .distributed import Ranks
from .pairs import COPIES, Chunk, HeldChunk, PairShards, balanced, normalise
from .subspaces import Subspaces


@dataclass(frozen=True)
class Evaluation:
    """The objective at one U, with what its derivatives need.

    Attributes
    ----------
    value : float
        J(U).
    block_means : tensor, shape (K,)
        m_k = M²_n[R⁺_kn]; zero for a subspace with no positive relevance anywhere.
    activations, contexts : tensor, shape (N, D)
        aU and cU.
    relevance : tensor, shape (N, K)
        R⁺_kn.
    factors : tensor, shape (K,)
        ∂J/∂m_k / (N m_k), so that ∂J/∂R_kn = factors_k · R⁺_kn.
    """

    value: float
    block_means: Tensor
    activations: Tensor
    contexts: Tensor
    relevance: Tensor
    factors: Tensor

    @property
    def weights(self) -> Tensor:
        """∂J/∂R_kn, shape (N, K)."""
        return self.relevance * self.factors


#: Samples from which the diagonal of the Hessian is estimated: it takes products of N×D×D.
CURVATURE_SAMPLES = 2500
#: From so many blocks on, whole products are faster than those of pairs of blocks.
WHOLE_PRODUCTS = 8


@dataclass(frozen=True)
class Curvature:
    """Second derivatives of an objective in a frame where they are nearly diagonal.

    Attributes
    ----------
    rotations : list of tensor
        One orthogonal matrix for each block, the residual included: the frame is UQ, Q their block diagonal.
    diagonal : tensor, shape (D, D)
        −∂²J/∂L_ji² in that frame, below the block diagonal; of any sign.
    """

    rotations: list[Tensor]
    diagonal: Tensor


class Objective:
    """J(U) = M^q_k [ M²_n [ max(0, (U_kᵀa_n)ᵀ(U_kᵀc_n)) ] ] over orthogonal U (D, D).

    M^p is the generalised mean (E[t^p])^(1/p); q = 0 is its limit, the geometric mean. Blocks may leave
    columns of U over: these are the residual, which the objective does not score.

    Parameters
    ----------
    a, c : tensor, shape (N, D)
        Activations and contexts, normalised by the caller.
    dims : sequence of int
        Block sizes, adding up to at most D.
    q : float
        Exponent of the mean over subspaces.
    n_total : int, optional
        What sums over samples are divided by. More than N where others are left out as if they were zero.
    """

    def __init__(
        self, a: Tensor, c: Tensor, dims: Sequence[int], q: float, n_total: int | None = None
    ) -> None:
        self.a, self.c = a, c
        self.q = float(q)
        self.n_samples, self.n_features = a.shape
        self.n_total = self.n_samples if n_total is None else n_total
        self.dims = tuple(dims)
        self.n_subspaces = len(self.dims)
        #: Columns of U that belong to each block, the residual last if there is one.
        self.columns = block_columns(self.dims, self.n_features)
        # (D, K), one where column j belongs to block k: sums over blocks, and spreads over columns.
        self.membership = a.new_zeros(self.n_features, self.n_subspaces)
        for k in range(self.n_subspaces):
            self.membership[self.columns[k], k] = 1

    def of_samples(self, rows: Tensor) -> Objective:
        """The objective if all other samples were zero."""
        return Objective(self.a[rows], self.c[rows], self.dims, self.q, self.n_total)

    def in_directions(self, directions: Tensor, dims: Sequence[int]) -> Objective:
        """The objective in coordinates `directions`ᵀ a, for orthonormal columns (D, r), with other blocks."""
        return Objective(self.a @ directions, self.c @ directions, dims, self.q, self.n_total)

    def evaluate(self, basis: Tensor) -> Evaluation:
        """The objective at U = `basis` (D, D): two products of N×D×D."""
        activations, contexts = self.a @ basis, self.c @ basis
        relevance = ((activations * contexts) @ self.membership).clamp_(min=0)
        value, means, factors = self._from_squares(relevance.square().sum(0))
        return Evaluation(value, means, activations, contexts, relevance, factors)

    def _from_squares(self, squares: Tensor) -> tuple[float, Tensor, Tensor]:
        """J, m_k and the factors of an `Evaluation` from Σ_n (R⁺_kn)², shape (K,)."""
        means = (squares / self.n_total).sqrt()
        value, slopes = generalised_mean(means, self.q)
        # A subspace without positive relevance has no gradient.
        alive = means > 0
        return value, means, torch.where(alive, slopes / torch.where(alive, means * self.n_total, 1), 0)

    def gradient(self, at: Evaluation) -> Tensor:
        """Euclidean gradient ∂J/∂U, shape (D, D): two more products of N×D×D."""
        weights = at.weights @ self.membership.T
        return torch.addmm(self.a.T @ (weights * at.contexts), self.c.T, weights * at.activations)

    def tangent_gradient(self, at: Evaluation) -> Tensor:
        """Gradient of J(U exp(L − Lᵀ)) at L = 0, for L (D, D) that is zero on and above the block diagonal.

        Rotations inside a block leave J as it is, so only pairs of blocks k < l count, and there

            ∂J/∂L_lk = A_lᵀ diag(W_k − W_l) C_k + C_lᵀ diag(W_k − W_l) A_k,

        with A = aU, C = cU and W = ∂J/∂R. It costs (1 − 1/K)/2 of the products of `gradient`. With many
        blocks the products are too small to be fast: then UᵀG is computed, and L is the lower half of
        UᵀG − GᵀU.
        """
        if len(self.columns) >= WHOLE_PRODUCTS:
            weights = at.weights @ self.membership.T
            whole = torch.addmm(
                at.activations.T @ (weights * at.contexts), at.contexts.T, weights * at.activations
            )
            return below_blocks(whole - whole.T, self.columns)
        gradient = self.a.new_zeros(self.n_features, self.n_features)
        weights = self._padded(at.weights)
        for k, here in enumerate(self.columns):
            for l, there in enumerate(self.columns[k + 1 :], start=k + 1):  # noqa: E741 (the paper's letter)
                difference = weights[:, k : k + 1] - weights[:, l : l + 1]
                gradient[there, here] = torch.addmm(
                    at.activations[:, there].T @ (difference * at.contexts[:, here]),
                    at.contexts[:, there].T,
                    difference * at.activations[:, here],
                )
        return gradient

    def curvature(self, at: Evaluation) -> Curvature:
        """Diagonal of the negative Hessian of J in L, in the frame of `inner_rotations`.

        Turning column i of block k towards column j of block l by an angle θ changes R_k by
        θ (A_iC_j + A_jC_i) + θ² (A_jC_j − A_iC_i) and R_l by the negative of that. Hence, with
        T_kj = Σ_n W_kn A_nj C_nj and g_kn = ∂²J/∂R_kn² at fixed m,

            −∂²J/∂L_ji² = 2 (T_ki + T_lj − T_kj − T_li) − Σ_n (g_kn + g_ln) (A_niC_nj + A_njC_ni)².

        What the change of m_k adds, products of its first derivatives, is left out. A part of the samples,
        evenly spread, is enough.
        """
        rotations = self.inner_rotations(at)
        some = slice(None, None, max(1, self.n_samples // CURVATURE_SAMPLES))
        relevance = at.relevance[some]
        factors = at.factors * (self.n_samples / len(relevance))
        activations, contexts = at.activations[some], at.contexts[some]
        return Curvature(rotations, self._diagonal(rotations, activations, contexts, relevance, factors))

    def _diagonal(
        self,
        rotations: list[Tensor],
        activations: Tensor,
        contexts: Tensor,
        relevance: Tensor,
        factors: Tensor,
    ) -> Tensor:
        """The diagonal of `curvature` from some samples, a sum over them."""
        activations = rotate_columns(activations, rotations)
        contexts = rotate_columns(contexts, rotations)
        product = activations * contexts
        spread = ((relevance * factors).T @ product).T @ self.membership.T  # [j, i] = T_{block of i, j}
        own = spread.diagonal()
        result = 2 * (own[:, None] + own[None, :] - spread - spread.T)

        second = ((relevance > 0) * factors) @ self.membership.T
        a_squared, c_squared = activations.square(), contexts.square()
        turned = (second * a_squared).T @ c_squared + (second * c_squared).T @ a_squared
        turned += 2 * (second * product).T @ product
        result -= turned + turned.T
        return result

    def inner_rotations(self, at: Evaluation) -> list[Tensor]:
        """Rotation inside each block that diagonalises A_kᵀ diag(W_k − mean of the other W) C_k + transpose.

        J does not change under rotations inside a block; these make its Hessian as diagonal as it can be.
        """
        return [torch.linalg.eigh(matrix + matrix.T).eigenvectors for matrix in self._contrasts(at)]

    def _contrasts(self, at: Evaluation) -> list[Tensor]:
        """A_kᵀ diag(W_k − mean of the other W) C_k of each block, sums over samples."""
        weights = at.weights
        others = (weights.sum(1, keepdim=True) - weights) / max(1, self.n_subspaces - 1)
        contrast = self._padded(weights - others)
        return [
            at.activations[:, here].T @ (contrast[:, k : k + 1] * at.contexts[:, here])
            for k, here in enumerate(self.columns)
        ]

    def pair_relevance(self) -> Tensor:
        """Relevance a_n·c_n of each pair in the whole space, shape (N,)."""
        return (self.a * self.c).sum(1)

    def moments(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_n w_n a_n a_nᵀ and the same for c in float64, shapes (D, D), for weights (N,)."""
        a, c = (((x * weights[:, None]).T @ x).double() for x in (self.a, self.c))
        return a, c

    def shares(self, at: Evaluation) -> Tensor:
        """What each sample adds to J, shape (N,): J = Σ_n Σ_k W_kn R⁺_kn, since it is homogeneous in R."""
        return (at.weights * at.relevance).sum(1)

    def linearised(self, at: Evaluation, directions: Tensor) -> Tensor:
        """S_k = Σ_n W_kn (x_n y_nᵀ + y_n x_nᵀ) in coordinates x = Vᵀa, y = Vᵀc, shape (blocks, r, r).

        With W held constant, J changes by Σ_k tr(Q_kᵀ S_k Q_k) / 2 if V Q_k is added to block k.
        """
        x, y = self.a @ directions, self.c @ directions
        weights = self._padded(at.weights)
        result = x.new_zeros(len(self.columns), x.shape[1], x.shape[1])
        for k in range(self.n_subspaces):
            rows = weights[:, k].nonzero().flatten()
            matrix = (x[rows] * weights[rows, k : k + 1]).T @ y[rows]
            result[k] = matrix + matrix.T
        return result

    def _padded(self, weights: Tensor) -> Tensor:
        """Weights (N, K) with a column of zeros for the residual, if there is one."""
        return torch.nn.functional.pad(weights, (0, len(self.columns) - self.n_subspaces))


def block_columns(dims: Sequence[int], n_features: int) -> list[slice]:
    """Columns of each block, and of the residual, if there is one, as the last."""
    residual = n_features - sum(dims)
    sizes = (*dims, residual) if residual else tuple(dims)
    stops = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def missing_columns(columns: list[slice], parts: list[Tensor]) -> list[int]:
    """How many columns each part (D, ·) lacks to fill its block."""
    return [here.stop - here.start - part.shape[1] for here, part in zip(columns, parts, strict=True)]


def below_blocks(matrix: Tensor, columns: list[slice]) -> Tensor:
    """A matrix (D, D), in place, with zeros on and above the block diagonal."""
    for here in columns:
        matrix[: here.stop, here] = 0
    return matrix


def rotate_columns(matrix: Tensor, rotations: list[Tensor]) -> Tensor:
    """`matrix` @ Q for a block-diagonal Q, given by its blocks."""
    parts = matrix.split([len(rotation) for rotation in rotations], dim=1)
    return torch.cat([part @ rotation for part, rotation in zip(parts, rotations, strict=True)], dim=1)


def generalised_mean(values: Tensor, q: float) -> tuple[float, Tensor]:
    """M^q of non-negative values, and its derivative by each of them.

    For q ≤ 0 the mean is 0 as soon as one value is 0. Values of 0 get the derivative 0.
    """
    positive = values > 0
    if not positive.any() or (q <= 0 and not positive.all()):
        return 0.0, torch.zeros_like(values)
    # In logarithms relative to the value that counts most, so that neither large |q| overflows nor small |q|
    # loses its digits; in float64, which costs nothing for K numbers.
    scale = values.max() if q >= 0 else values.min()
    logs = torch.where(positive, values.double() / scale.double(), 1).log()
    if q == 0:
        log_mean = logs.mean()
    else:
        log_mean = torch.log1p(torch.where(positive, torch.expm1(q * logs), -1).mean()) / q
    slopes = torch.exp((1 - q) * (log_mean - logs)) / len(values)
    value = float(scale.double() * log_mean.exp())
    return value, torch.where(positive, slopes, 0).to(values.dtype)


Prepare = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rows:
    """Rows of a chunk, prepared for the objective each time they are read.

    Attributes
    ----------
    chunk : Chunk
        Where they are read from.
    prepare : function
        (a, c) as they were collected ↦ as the objective takes them.
    chosen : tensor of int or None
        Those of the chunk that count, ascending; None for all.
    """

    chunk: Chunk
    prepare: Prepare
    chosen: Tensor | None = None

    @property
    def n_rows(self) -> int:
        """How many."""
        return self.chunk.n_rows if self.chosen is None else len(self.chosen)

    def read(self) -> tuple[Tensor, Tensor]:
        """Activations and contexts, shapes (n_rows, D)."""
        a, c = self.chunk.read()
        if self.chosen is not None:
            chosen = self.chosen.to(a.device)
            a, c = a[chosen], c[chosen]
        return self.prepare(a, c)

    def select(self, rows: Tensor) -> Rows:
        """Some of these rows."""
        return replace(self, chosen=rows if self.chosen is None else self.chosen[rows])


@dataclass(frozen=True)
class ShardedEvaluation(Evaluation):
    """The objective at one U over several parts.

    Attributes
    ----------
    basis : tensor, shape (D, D)
        U.
    parts : tuple of Evaluation
        Those of this rank's parts, with the factors of all. Parts that are read from files keep their
        relevances alone; `activations`, `contexts` and `relevance` of the whole are empty.
    unscaled_gradient : tensor, shape (D, D), or None
        ∂J/∂U of this rank's parts before its columns are multiplied by the factors of their blocks; only
        where parts are read from files: it is summed up on the way, so that an iteration reads them once.
    """

    basis: Tensor
    parts: tuple[Evaluation, ...]
    unscaled_gradient: Tensor | None


class ShardedObjective(Objective):
    """`Objective` over samples in parts, on one rank or many; the same methods with the same results.

    Parameters
    ----------
    parts : sequence of HeldChunk or Rows
        This rank's samples, normalised, in order. Samples are numbered rank after rank.
    ranks : Ranks
    template : tensor
        Of the dtype, device and number of features of the samples.
    dims, q, n_total
        As in `Objective`.
    counts : sequence of int
        Number of samples of each rank.
    memory : int
        Bytes for samples: a selection that fits is held, not read again.
    """

    def __init__(
        self,
        parts: Sequence[HeldChunk | Rows],
        ranks: Ranks,
        template: Tensor,
        dims: Sequence[int],
        q: float,
        counts: Sequence[int],
        memory: int,
        n_total: int | None = None,
    ) -> None:
        none = template[:0]
        super().__init__(none, none, dims, q, sum(counts) if n_total is None else n_total)
        self.parts, self.ranks, self.counts, self.memory = tuple(parts), ranks, tuple(counts), memory
        self.n_samples = sum(counts)
        self._held = [
            Objective(part.a, part.c, dims, q, self.n_total) if isinstance(part, HeldChunk) else None
            for part in self.parts
        ]

    @property
    def in_memory(self) -> bool:
        """Whether this rank holds all of its samples."""
        return all(part is not None for part in self._held)

    def _objectives(self) -> Iterator[Objective]:
        """Each part by itself, as an objective that divides by the number of all samples."""
        for part, held in zip(self.parts, self._held, strict=True):
            yield held if held is not None else Objective(*part.read(), self.dims, self.q, self.n_total)

    def of_samples(self, rows: Tensor) -> ShardedObjective:
        """The objective if all samples but these, numbered over all ranks, were zero."""
        rows = rows.cpu()
        ends = torch.tensor(self.counts).cumsum(0)
        counts = torch.bincount(torch.searchsorted(ends, rows, right=True), minlength=len(ends))
        first = int(ends[self.ranks.rank]) - self.counts[self.ranks.rank]
        parts: list[HeldChunk | Rows] = []
        for part in self.parts:
            mine = rows[(rows >= first) & (rows < first + part.n_rows)] - first
            first += part.n_rows
            if isinstance(part, HeldChunk):
                where = mine.to(part.a.device)
                parts.append(HeldChunk(part.a[where], part.c[where]))
            else:
                parts.append(part.select(mine))
        size = COPIES * sum(part.n_rows for part in parts) * self.n_features * self.a.element_size()
        if size <= self.memory:
            parts = [self._joined(part.read() for part in parts)]
        return self._with(parts, self.a, self.dims, counts.tolist())

    def in_directions(self, directions: Tensor, dims: Sequence[int]) -> ShardedObjective:
        """The objective in coordinates `directions`ᵀ a; these are held in memory, also those of files."""
        template = self.a @ directions
        coordinates = ((part.a @ directions, part.c @ directions) for part in self._objectives())
        return self._with([self._joined(coordinates, template)], template, dims, self.counts)

    def _joined(self, rows: Iterator[tuple[Tensor, Tensor]], template: Tensor | None = None) -> HeldChunk:
        none = self.a if template is None else template
        pairs = [(none, none), *rows]
        return HeldChunk(torch.cat([a for a, _ in pairs]), torch.cat([c for _, c in pairs]))

    def _with(
        self, parts: Sequence[HeldChunk | Rows], template: Tensor, dims: Sequence[int], counts: Sequence[int]
    ) -> ShardedObjective:
        return ShardedObjective(parts, self.ranks, template, dims, self.q, counts, self.memory, self.n_total)

    def evaluate(self, basis: Tensor) -> ShardedEvaluation:
        """The objective at U = `basis` (D, D): products as in `Objective`; K numbers are sent.

        Samples in files are read once, and also give the gradient then: four products of N×D×D.
        """
        squares = torch.zeros(self.n_subspaces, dtype=torch.float64, device=self.a.device)
        parts: list[Evaluation] = []
        gradient = None if self.in_memory else torch.zeros_like(basis)
        for objective in self._objectives():
            at = objective.evaluate(basis)
            squares += at.relevance.square().sum(0)
            if gradient is not None:
                gradient += objective.gradient(replace(at, factors=torch.ones_like(at.factors)))
                at = replace(at, activations=self.a, contexts=self.a)
            parts.append(at)
        value, means, factors = self._from_squares(self.ranks.sum(squares).to(self.a))
        parts = [replace(at, value=value, block_means=means, factors=factors) for at in parts]
        none = self.a.new_zeros(0, self.n_subspaces)
        return ShardedEvaluation(value, means, self.a, self.a, none, factors, basis, tuple(parts), gradient)

    def gradient(self, at: Evaluation) -> Tensor:
        """Euclidean gradient ∂J/∂U, shape (D, D); D² numbers are sent."""
        return self.ranks.sum(self._own_gradient(_sharded(at)))

    def _own_gradient(self, at: ShardedEvaluation) -> Tensor:
        if at.unscaled_gradient is not None:
            return at.unscaled_gradient * (self.membership @ at.factors)
        total = torch.zeros_like(at.basis)
        for objective, part in zip(self._objectives(), at.parts, strict=True):
            total += objective.gradient(part)
        return total

    def tangent_gradient(self, at: Evaluation) -> Tensor:
        """As in `Objective`; D² numbers are sent."""
        at = _sharded(at)
        if at.unscaled_gradient is not None:
            whole = at.basis.T @ self._own_gradient(at)
            total = below_blocks(whole - whole.T, self.columns)
        else:
            total = torch.zeros_like(at.basis)
            for objective, part in zip(self._objectives(), at.parts, strict=True):
                total += objective.tangent_gradient(part)
        return self.ranks.sum(total)

    def curvature(self, at: Evaluation) -> Curvature:
        """As in `Objective`, from the same samples; Σ d_k² and D² numbers are sent."""
        at = _sharded(at)
        stride = max(1, self.n_samples // CURVATURE_SAMPLES)
        first = sum(self.counts[: self.ranks.rank])
        sums = [self.a.new_zeros(here.stop - here.start, here.stop - here.start) for here in self.columns]
        picked = []
        for objective, part in zip(self._objectives(), at.parts, strict=True):
            if not self.in_memory:
                part = replace(objective.evaluate(at.basis), factors=at.factors)
            for total, matrix in zip(sums, objective._contrasts(part), strict=True):
                total += matrix
            some = slice(-first % stride, None, stride)  # those whose number over all ranks it divides
            picked.append((part.activations[some], part.contexts[some], part.relevance[some]))
            first += objective.n_samples
        flat = self.ranks.sum(torch.cat([matrix.flatten() for matrix in sums]))
        pieces = flat.split([matrix.numel() for matrix in sums])
        sums = [piece.view_as(matrix) for piece, matrix in zip(pieces, sums, strict=True)]
        rotations = [torch.linalg.eigh(matrix + matrix.T).eigenvectors for matrix in sums]
        factors = at.factors * (self.n_samples / len(range(0, self.n_samples, stride)))
        diagonal = self.a.new_zeros(self.n_features, self.n_features)
        if picked:
            activations, contexts, relevance = (torch.cat(rows) for rows in zip(*picked, strict=True))
            diagonal += self._diagonal(rotations, activations, contexts, relevance, factors)
        return Curvature(rotations, self.ranks.sum(diagonal))

    def shares(self, at: Evaluation) -> Tensor:
        """What each sample of all ranks adds to J, shape (N,)."""
        return self._of_all([(part.weights * part.relevance).sum(1) for part in _sharded(at).parts])

    def pair_relevance(self) -> Tensor:
        """Relevance a_n·c_n of each pair of all ranks, shape (N,)."""
        return self._of_all([objective.pair_relevance() for objective in self._objectives()])

    def _of_all(self, numbers: list[Tensor]) -> Tensor:
        return self.ranks.rows(torch.cat([self.a.new_zeros(0), *numbers]))

    def moments(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """As in `Objective`, for weights (N,) of the samples of all ranks."""
        first = sum(self.counts[: self.ranks.rank])
        total = self.a.new_zeros(2, self.n_features, self.n_features, dtype=torch.float64)
        for objective in self._objectives():
            end = first + objective.n_samples
            total += torch.stack(objective.moments(weights[first:end]))
            first = end
        of_a, of_c = self.ranks.sum(total)
        return of_a, of_c

    def linearised(self, at: Evaluation, directions: Tensor) -> Tensor:
        """As in `Objective`; one matrix (r, r) for each block is sent."""
        r = directions.shape[1]
        total = self.a.new_zeros(len(self.columns), r, r)
        for objective, part in zip(self._objectives(), _sharded(at).parts, strict=True):
            total += objective.linearised(part, directions)
        return self.ranks.sum(total)


def _sharded(at: Evaluation) -> ShardedEvaluation:
    if not isinstance(at, ShardedEvaluation):
        raise TypeError(f"expected what this objective's evaluate returned, got {type(at).__name__}")
    return at


class Samples(Protocol):
    """Pairs whose scale does not matter any more."""

    @property
    def n_samples(self) -> int:
        """Number N of pairs, of all ranks."""

    @property
    def template(self) -> Tensor:
        """An empty tensor (0, D) with the dtype and device of the pairs."""

    @property
    def provenance(self) -> Any:
        """A `Provenance`, or None."""

    def objective(self, dims: Sequence[int], q: float, balance: float) -> Objective:
        """The objective on normalised pairs (Note E)."""

    def mean_relevance(self, subspaces: Subspaces) -> Tensor:
        """E[(U_kᵀa)ᵀ(U_kᵀc)] up to a factor that is the same for all, shape (K,)."""

    def seed(self, seed: int | None) -> int | None:
        """The seed on all ranks."""


class HeldSamples:
    """Pairs in the memory of one process.

    Parameters
    ----------
    a, c : tensor, shape (N, D)
        Checked.
    provenance : Provenance or None
    """

    def __init__(self, a: Tensor, c: Tensor, provenance: Any) -> None:
        check_nonzero(a, c)
        # Neither the objective nor the order of the blocks depends on the scale of the data.
        self.a, self.c, self.provenance = unit_scale(a)[0], unit_scale(c)[0], provenance
        self.n_samples, self.template = len(a), a[:0]

    def objective(self, dims: Sequence[int], q: float, balance: float) -> Objective:
        """The objective on normalised pairs (Note E)."""
        a, c = balanced(self.a, self.c, balance)
        return Objective(normalise(a), normalise(c), dims, q)

    def mean_relevance(self, subspaces: Subspaces) -> Tensor:
        """E[(U_kᵀa)ᵀ(U_kᵀc)] up to a factor, shape (K,)."""
        return subspaces.relevance(self.a, self.c).mean(0)

    def seed(self, seed: int | None) -> int | None:
        """The seed."""
        return seed


class ShardedSamples:
    """Pairs on several ranks or in files. Every number is one of all ranks, so every rank has the same."""

    def __init__(self, shards: PairShards) -> None:
        self.shards, self.provenance = shards, shards.provenance
        self.n_samples = len(shards)
        device = next((chunk.read()[0].device for chunk in shards.chunks), torch.device("cpu"))
        self.template = torch.empty(0, shards.n_features, dtype=shards.dtype, device=device)
        largest = self._largest(shards.chunks)
        self._exponents = [math.frexp(value)[1] for value in largest]
        if self.n_samples:
            check_nonzero(*torch.tensor(largest, dtype=torch.float64))

    def _largest(self, chunks: Iterable[Chunk | Rows]) -> list[float]:
        """The largest moduli of a and of c."""
        here = torch.zeros(1, 2, dtype=torch.float64)
        for chunk in chunks:
            pair = chunk.read()
            for x, name in zip(pair, ("a (activations)", "c (contexts)"), strict=True):
                check_finite(x, name)
            found = [float(x.abs().amax()) if x.numel() else 0.0 for x in pair]
            here = torch.maximum(here, torch.tensor([found], dtype=torch.float64))
        return self.shards.ranks.rows(here).amax(0).tolist()

    def _scaled(self, a: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        a, c = (times_power_of_two(x, -e) for x, e in zip((a, c), self._exponents, strict=True))
        return a, c

    def objective(self, dims: Sequence[int], q: float, balance: float) -> ShardedObjective:
        """The objective on normalised pairs (Note E); three passes over them."""

        def levelled(a: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            return balanced(*self._scaled(a, c), balance)

        # The steps of `normalise`, with numbers of all ranks.
        largest = self._largest(Rows(chunk, levelled) for chunk in self.shards.chunks)
        exponents = [math.frexp(value)[1] for value in largest]
        squares = torch.zeros(2, dtype=torch.float64)
        for chunk in self.shards.chunks:
            pair = levelled(*chunk.read())
            for i in range(2):
                squares[i] += times_power_of_two(pair[i], -exponents[i]).double().square().sum().cpu()
        n_features = self.shards.n_features
        roots = (self.shards.ranks.sum(squares) / (self.n_samples * n_features)).sqrt()
        divisors = (roots * n_features**0.25).to(self.template)

        def prepare(a: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            a, c = (times_power_of_two(x, -exponents[i]) / divisors[i] for i, x in enumerate(levelled(a, c)))
            return a, c

        rows = [Rows(chunk, prepare) for chunk in self.shards.chunks]
        held = self.shards.in_memory
        parts = [HeldChunk(*part.read()) for part in rows] if held else rows
        return ShardedObjective(
            parts, self.shards.ranks, self.template, dims, q, self.shards.counts, self.shards.memory
        )

    def mean_relevance(self, subspaces: Subspaces) -> Tensor:
        """E[(U_kᵀa)ᵀ(U_kᵀc)] up to a factor, shape (K,)."""
        total = torch.zeros(subspaces.n_subspaces, dtype=torch.float64, device=self.template.device)
        for chunk in self.shards.chunks:
            total += subspaces.relevance(*self._scaled(*chunk.read())).double().sum(0)
        return self.shards.ranks.sum(total) / self.n_samples

    def seed(self, seed: int | None) -> int | None:
        """The seed; where there is none, one that all ranks share."""
        if seed is None and self.shards.ranks.size > 1:
            return int(self.shards.ranks.from_first(secrets.randbits(63)))
        return seed
