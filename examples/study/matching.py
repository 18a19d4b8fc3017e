"""Showcase 2, insight: which concepts are specific to which classes (section 6.2, Note J.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from drsa_core.checks import as_float, as_int, as_int_labels, check_matrix
from torch import Tensor


@dataclass(frozen=True)
class ClassConceptTable:
    """Concept k is specific to class ω if Q_α[R_k | ω] > Q_β[R_k] (Eq. 13)."""

    classes: tuple[int, ...]
    """The classes ω, in ascending order: rows."""
    class_quantiles: Tensor
    """Q_α[R_k | ω], shape (n_classes, K)."""
    overall_quantiles: Tensor
    """Q_β[R_k] over the images of all classes, shape (K,)."""
    alpha: float
    beta: float

    @property
    def specific(self) -> Tensor:
        """Whether concept k is specific to the class, bool, shape (n_classes, K)."""
        return self.class_quantiles > self.overall_quantiles

    @property
    def shared(self) -> list[int]:
        """Concepts that are specific to more than one class."""
        return (self.specific.sum(0) > 1).nonzero()[:, 0].tolist()

    def concepts_of(self, label: int) -> list[int]:
        """The concepts that are specific to a class."""
        label = as_int(label, "label")
        if label not in self.classes:
            raise ValueError(f"class {label} is not in the table; the classes are {self.classes}")
        return self.specific[self.classes.index(label)].nonzero()[:, 0].tolist()

    def classes_of(self, concept: int) -> list[int]:
        """The classes to which a concept is specific."""
        concept, n_concepts = as_int(concept, "concept"), self.specific.shape[1]
        if not 0 <= concept < n_concepts:
            raise ValueError(f"concept {concept} does not exist; there are {n_concepts}, counted from 0")
        return [self.classes[i] for i in self.specific[:, concept].nonzero()[:, 0].tolist()]

    def prototypes(self, relevance: Tensor, labels: Tensor) -> dict[int, int]:
        """The image of each class that shows all of its concepts: arg max_n min_{k ∈ K_ω} R_kn (section 6.2).

        Parameters
        ----------
        relevance : tensor, shape (N, K)
        labels : tensor of int, shape (N,)

        Returns
        -------
        dict
            From class to the number of its image. Classes without a concept of their own are left out.
        """
        relevance, labels = check_labelled(relevance, labels)
        if relevance.shape[1] != len(self.overall_quantiles):
            raise ValueError(
                f"relevance must have the table's {len(self.overall_quantiles)} concepts, got "
                f"{relevance.shape[1]}"
            )
        found = {}
        for label in self.classes:
            members, concepts = (labels == label).nonzero()[:, 0], self.concepts_of(label)
            if concepts and len(members):
                weakest = relevance[members][:, concepts].amin(1)
                found[label] = int(members[weakest.argmax()])
        return found

    def to_text(self, names: Sequence[str] | None = None) -> str:
        """The table as text: Q_α[R_k | ω] for each class, starred where it is above the last row, Q_β[R_k].

        `names` are the names of the classes, in the order of `classes`.
        """
        names = names_of(names, self.classes)
        first = f"Q{self.beta:g} of all"
        width = max(len(first), *map(len, names))
        n_concepts = len(self.overall_quantiles)
        lines = [" " * width + "".join(f"{f'S{k + 1}':>9}" for k in range(n_concepts))]
        for name, values, stars in zip(
            names, self.class_quantiles.tolist(), self.specific.tolist(), strict=True
        ):
            cells = [f"{v:8.3g}" + ("*" if s else " ") for v, s in zip(values, stars, strict=True)]
            lines.append(f"{name:<{width}}" + "".join(cells))
        lines.append(f"{first:<{width}}" + "".join(f"{v:8.3g} " for v in self.overall_quantiles.tolist()))
        return "\n".join(lines)


def match_concepts(
    relevance: Tensor, labels: Tensor, alpha: float = 0.75, beta: float = 0.85
) -> ClassConceptTable:
    """Find which concepts are specific to which classes: Q_α[R_k | ω] > Q_β[R_k] (Eq. 13).

    Parameters
    ----------
    relevance : tensor, shape (N, K)
        R_k = Σ_i R_ik of each image, for its own class.
    labels : tensor of int, shape (N,)
        Class ω of each image. The paper takes as many images of each.
    alpha, beta : float
        Quantiles of the class and of all images, α < β: a concept need not be there in all images of its
        class. Quantiles between two samples are interpolated linearly.
    """
    alpha, beta = as_float(alpha, "alpha"), as_float(beta, "beta")
    if not 0 <= alpha < beta <= 1:
        raise ValueError(f"alpha and beta must satisfy 0 ≤ alpha < beta ≤ 1, got {alpha!r} and {beta!r}")
    relevance, labels = check_labelled(relevance, labels)
    classes = tuple(labels.unique().tolist())
    if len(classes) < 2:
        raise ValueError(
            f"a concept is specific to a class against others; labels hold only class {classes[0]}"
        )
    of_classes = torch.stack([relevance[labels == label].quantile(alpha, dim=0) for label in classes])
    return ClassConceptTable(classes, of_classes, relevance.quantile(beta, dim=0), alpha, beta)


def check_labelled(relevance: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return relevance (N, K), finite, and its N class labels, both on the CPU."""
    relevance = check_matrix(relevance, "relevance").cpu()
    return relevance, as_int_labels(labels, len(relevance), "row of relevance")


def names_of(names: Sequence[str] | None, classes: tuple[int, ...]) -> list[str]:
    """Names of classes: as given, one for each, or their numbers."""
    if names is None:
        return [str(label) for label in classes]
    if len(names) != len(classes):
        raise ValueError(f"names must be {len(classes)} strings, one for each class, got {len(names)}")
    return [str(name) for name in names]
